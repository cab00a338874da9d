"""Each figure shows the data it is named for: it changes with them, and only with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.reports.ab import figures as ab_figures
from kvpolicy.reports.ab import memory_figures as ab_memory_figures
from kvpolicy.reports.ab.origin import read_all
from kvpolicy.reports.ab.report import Report, make_report
from tests.reports.ab.made import evicting, packed, samples_of, whole
from tests.reports.ab.runs import TASK, write

FIGURES: dict[str, tuple[Callable[[Report], bytes], set[str]]] = {
    "accuracy": (lambda r: ab_figures.accuracy_png(r, TASK), {"correct"}),
    "differences": (ab_figures.differences_png, {"correct"}),
    "verdicts": (lambda r: ab_figures.verdicts_png(r, TASK), {"correct", "wrong"}),
    "flags": (lambda r: ab_figures.flags_png(r, TASK), {"flags"}),
    "lengths": (lambda r: ab_figures.lengths_png(r, TASK), {"lengths"}),
    "evaporation": (ab_figures.evaporation_png, {"correct"}),
    "residency": (lambda r: ab_memory_figures.residency_png(r, TASK), {"memory"}),
    "frontier": (lambda r: ab_memory_figures.frontier_png(r, TASK), {"correct", "memory"}),
    "matches": (lambda r: ab_memory_figures.matches_png(r, TASK), {"memory"}),
    "contrasts": (lambda r: ab_memory_figures.contrasts_png(list(r.contrasts)), {"correct"}),
}


def made(folder: Path, changed: str = "") -> Report:
    """Four arms, one of which is changed in one way."""
    records = {"full": whole, "small": evicting(128), "tiny": evicting(64), "int4": packed}
    if changed == "memory":
        records["tiny"] = evicting(56)
    found = []
    for number, (name, of_arm) in enumerate(records.items()):
        verdicts = [["correct" if (n * 7 + number * n) % 5 else "no_answer"] for n in range(55)]
        if name == "tiny" and changed in ("correct", "wrong"):
            before = "correct" if changed == "correct" else "no_answer"
            verdicts = [["wrong"] if n < 30 and each == [before] else each for n, each in enumerate(verdicts)]
        samples = samples_of(verdicts, of_arm)
        for each in samples if name == "tiny" else []:
            row: dict[str, Any] = each["responses"][0]
            row |= {"looped": True} if changed == "flags" and each["doc_id"] < 9 else {}
            row |= {"tokens": 2 * row["tokens"]} if changed == "lengths" else {}
        write(folder / name, samples)
        found.append(read_all(name, folder / name, None))
    return make_report([arm for arm, _ in found], [origin for _, origin in found], split=None)


CHANGES = ("correct", "wrong", "flags", "lengths", "memory")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return {change: made(tmp_path_factory.mktemp("arms"), change) for change in ("", *CHANGES)}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_changes_with_its_data_alone(name: str, reports: dict[str, Report]) -> None:
    draw, shown = FIGURES[name]
    before = draw(reports[""])
    assert {change for change in CHANGES if draw(reports[change]) != before} == shown


def test_a_difference_that_was_shown_has_another_colour(reports: dict[str, Report]) -> None:
    report = reports[""]
    shown, not_shown = (
        dataclasses.replace(report, comparisons=tuple(dataclasses.replace(c, holm=holm) for c in report.comparisons))
        for holm in (0.049, 0.05)
    )
    assert ab_figures.differences_png(shown) != ab_figures.differences_png(not_shown)


def test_arms_keep_their_colours(reports: dict[str, Report]) -> None:
    found = ab_figures.colours(reports[""])
    assert list(found) == ["full", "small", "tiny", "int4"]
    assert len(set(found.values())) == 4
