"""`kvpolicy calibrate`: the query statistics of a model that `triattention` scores by."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from kvpolicy.reports.text_input import TextError, file_text, sample_text

if TYPE_CHECKING:
    from kvpolicy.policies.query_statistics import QueryStatistics

_EPILOG = """\
Loads the model with transformers and reads the text once, with full attention. Of each query head it writes the mean
query before RoPE and the mean length, to be used as --kv-policy triattention --kv-options stats:FILE. Best is a text
like those to come, for example answers of the model in its chat format. Without --text: 24 problems of GSM8K with
their solutions, about 4000 tokens."""


class CalibrationError(Exception):
    """What is wrong, as a sentence without its full stop."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, text, file and sizes."""
    parser.epilog = _EPILOG
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the hub")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="file of the statistics (.safetensors)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text in UTF-8")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the text to read, at most (32768)")
    bounds = "tokens in one forward pass (2048): bounds memory, not what a token sees"
    parser.add_argument("--window", type=int, default=2048, help=bounds)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", help="as PyTorch calls it; by default a GPU if there is one")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")


def run(args: argparse.Namespace) -> int:
    """Write the file, whole or not at all."""
    from kvpolicy.policies.query_statistics import replacing, serialized

    try:
        _check_arguments(args)
        text = _text(args.text)
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(args.out) as file:
                statistics = _statistics(args, text)
                file.write(serialized(statistics))
        except OSError as error:
            raise CalibrationError(f"--out {args.out} cannot be written: {error.strerror or error}") from None
    except CalibrationError as error:
        raise SystemExit(f"kvpolicy calibrate: {error}.") from None
    shape = statistics.shape
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{args.out}: {shape.layers} layers of {shape.query_heads} query heads, {statistics.tokens} tokens.\n"
        f"Use it with: --kv-policy triattention --kv-options stats:{args.out}",
        markup=False,
    )
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    for name in ("tokens", "window"):
        if getattr(args, name) < 1:
            raise CalibrationError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.out.is_dir():
        raise CalibrationError(f"--out {args.out} is a folder; it must name a file")
    if args.out.exists() and not args.force:
        raise CalibrationError(f"--out {args.out} is there already; --force replaces it")


def _text(path: Path | None) -> str:
    """The text of a file, or problems and solutions of the sample, without the marks of GSM8K's calculator."""
    if path is None:
        return sample_text()
    try:
        text = file_text(path)
    except TextError as error:
        raise CalibrationError(str(error)) from None
    if not text.strip():
        raise CalibrationError(f"--text {path} is empty")
    return text


def _statistics(args: argparse.Namespace, text: str) -> QueryStatistics:
    from kvpolicy.reports.query_capture import CaptureError, capture

    model, ids = _loaded(args, text)
    name = Path(args.model).resolve().name if Path(args.model).exists() else args.model
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("queries", total=len(ids))
        try:
            return capture(
                model, ids, window=args.window, name=name, advance=lambda tokens: progress.advance(task, tokens)
            )
        except CaptureError as error:
            raise CalibrationError(str(error)) from None


def _loaded(args: argparse.Namespace, text: str) -> tuple[Any, list[int]]:
    """The model, and the tokens of the text that it is to read."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        words = AutoTokenizer.from_pretrained(args.model)
        model = AutoModel.from_pretrained(args.model, dtype=args.dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise CalibrationError(f"--model {args.model} cannot be loaded: {reason}") from None
    try:
        model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise CalibrationError(f"--device {device} cannot hold the model: {reason}") from None
    limit = min(args.tokens, getattr(model.config, "max_position_embeddings", args.tokens))
    ids: list[int] = words(text, verbose=False)["input_ids"][:limit]
    if not ids:
        raise CalibrationError("the text has no tokens")
    return model, ids
