"""`kvpolicy ab-budgets`: budgets and formats of equal mean KV bytes, from a model's configuration alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvpolicy.quant.cache_format import FORMATS, KEY_FORMATS, CacheFormat
from kvpolicy.reports.ab.arms import AbError, items
from kvpolicy.reports.ab.budgets import Choice, Pool, Text, arm_text, choose, formats, stored, weighted, whole
from kvpolicy.reports.ab.budgets_inputs import lengths_of, shape_of
from kvpolicy.reports.lmeval_output import OutputError

MIB, GIB = 2**20, 2**30
WIDTH = 120  # of the table
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_EPILOG = """\
  kvpolicy ab-budgets --model Qwen/Qwen3-4B --pool-gib 8 --requests 16 --length 16384
  kvpolicy ab-budgets --model Qwen/Qwen3-4B --pool-gib 8 --as kv_quant=range-int4 --like out/ab/full

The target is the mean KV bytes of a request: the pool over its requests, or what the format of --as takes without
eviction. Each line is a way to store tokens, and the budget that makes it take the target; those within 2 % are printed
as --arm of kvpolicy ab. Responses of other lengths have other means: --like takes the lengths of a run that is there,
and the report of kvpolicy ab says what was really held."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, memory, lengths, and which ways to store tokens are shown."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--model", required=True, help="folder or hub id; only its configuration is read")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--pool-gib", type=float, metavar="GIB", help="of the engine's KV pool")
    memory.add_argument(
        "--request-mib", type=float, metavar="MIB", help="mean of one request; the pool has all of them"
    )
    parser.add_argument("--requests", type=int, default=16, help="max_running_requests of the engine (16)")
    parser.add_argument("--as", dest="like_format", metavar="FORMAT", help="target: this format without eviction")
    lengths = parser.add_argument_group("lengths")
    lengths.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (256)")
    lengths.add_argument("--length", type=int, default=16384, help="tokens of prompt and response (16384)")
    lengths.add_argument(
        "--like", type=Path, metavar="FOLDER", help="lm-eval output: take the lengths of its responses"
    )
    parser.add_argument("--policy", default="vase-dkv", help="that evicts, with its default options (vase-dkv)")
    parser.add_argument("--period", type=int, default=64, help="kv_period (64)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of values (all)")
    parser.add_argument("--keys", default="none,int8", help=f"formats of keys: {', '.join(KEY_FORMATS)} (none,int8)")
    parser.add_argument("--groups", help="channels that share a scale, with commas (the largest that fits)")
    parser.add_argument("--protect", default="0.05", help="shares of protected tokens, with commas (0.05)")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16", help="of the cache (bfloat16)")


def run(args: argparse.Namespace) -> int:
    """Print the table and the arms that match."""
    try:
        choices = _choices(args)
    except (AbError, OutputError) as error:
        raise SystemExit(f"kvpolicy ab-budgets: {error}") from None
    console = Console(highlight=False)
    if console.width < WIDTH:
        console = Console(highlight=False, width=WIDTH)
    console.print(_table(choices, ITEM_BYTES[args.dtype]))
    matched = [choice for choice in choices if choice.matched]
    console.print(
        f"Arms within 2 % of the target of {choices[0].target / MIB:.1f} MiB:" if matched else "No arm matches."
    )
    for choice in matched:
        console.print(f"  --arm {arm_text(choice, args.policy, args.period)}", markup=False, soft_wrap=True)
    return 0


def _choices(args: argparse.Namespace) -> list[Choice]:
    for name in ("pool_gib", "request_mib", "requests", "prompt", "period"):
        if (number := getattr(args, name)) is not None and not number > 0:
            raise AbError(f"--{name.replace('_', '-')} must be above 0, got {number:g}.")
    allowed = _allowed(args.policy, args.period)
    texts = lengths_of(args.like) if args.like is not None else [Text(args.prompt, args.length - args.prompt)]
    if texts[0].steps < 1:
        raise AbError(f"--length {args.length} leaves no response after a prompt of {args.prompt}.")
    groups = [None if each == "fit" else _number(int, "--groups", each) for each in (args.groups or "fit").split(",")]
    shares = [_number(float, "--protect", each) for each in args.protect.split(",")]
    shape = shape_of(args.model, ITEM_BYTES[args.dtype])
    size = args.pool_gib * GIB if args.pool_gib is not None else args.request_mib * MIB * args.requests
    pool = Pool(size, args.requests, args.period)
    target = size / args.requests
    if args.like_format is not None:
        target = stored(shape, _format(args.like_format, shape.head_dim), pool)[0] * weighted(texts, whole)
    ways: list[CacheFormat | None] = [None]
    ways += formats(args.formats.split(","), args.keys.split(","), groups, shares, shape.head_dim)
    return [choose(shape, way, pool, texts, target, args.period, allowed) for way in ways]


def _allowed(name: str, period: int) -> Callable[[int], bool]:
    """Whether a policy works with a budget, of policies that cut budget + period back to the budget."""
    from kvpolicy.policies.registry import policy_type

    try:
        policy = policy_type(name)()
    except (ValueError, TypeError) as error:  # not known, or with options that have no default
        raise AbError(f"--policy: {error}.") from error
    if policy.most_resident(1, period) is None:
        raise AbError(f"--policy {name} does not cut its cache back to a budget; name another one.")

    def allowed(budget: int) -> bool:
        try:
            policy.check(budget, period)
        except ValueError:
            return False
        return True

    return allowed


def _format(text: str, head_dim: int) -> CacheFormat:
    """``range-int4`` or ``kv_quant=range-int4,kv_protect=0.1``."""
    given = items(text, "--as") if "=" in text else {"kv_quant": text}
    known = {"kv_quant", "kv_quant_group", "kv_quant_keys", "kv_protect"}
    if "kv_quant" not in given or (strangers := sorted(given.keys() - known)):
        what = f"it has no {strangers[0]}" if "kv_quant" in given else "it names no kv_quant"
        raise AbError(f"--as {text} is no format: {what}.")
    group = _number(int, "--as kv_quant_group", given["kv_quant_group"]) if "kv_quant_group" in given else None
    share = _number(float, "--as kv_protect", given.get("kv_protect", "0.05"))
    return formats([given["kv_quant"]], [given.get("kv_quant_keys", "none")], [group], [share], head_dim)[0]


def _number(kind: Callable[[str], Any], option: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise AbError(f"{option} takes numbers, got {text!r}.") from None


def _table(choices: list[Choice], item_bytes: int) -> Table:
    title = f"Target: {choices[0].target / MIB:.1f} MiB of KV a request, mean over decode steps"
    table = Table(
        title=title, box=SIMPLE, caption="too small: the policy needs a larger budget than the target has room for"
    )
    table.add_column("values, group, keys, protected", no_wrap=True)
    for heading in ("bits", "of plain", "pool tokens", "whole MiB", "budget", "MiB", "off", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = choices[0].token_bytes
    for choice in choices:
        quant, share = choice.quant, choice.token_bytes / plain
        name = "precision of the model"
        if quant is not None:
            protected = f", {100 * quant.protect:g} %" if quant.protects else ""
            name = f"{quant.name}, {quant.group}, {quant.keys}{protected}"
        small = choice.budget is None and choice.whole_bytes > choice.target
        table.add_row(
            name,
            f"{8 * item_bytes * share:.2f}",
            f"{100 * share:.1f} %",
            str(choice.pool_tokens),
            f"{choice.whole_bytes / MIB:.1f}",
            "too small" if small else "none" if choice.budget is None else str(choice.budget),
            "-" if small else f"{choice.mean_bytes / MIB:.1f}",
            "-" if small else f"{100 * (choice.mean_bytes / choice.target - 1):+.1f} %",
            "matched" if choice.matched else "unmatched",
        )
    return table
