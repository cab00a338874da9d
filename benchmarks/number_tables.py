"""What the benchmarks that print a table share: one line per measured row, its first column left, numbers right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 100  # columns that a table of numbers may need, also where nobody says how wide the terminal is


def numbers_table(title: str, names: Sequence[str], caption: str = "") -> Table:
    """Without rows: the first column is a name and is never wrapped, the others hold numbers."""
    shown = Table(title=title, caption=caption or None, caption_justify="left")
    for i, name in enumerate(names):
        shown.add_column(name, justify="right" if i else "left", no_wrap=not i)
    return shown


def printed(table: Table) -> None:
    """Print a table, at least `WIDTH` wide."""
    console = Console(highlight=False)
    if console.width < WIDTH:
        console = Console(highlight=False, width=WIDTH)
    console.print(table)
