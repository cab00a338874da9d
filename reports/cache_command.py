"""`kvpolicy cache`: a table of what happened to the KV cache in an lm-eval output folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvpolicy.reports.cache_summary import CacheSummary, summarize
from kvpolicy.reports.lmeval_output import OutputError, newest_runs

_EPILOG = """\
Reads the newest run of each model and task: results_*.json and samples_*.jsonl of lm_eval --log_samples.
Fails if there are no samples, if no response carries a kv_policy record, or if a policy evicted nothing although
responses exceeded its budget."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder, and where to put the numbers."""
    parser.epilog = _EPILOG
    parser.add_argument("output_dir", type=Path, help="folder that lm_eval --output_path was given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")


def run(args: argparse.Namespace) -> int:
    """Print one table per model and task."""
    try:
        summaries = [summarize(task) for task in newest_runs(args.output_dir)]
    except OutputError as error:
        raise SystemExit(f"kvpolicy cache: {error}") from None
    if args.json is not None:
        numbers = {"output_dir": str(args.output_dir), "tasks": [dataclasses.asdict(summary) for summary in summaries]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console = Console()
    for summary in summaries:
        console.print(table_of(summary))
        for warning in warnings_of(summary):
            console.print(f"[bold yellow]warning:[/] {warning}")
    return 0


def table_of(summary: CacheSummary) -> Table:
    """Quantity, what was measured, what the full cache would have held, share."""
    s, mib = summary, 2**20
    compacted = s.responses - s.responses_without_record - s.responses_not_compacted
    settings = f"{s.policy}, budget {s.budget}, period {s.period}, seed {s.seed}" + (
        f", {s.options}" if s.options else ""
    )
    if s.kv_quant is not None:
        settings += f"\nkv_quant {s.kv_quant}, {s.bits_per_element:.2f} bits per element"
    table = Table(
        title=f"KV cache of {s.task}\n{s.model}\n{settings}",
        caption="Tokens per layer and KV head; means over responses.\n"
        f"Mean of their shares, lm-eval's kv_policy: {s.held_share:.4f}",
    )
    table.add_column("")
    for heading in ("measured", "full cache", "share"):
        table.add_column(heading, justify="right")
    table.add_row("responses", f"{s.responses}")
    table.add_row("  compacted at least once", f"{compacted}", "", f"{compacted / s.responses:.0%}")
    table.add_row("decode steps a response", f"{s.decode_steps_mean:.1f}")
    table.add_row("evictions", f"{s.evictions}")
    table.add_row("  a response", f"{s.evictions_mean:.1f}")
    table.add_row("tokens evicted", f"{s.tokens_evicted}", end_section=True)
    for name, held, full in (
        ("resident tokens, mean", s.resident_mean, s.full_mean),
        ("  at the peak, mean", s.resident_peak_mean, s.full_end_mean),
        ("  at the end, mean", s.resident_end_mean, s.full_end_mean),
        ("  largest", s.resident_peak, s.full_peak),
    ):
        table.add_row(name, f"{held:.1f}", f"{full:.1f}", _percent(held, full))
    table.add_section()
    for name, held, full in (
        ("KV bytes of a response, mean", s.kv_bytes_mean, s.kv_bytes_full_mean),
        ("  largest", s.kv_bytes_peak, s.kv_bytes_full_peak),
    ):
        table.add_row(name, f"{held / mib:.2f} MiB", f"{full / mib:.2f} MiB", _percent(held, full))
    return table


def _percent(held: float, full: float) -> str:
    return f"{held / full:.1%}" if full else ""


def warnings_of(summary: CacheSummary) -> list[str]:
    """What makes the numbers less than they seem, one sentence each."""
    warnings = []
    if summary.responses_without_record:
        warnings.append(
            f"{summary.responses_without_record} of {summary.responses} responses carry no record; "
            "the numbers leave them out."
        )
    if summary.responses_missed:
        warnings.append(
            f"{summary.responses_missed} responses exceeded {summary.budget} + {summary.period} tokens "
            "and were never compacted."
        )
    if summary.evictions_deferred:
        warnings.append(
            f"{summary.evictions_deferred} evictions were put off for want of free slots; a larger KV pool avoids it."
        )
    return warnings
