"""The table of quant_fidelity.py, and the file of rows that it is made of."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation_study import Refused
from number_tables import numbers_table
from quant_fidelity_study import FULL, Study
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
COLUMNS = (
    "format",
    "bits",
    "in use",
    "bytes/token",
    "tokens in the pool",
    "of MiB",
    "top-1 agreement, 95 %",
    "KL mean",
    "KL p99",
    "goal",
)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file.

    Raises
    ------
    Refused
        If it is not one of this benchmark's.
    """
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise Refused(f"--out {path} cannot be read as JSON lines: {error}; name another file.") from None
    if not all(isinstance(row, dict) and {"format", "text_sha256", "agreement"} <= row.keys() for row in rows):
        raise Refused(f"--out {path} holds rows of something else; name another file.")
    return rows


def add_row(path: Path, row: Row) -> None:
    """Append a row; whatever happens meanwhile, the file has all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    part.write_text(f"{before}{json.dumps(row)}\n", encoding="utf-8")
    os.replace(part, path)


def measured(rows: Sequence[Row], study: Study, text: str | None = None) -> dict[str, Row]:
    """By format, the newest rows with the settings of a study, and of one text; None is that of the newest row.

    Rows of another text are of a model or an engine that answers differently, and comparable to none of these.
    """
    alike = [row for row in rows if all(row.get(name) == value for name, value in study.settings.items())]
    if text is None and alike:
        text = alike[-1]["text_sha256"]
    return {row["format"]: row for row in alike if row["text_sha256"] == text}


def table(rows: Sequence[Row]) -> Table:
    """The rows of one study and text."""
    first = rows[0]
    title = f"{first['model']}, {first['dtype']}: {first['prompts']} prompts, {first['steps']} decode steps each format"
    shown = numbers_table(title, COLUMNS, _caption(rows))
    for row in rows:
        tokens, full = row["token_capacity"], row["token_capacity_full"]
        shown.add_row(
            "full again: the noise floor" if row["format"] == FULL else escape(row["format"]),
            f"{row['bits_per_element']:.2f}",
            f"{row['bits_in_use']:.2f}",
            f"{row['kv_bytes_per_token']:.0f}",
            f"{tokens:,} ({tokens / full:.2f}x)",
            f"{tokens * row['kv_bytes_per_token'] / 2**20:.0f}",
            f"{row['agreement']:.2%} [{row['agreement_low']:.2%}, {row['agreement_high']:.2%}]",
            f"{row['kl_mean']:.3g}",
            f"{row['kl_p99']:.3g}",
            _goal(row),
        )
    return shown


def _goal(row: Row) -> str:
    """Whether the agreement reaches the goal; in doubt, where the goal lies inside the interval."""
    if row["goal"] is None:
        return ""
    doubt = row["agreement_low"] < row["goal"] <= row["agreement_high"]
    return f"≥ {row['goal']:.0%}: {'met' if row['goal_met'] else 'missed'}{', in doubt' if doubt else ''}"


def _caption(rows: Sequence[Row]) -> str:
    first = rows[0]
    commits, devices = ({row[name] for row in rows} for name in ("commit", "device"))
    full = first["token_capacity_full"] * first["kv_bytes_per_token_full"] / 2**20
    sentences = [
        f"Full cache, stock pool: {first['token_capacity_full']:,} tokens in {full:.0f} MiB.",
        "bits: per element of keys and values, all of the pool. in use: of these requests' tokens at their end.",
        "KL(full || format) in nats per decode step.",
        f"commit {', '.join(sorted(commits))}; sglang {first['sglang']}, torch {first['torch']}; "
        f"{', '.join(sorted(devices))}; {rows[-1]['date']}",
    ]
    if denied := [escape(row["format"]) for row in rows if row["protected_rows_denied"]]:
        sentences.insert(3, f"Protected rows ran out in {', '.join(denied)}: some tokens had only their codes.")
    return "\n".join(sentences)
