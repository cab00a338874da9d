"""`kvpolicy quant-error`: what low-bit keys and values would do to a model, measured on a text."""

from __future__ import annotations

import argparse
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvpolicy.quant.codec import Codec
from kvpolicy.reports.quant_error.arms import codecs_of, default_codecs
from kvpolicy.reports.quant_error.capture import QuantErrorError
from kvpolicy.reports.quant_error.document import document
from kvpolicy.reports.quant_error.folder import check_folder, whole_folder
from kvpolicy.reports.quant_error.report import Report
from kvpolicy.reports.quant_error.run import Plan, first_line, load, measured
from kvpolicy.reports.quant_error.tables import advice_sentences, arm_blocks
from kvpolicy.reports.quant_error.text import LEAST_TOKENS, read_text, token_ids

TOKENS = 1536
# Column of the page -> heading in the terminal.
SHOWN = {
    "V bits": "V bits",
    "K bits": "K bits",
    "V error": "V error",
    "attention error": "attention",
    "KL mean": "KL",
    "top-1 flips": "flips",
}

_EPILOG = """\
Reads the text once with transformers for every arm, with all cached values (and keys, if asked) stored as the arm says
and read back. FOLDER gets index.html, one page with all figures and what they advise, and report.json with all numbers:
errors of keys and values per layer and KV head, of the attention output, of the next-token distribution; correlation
of value range and error; tails; bits. Each codec is shown plain, with the share of tokens protected by value range,
norm, lot and true error, and beside codecs without protection that cost as many bits. A model of 135M parameters takes
a few minutes on two cores; memory is the model's and the logits of the text twice."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, text, codecs, and where the report goes."""
    parser.epilog = _EPILOG
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model of transformers")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="folder of the report")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text in UTF-8 (default: 24 solved problems of GSM8K)"
    )
    of_values = (
        "of the values, with commas (default: int4 in groups of 64, int2 in groups of 32, or what fits the head)"
    )
    parser.add_argument("--codecs", metavar="NAMES", help=of_values)
    of_keys = "of the keys; only with these is the model run with low-bit keys (default: errors of --codecs, no run)"
    parser.add_argument("--keys-codecs", metavar="NAMES", help=of_keys)
    parser.add_argument("--share", type=float, default=0.05, help="share of the tokens to protect (0.05)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens of the text to read, at most ({TOKENS})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model")
    parser.add_argument("--device", help="as PyTorch calls it; by default a GPU if there is one")
    parser.add_argument("--force", action="store_true", help="replace a report that is in FOLDER")


def run(args: argparse.Namespace) -> int:
    """Measure, write the folder, print the arms."""
    try:
        plan = _plan(args)
        with whole_folder(args.out, args.force) as folder:
            report = measured(load(args.model, args.dtype, args.device), plan, args.model)
            numbers = json.dumps(document(report), allow_nan=False, ensure_ascii=False)
            (folder / "report.json").write_text(numbers + "\n", encoding="utf-8")
            from kvpolicy.reports.quant_error.page import page

            (folder / "index.html").write_text(page(report), encoding="utf-8")
    except QuantErrorError as error:
        raise SystemExit(f"kvpolicy quant-error: {error}.") from None
    console = Console(highlight=False)
    console.print(_summary(report))
    for sentence in advice_sentences(report):
        console.print(sentence, markup=False)
    console.print(f"{args.out} holds index.html and report.json", markup=False, soft_wrap=True)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    """Everything that can be refused without the model's weights."""
    from transformers import AutoConfig, AutoTokenizer

    if args.tokens < LEAST_TOKENS:
        raise QuantErrorError(f"--tokens must be at least {LEAST_TOKENS}, got {args.tokens}")
    if not 0 < args.share <= 0.5:
        raise QuantErrorError(f"--share must be above 0 and at most 0.5, got {args.share:g}")
    check_folder(args.out, args.force)
    text, source = read_text(args.text)
    values, keys = _codecs("--codecs", args.codecs), _codecs("--keys-codecs", args.keys_codecs)
    try:
        config = AutoConfig.from_pretrained(args.model).get_text_config(decoder=True)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError, ImportError) as error:
        raise QuantErrorError(f"--model {args.model} cannot be loaded: {first_line(error)}") from None
    head_dim = _head_dim(config, args.model)
    values = values or default_codecs(head_dim)
    keys = keys or values
    for option, codecs in (("--codecs", values), ("--keys-codecs", keys)):
        for codec in codecs:
            _check_codec(option, codec, head_dim)
    limit = min(args.tokens, getattr(config, "max_position_embeddings", args.tokens))
    ids = token_ids(tokenizer, text, source, limit)
    if Fraction(str(args.share)) * len(ids) < 1:
        raise QuantErrorError(f"--share {args.share:g} of {len(ids)} tokens protects none")
    cache_dtype = torch.float16 if config.dtype == torch.float16 else torch.bfloat16
    return Plan(ids, source, args.share, head_dim, cache_dtype, values, keys, run_keys=args.keys_codecs is not None)


def _head_dim(config: Any, name: str) -> int:
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    if size is None:
        raise QuantErrorError(f"--model {name}, a {config.model_type}, has no attention heads, whose cache is measured")
    return int(size)


def _codecs(option: str, names: str | None) -> list[Codec]:
    try:
        return [] if names is None else codecs_of(names)
    except ValueError as error:
        raise QuantErrorError(f"{option}: {error}") from None


def _check_codec(option: str, codec: Codec, head_dim: int) -> None:
    try:
        codec.round_trip(torch.zeros(1, head_dim))
    except ValueError as error:
        raise QuantErrorError(f"{option} {codec.name}: {error}") from None
    except ModuleNotFoundError as error:
        raise QuantErrorError(str(error)) from None


def _summary(report: Report) -> Table:
    """Means over layers and heads."""
    table = Table(
        title=f"{report.model}, {report.tokens} tokens", caption="errors are relative, KL in nats", box=SIMPLE
    )
    table.add_column("arm", overflow="fold")
    for heading in SHOWN.values():
        table.add_column(heading, justify="right")
    for block in arm_blocks(report):
        for row in block.rows.rows:
            cells = dict(zip(block.rows.header, row, strict=True))
            table.add_row(cells["arm"], *(cells[column] for column in SHOWN))
        table.add_section()
    return table
