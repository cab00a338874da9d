"""`kvpolicy doctor`: what is installed, what will be hooked, and whether a launch would be refused."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpolicy.sglang_plugin.doctor import examine
from kvpolicy.sglang_plugin.doctor_findings import HOOKS, SECTIONS, Finding, Status

_COLOURS = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}
_EPILOG = """\
Starts no engine and loads no weights; it imports SGLang and lets it load its plugins, which takes most of the time.

  kvpolicy doctor                                      is this machine ready, and what would be hooked
  kvpolicy doctor --kv-policy vase-dkv --kv-budget 64  would these arguments be refused
  kvpolicy doctor --model Qwen/Qwen3-4B --kv-policy vase-attnv
                                                       does the policy fit the model, and what serves it
  kvpolicy doctor --model Qwen/Qwen3-4B --kv-policy vase-dkv -- --tp-size 2 --page-size 16
                                                       the same with SGLang's own flags, behind a double dash

The exit status is 1 if something that a launch needs is wrong, with a sentence on each; notes do not count.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The launch to look at: kvpolicy's own flags, a model, SGLang's flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--model", metavar="PATH_OR_ID", help="folder or hub id of the model that would be served")
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    parser.add_argument(
        "server_flags", nargs="*", metavar="-- FLAG", help="flags of sglang serve, behind a double dash"
    )
    if importlib.util.find_spec("torch") is not None:
        from kvpolicy.sglang_plugin.config import ARGUMENTS
        from kvpolicy.sglang_plugin.flags import add_flags

        add_flags(parser)
        parser.set_defaults(kv_names=tuple(ARGUMENTS))
        return
    # Without PyTorch kvpolicy's flags are not known. Those that are given pass, for the report to say what is missing.
    for flag in sorted({word.partition("=")[0] for word in sys.argv if word.startswith("--kv-")}):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.set_defaults(kv_names=())


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 if a launch would fail."""
    logging.getLogger("sglang").setLevel(logging.CRITICAL)  # what it logs as errors is found, and said, below
    with contextlib.redirect_stdout(sys.stderr):  # imports print
        arguments = {name: getattr(args, name) for name in args.kv_names}
        findings = examine(arguments, args.model, args.server_flags, args.trials)
    failed = any(finding.status is Status.PROBLEM for finding in findings)
    if args.json:
        report = {"ok": not failed, "findings": [finding.record() for finding in findings]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        show(findings, Console(highlight=False))
    return int(failed)


def show(findings: Sequence[Finding], console: Console) -> None:
    """A table for each section, then a sentence for each thing to do, then the notes."""
    for section in SECTIONS:
        rows = [finding for finding in findings if finding.section == section]
        if rows:
            console.print(hook_table(rows) if section == HOOKS else plain_table(section, rows))
    for status, heading in ((Status.PROBLEM, "To do"), (Status.NOTE, "Notes")):
        told = list(dict.fromkeys(finding.advice for finding in findings if finding.status is status))
        if told:
            console.print(f"\n[{_COLOURS[status]}]{heading}")
        for number, advice in enumerate(told, start=1):
            console.print(f"{number:>3}. {escape(advice)}", soft_wrap=True)
    if all(finding.status is not Status.PROBLEM for finding in findings):
        console.print("\n[green]Nothing stands in the way of a launch.")


def plain_table(section: str, rows: Sequence[Finding]) -> Table:
    """What, what was found."""
    table = Table(title=SECTIONS[section], title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    for row in rows:
        table.add_row(escape(row.name), escape(row.found), f"[{_COLOURS[row.status]}]{row.status}")
    return table


def hook_table(rows: Sequence[Finding]) -> Table:
    """Function, how it is hooked, the parameters that the hook relies on; by when it is hooked."""
    table = Table(title=SECTIONS[HOOKS], title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", max_width=24)
    previous: Any = None
    for row in rows:
        when = row.more.get("when")
        if when != previous:
            table.add_section()
            table.add_row(f"[bold]{when}", "")
        relies = f"\n[dim]{row.more['kind']}; relies on {', '.join(row.more['parameters'])}" if when else ""
        table.add_row(escape(row.name) + relies, f"[{_COLOURS[row.status]}]{escape(row.found)}")
        previous = when
    return table
