"""`kvpolicy epikv-bands`: which layers EpiKV should compare in a model, measured by occluding tokens."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from kvpolicy.reports.epikv.bands import LEVEL, Bands, Correlation, correlations, propose
from kvpolicy.reports.epikv.occlusion import BandsError, decoder_layers, hidden_changes, importances, load
from kvpolicy.reports.text_input import TextError, file_text, sample_problems

SAMPLE = "gsm8k_sample"
LEAST_TOKENS = 16

_EPILOG = """\
Hides one token at a time from all tokens after it and measures how far the model's predictions move: the token's
importance. Band A is proposed where the change of hidden state from token to token goes with importance most, band B
where it goes against it most, with intervals for what so few tokens can show. FOLDER gets bands.json (importance and
changes of every measured token, correlation of every layer) and bands.png. The published bands come from a model of 32
layers and, by the authors' code, from another measure: whether the answer changes when a reasoning trace is written
anew from a window of 32 tokens on, against the mean change over 64 tokens. Cost: one forward pass of the text per
measured token, and logits of batch + 1 texts in memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the text, and how much of it is measured."""
    parser.epilog = _EPILOG
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model of transformers")
    parser.add_argument("--text", type=Path, metavar="FILE", help=f"text to measure on (default: {SAMPLE}, solved)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder for the results")
    parser.add_argument("--length", type=int, default=512, help="use so many tokens of the text (default 512)")
    parser.add_argument("--tokens", type=int, help="measure so many, evenly spaced (default: all)")
    parser.add_argument(
        "--horizon", type=_horizon, default=64, help="later tokens whose prediction counts, or all (default 64)"
    )
    parser.add_argument("--batch", type=int, default=8, help="tokens occluded in one forward pass (default 8)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model (default float32)"
    )


def _horizon(text: str) -> int | None:
    try:
        return None if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number or all, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Measure, write the folder, print the bands as `kv_options`."""
    try:
        _check(args)
        with _whole_folder(args.out) as folder:
            found, bands, tokens = _measure(args, folder)
    except BandsError as error:
        raise SystemExit(f"kvpolicy epikv-bands: {error}") from None
    print(f"{args.model}: {len(found)} layers, {tokens} tokens measured, rho {bands.b.rho:+.3f} to {bands.a.rho:+.3f}")
    print(bands.options)
    if (bands.a_first, bands.b_first) != (bands.a_last, bands.b_last):
        print(f"or, averaged over adjacent layers: {bands.wide_options}")
    print(bands.verdict)
    print(f"{args.out} holds bands.json and bands.png")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("length", LEAST_TOKENS + 2), ("tokens", LEAST_TOKENS), ("horizon", 1), ("batch", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise BandsError(f"--{name} must be at least {least}, got {value}.")
    for package in ("transformers", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise BandsError(f"this command needs {package}, which is not installed: pip install {package}.")


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` if all goes well, and leaves nothing if it does not."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise BandsError(f"--out {target} exists already; name a new folder.")
    partial = target.parent / f".{target.name}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise BandsError(f"--out {target} cannot be written: {error.strerror or error}.") from None


def _measure(args: argparse.Namespace, folder: Path) -> tuple[list[Correlation], Bands, int]:
    """Fill `folder`; the correlations, the bands, and how many tokens were measured."""
    text = _text(args.text)
    model, tokenizer = load(args.model, args.dtype)
    ids = torch.tensor(tokenizer(text, truncation=True, max_length=args.length).input_ids, device=model.device)
    if len(ids) < LEAST_TOKENS + 2:
        raise BandsError(f"--text has {len(ids)} tokens, too few to say anything: at least {LEAST_TOKENS + 2}.")
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and len(ids) > longest:
        raise BandsError(f"--length {args.length} is more than the {longest} tokens that {args.model} can read.")
    if (depth := len(decoder_layers(model))) < 3:
        raise BandsError(f"--model {args.model} has {depth} layers; two bands and a last layer need at least 3.")
    # The first token has none before it, the last none after it.
    places = torch.linspace(1, len(ids) - 2, min(args.tokens or len(ids), len(ids) - 2)).round().int().tolist()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("occluding tokens", total=len(places))

        def advance(count: int) -> None:
            progress.advance(task, count)

        try:
            changes = hidden_changes(model, ids)[:, [place - 1 for place in places]]
            moved = importances(model, ids, places, horizon=args.horizon, batch=args.batch, advance=advance)
        except torch.OutOfMemoryError:
            raise BandsError("out of memory; lower --batch, --horizon or --length.") from None
    if not (moved.isfinite().all() and changes.isfinite().all()):
        raise BandsError(f"the model's output is not finite in {args.dtype}; try --dtype float32.")
    if not moved.any():
        raise BandsError(f"hiding a token changes nothing: {args.model} does not read its attention mask.")
    found = correlations(moved, changes)
    bands = propose(found)
    labels = [
        {"position": place, "text": tokenizer.decode([int(ids[place])]), "importance": value, "hidden_change": change}
        for place, value, change in zip(places, moved.tolist(), changes.T.tolist(), strict=True)
    ]
    document = _document(args, len(ids), found, bands, labels)
    (folder / "bands.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    from kvpolicy.reports.epikv.bands_plot import draw

    draw(folder / "bands.png", found, bands, f"{Path(args.model).name}: {len(places)} tokens")
    return found, bands, len(places)


def _text(path: Path | None) -> str:
    if path is None:
        return "\n\n".join(f"Question: {row['question']}\nAnswer: {row['solution']}" for row in sample_problems())
    try:
        return file_text(path)
    except TextError as error:
        raise BandsError(f"{error}.") from None


def _document(
    args: argparse.Namespace, length: int, found: list[Correlation], bands: Bands, labels: list[dict[str, Any]]
) -> dict[str, Any]:
    """What bands.json holds."""
    return {
        "model": args.model,
        "text": str(args.text or SAMPLE),
        "text_tokens": length,
        "horizon": args.horizon or "all",
        "dtype": args.dtype,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "n": len(labels),
        "level": LEVEL,
        "options": bands.options,
        "wide_options": bands.wide_options,
        "supported": {"band_a": bands.a_supported, "band_b": bands.b_supported},
        "verdict": bands.verdict,
        "layers": [correlation._asdict() for correlation in found],
        "tokens": labels,
    }
