"""Requests in flight and slots in use over time, one line an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from capacity_watch import Moment
from matplotlib.figure import Figure


def draw(arms: Mapping[str, Sequence[Moment]], pool: int, path: Path) -> None:
    figure = Figure(figsize=(9, 6), layout="constrained")
    requests, slots = figure.subplots(2, sharex=True)
    for name, moments in arms.items():
        seconds = [moment.seconds for moment in moments]
        requests.step(seconds, [moment.running for moment in moments], where="post", label=name)
        slots.step(seconds, [100 * moment.used / pool for moment in moments], where="post", label=name)
    requests.set_ylabel("requests in flight")
    requests.set_ylim(bottom=0)
    requests.legend()
    slots.set_ylabel(f"% of {pool} slots in use")
    slots.set_xlabel("seconds since the requests arrived")
    slots.set_ylim(0, 105)
    for axes in (requests, slots):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
