"""Markdown tables of the rows of ablation.py.

python benchmarks/ablation_table.py out/ablation/….jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COUNTED = ("correct", "truncated", "looped", "garbage")
AVERAGED = ("tokens", "evictions", "resident_mean", "full_mean")


def report(rows: Sequence[Row]) -> str:
    """Both parts, as far as there are rows, and the conditions of the last of them."""
    parts = [(part, [row for row in rows if row["part"] == part]) for part in ("free", "kl")]
    tables = {"free": free_table, "kl": kl_table}
    last = rows[-1]
    origin = (
        f"{last['model']}, {last['dtype']}, period {last['period']}, at most {last['token_limit']} tokens; commit "
        f"{last['commit']}; sglang {last['sglang']}, torch {last['torch']}; {last['device']}; {last['date']}"
    )
    return "\n\n".join([*(tables[part](chosen) for part, chosen in parts if chosen), origin])


def free_table(rows: Sequence[Row]) -> str:
    """Part `free`: how many responses of each arm fail in which way, and what was resident."""
    lines = []
    for (arm, budget, decoding), group in grouped(rows, ("arm", "budget", "decoding")):
        counts = [f"{sum(row[name] for row in group)}/{len(group)}" for name in COUNTED]
        means = [f"{statistics.fmean(row[name] for row in group):.1f}" for name in AVERAGED]
        lines.append([arm, budget or "", decoding, *counts, *means])
    header = ["arm", "budget", "decoding", *COUNTED, "tokens", "evictions", "resident", "of"]
    return "Free running: responses, and means of tokens.\n\n" + markdown(header, lines, text_columns=3)


def kl_table(rows: Sequence[Row]) -> str:
    """Part `kl`: means over problems, with the standard error of that mean; each problem is one observation."""
    names = ("kl_after", "kl_once", "kl_all", "agree_after")
    baseline = {(row["budget"], row["problem"]): row for row in rows if row["arm"] == "random"}
    lines = []
    for (arm, budget), group in grouped(rows, ("arm", "budget")):
        again = arm == "full"
        # The full cache is never evicted from: all of its steps are the noise floor.
        cells = [_mean(row["kl_all" if again and name.startswith("kl") else name] for row in group) for name in names]
        if again:
            cells[-1] = _mean(row["agree_all"] for row in group)
        pairs = [(row, baseline.get((budget, row["problem"]))) for row in group]
        gaps = [_gap(row, other) for row, other in pairs if other is not None and arm != "random"]
        evictions = f"{statistics.fmean(row['evictions'] for row in group):.1f}"
        evicted = f"{sum(row['steps_after'] > 0 for row in group)}/{len(group)}"
        label = "full again: the noise floor" if again else arm
        lines.append([label, budget or "", evicted, evictions, *cells, _mean(gaps)])
    header = ["arm", "budget", "evicted", "evictions", "KL after eviction", "between first and second", "all steps"]
    header += ["top-1 agreement after", "KL after, less random's"]
    note = "KL(full || arm) in nats per token, on the full cache's greedy text: mean over problems ± standard error."
    return f"{note}\n\n" + markdown(header, lines, text_columns=2)


def _gap(row: Row, other: Row) -> float | None:
    values = row["kl_after"], other["kl_after"]
    return None if None in values else values[0] - values[1]


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return f"{statistics.fmean(known):.4g} ± {error:.2g}"


def grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows that agree in `keys`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return list(groups.items())


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]], text_columns: int) -> str:
    """A Markdown table; all but the first columns are aligned to the right."""
    rule = ["---" if column < text_columns else "--:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, rule, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="rows that ablation.py wrote; one report each")
    for path in parser.parse_args().files:
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            sys.exit(f"ablation_table: {path} cannot be read: {error}.")
        if not rows:
            sys.exit(f"ablation_table: {path} has no rows.")
        print(report(rows), end="\n\n")


if __name__ == "__main__":
    main()
