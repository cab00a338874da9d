"""The capacity benchmark's table and plot; its engines are those of tests/engine/test_admission.py."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from capacity import Row, table
from capacity_plot import draw
from capacity_watch import Moment
from number_tables import WIDTH

ROWS = [
    Row("stock SGLang", 16, 1024, 6144, 4.4, 5, 2, 90.0, 182.0, 0.45, 0.91),
    Row("vase-dkv 192+64", 16, 1024, 6144, 16.0, 16, 0, 30.6, 536.0, 0.57, 0.59),
]


def test_the_table_says_all_in_its_width() -> None:
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(table(ROWS))
    text = console.export_text()
    assert "16 requests of 1024 tokens in a pool of 6144" in text
    (stock,) = [line.replace("│", " ").split() for line in text.splitlines() if "stock SGLang" in line]
    assert stock == ["stock", "SGLang", "4.4", "5", "2", "90.0", "182", "1.00", "45%", "91%"]
    (policy,) = [line.replace("│", " ").split() for line in text.splitlines() if "vase-dkv" in line]
    assert policy == ["vase-dkv", "192+64", "16.0", "16", "0", "30.6", "536", "2.95", "57%", "59%"]


def test_the_plot_is_a_picture_of_both_arms(tmp_path: Path) -> None:
    moments = [Moment(0.5, 5, 600), Moment(1.0, 5, 1200), Moment(1.5, 0, 0)]
    draw({"stock SGLang": moments, "vase-dkv 192+64": moments[:2]}, 6144, tmp_path / "capacity.png")
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
