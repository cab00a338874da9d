"""`kvpolicy policies`: all methods in one table, or one of them with what `kv_options` can set."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpolicy.policies.base import Granularity, Policy
from kvpolicy.policies.reading import ReadingPolicy
from kvpolicy.policies.registry import POLICIES
from kvpolicy.sglang_plugin.errors import KVPolicyError

PERIOD = 64  # the default; what some methods read depends on it
WIDE = 120  # columns of a terminal on which a table has a column for everything
_ONE_SET_PER = {
    Granularity.PER_HEAD: "layer and KV head",
    Granularity.PER_LAYER: "layer",
    Granularity.PER_KV_HEAD_INDEX: "KV head index",
    Granularity.GLOBAL: "request",
}


class Overview(NamedTuple):
    """One method's row, as text."""

    policy: str
    score: str
    reads: str
    one_set_per: str
    flash_attention: str
    source: str
    code: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A policy's name, to read its documentation in full."""
    parser.add_argument("name", nargs="?", help="show the documentation and the options of one policy")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/policies.md")
    parser.epilog = (
        "Reads: what the score is computed from, with default options. One set per: who shares one set of kept tokens. "
        "FlashAttention: whether the method as published runs without attention matrices; here all do."
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, or one policy's documentation."""
    if args.name is not None:
        if args.name not in POLICIES:
            raise KVPolicyError(f"{args.name!r} is not a policy; known: {', '.join(POLICIES)}.")
        policy = POLICIES[args.name]()
        options = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(policy))  # type: ignore[arg-type]
        print(inspect.getdoc(policy))
        print(f"\nkv_options: {options}" if options else "\nno options")
        return 0
    rows = [overview(load()) for load in POLICIES.values()]
    if args.markdown:
        print(markdown(rows))
    else:
        console = Console()
        console.print(table(rows, console.width))
    return 0


def overview(policy: type[Policy]) -> Overview:
    """What a policy with default options is, in words."""
    card, default = policy.card, policy()
    return Overview(
        policy=policy.name,
        score=card.score,
        reads=reads(default),
        one_set_per=_one_set_per(default),
        flash_attention="yes" if card.flash_attention else "no",
        source=card.source,
        code=card.code,
    )


def reads(policy: Policy) -> str:
    """What a policy chooses by, beside the age of the tokens."""
    if isinstance(policy, ReadingPolicy):
        return ", ".join(["query of each step", "summaries of pages of keys", *_files(policy)])
    needs = policy.needs(PERIOD)
    parts = []
    if needs.keys:
        parts.append("keys")
    if needs.values:
        parts.append("values")
    if needs.queries and policy.accumulates:
        parts.append("every decode query, in a number carried per token")
    elif needs.queries:
        parts.append(f"last {needs.queries} queries" if needs.queries > 1 else "last query")
    if needs.positions:
        parts.append("positions")
    if bands := needs.hidden_bands:
        layers = all(band.first == band.last for band in bands)
        parts.append(f"hidden states of {len(bands)} {'layers' if layers else 'bands of layers'}")
    return ", ".join(parts + _files(policy)) or "nothing"


def _files(policy: Policy) -> list[str]:
    """Files that options must name: those of the policy, and of one that it builds on."""
    fields = dataclasses.fields(policy)  # type: ignore[arg-type]
    base = getattr(policy, "scorer", None)
    own = [f"a file (option {field.name})" for field in fields if field.default == ""]
    return own + (_files(base) if base is not None else [])


def _one_set_per(policy: Policy) -> str:
    if getattr(policy, "per_query_head", False):
        return "layer and query head"
    return _ONE_SET_PER[policy.shares]


def table(rows: list[Overview], width: int) -> Table:
    """For a terminal of `width` columns; official code is left to the documentation."""
    shown = Table(title="Policies", caption="kvpolicy policies NAME: a method's rule, its source, its options")
    shown.add_column("kv_policy", no_wrap=True)  # the others fold words that are too long, and cut none off
    if width >= WIDE:
        for heading in ("score", "reads", "one set per", "Flash-\nAttention", "source"):
            shown.add_column(heading, overflow="fold")
        for row in rows:
            shown.add_row(*map(escape, row[:6]))
    else:
        shown.show_lines = True
        shown.add_column("score", overflow="fold")
        for row in rows:
            about = f"reads {row.reads}; one set per {row.one_set_per}; FlashAttention: {row.flash_attention}"
            source = f"\n{row.source}" if row.source else ""
            shown.add_row(row.policy, f"{escape(row.score)}\n[dim]{escape(about + source)}")
    return shown


def markdown(rows: list[Overview]) -> str:
    """For docs/policies.md."""
    headings = ("policy", "score", "reads", "one set per", "FlashAttention", "paper", "official code (licence)")
    lines = [headings, ("---",) * len(headings), *((f"`{row.policy}`", *row[1:]) for row in rows)]
    escaped = (" | ".join(cell.replace("|", r"\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in escaped)
