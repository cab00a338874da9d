"""Figures of a comparison: accuracy, differences, verdicts, flags, lengths; of memory: `ab_memory_figures`."""

from __future__ import annotations

import io
from itertools import cycle, islice

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvpolicy.reports.ab.pairs import tokens
from kvpolicy.reports.ab.report import Report
from kvpolicy.reports.ab.responses import FLAGS
from kvpolicy.reports.ab.statistics import ALPHA

DPI = 100
COLOURS = ("#1f5fa8", "#c8501e", "#2e8b57", "#7b4fa3", "#8a6d1d", "#b03a6f", "#3f8f9b", "#666666")
VERDICT_COLOURS = {
    "correct": "#2e8b57",
    "wrong": "#c8501e",
    "no_answer": "#8a8a8a",
    "unparseable": "#d9a441",
    "grader_timeout": "#7b4fa3",
}
_SIGNIFICANT, _NOT = "#1f5fa8", "#8a8a8a"


def accuracy_png(report: Report, task: str) -> bytes:
    """Accuracy per arm with its interval."""
    figure, axes = _rows_of(len(report.arms))
    for row, arm in enumerate(report.arms):
        found = report.of(arm, task).accuracy
        errors = [[100 * (found.value - found.low)], [100 * (found.high - found.value)]]
        axes.errorbar(100 * found.value, row, xerr=errors, fmt="o", color=colours(report)[arm], capsize=3)
    _name_rows(axes, report.arms)
    axes.set_xlabel("accuracy in %, with 95 % interval")
    return png(figure)


def differences_png(report: Report) -> bytes:
    """Each comparison: its own interval thick, that which holds together with all others thin."""
    figure, axes = _rows_of(len(report.comparisons))
    for row, comparison in enumerate(report.comparisons):
        found = comparison.accuracy
        colour = _SIGNIFICANT if comparison.holm < ALPHA else _NOT
        axes.plot([100 * found.family_low, 100 * found.family_high], [row, row], color=colour, linewidth=1)
        axes.plot([100 * found.low, 100 * found.high], [row, row], color=colour, linewidth=4, alpha=0.6)
        axes.plot(100 * found.difference, row, "o", color=colour)
    several = len(report.pairs.tasks) > 1
    _name_rows(axes, [f"{c.arm}{f', {c.task}' if several else ''}" for c in report.comparisons])
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_xlabel(
        f"points from {report.baseline}; thick: 95 % of each, thin: of all together; blue: Holm's p below 0.05"
    )
    return png(figure)


def verdicts_png(report: Report, task: str) -> bytes:
    """One bar per arm, divided by verdict."""
    figure, axes = _rows_of(len(report.arms) + 1)
    found = {arm: report.of(arm, task).verdicts or {"correct": report.of(arm, task).accuracy} for arm in report.arms}
    names = list(dict.fromkeys(name for verdicts in found.values() for name in verdicts))
    others = cycle(COLOURS)
    left = np.zeros(len(report.arms))
    for name in names:
        shares = np.array([100 * (verdicts[name].value if name in verdicts else 0.0) for verdicts in found.values()])
        colour = VERDICT_COLOURS.get(name) or next(others)
        axes.barh(range(len(report.arms)), shares, left=left, color=colour, label=name.replace("_", " "), height=0.7)
        for row, share in enumerate(shares):
            if share >= 2:
                axes.text(left[row] + share / 2, row, f"{share:.0f}", ha="center", va="center", color="w", fontsize=8)
        left += shares
    _name_rows(axes, report.arms)
    axes.set(xlim=(0, 100), xlabel="% of responses")
    axes.legend(fontsize="small", ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    return png(figure)


def flags_png(report: Report, task: str) -> bytes:
    """The rate of each flag under each arm."""
    figure, axes = _rows_of(len(FLAGS) * (len(report.arms) + 2) // 2)
    for number, arm in enumerate(report.arms):
        for place, flag in enumerate(FLAGS):
            found = report.of(arm, task).flags[flag]
            y = place + (number + 0.5) / len(report.arms) * 0.8
            if found is None:
                axes.text(0, y, " not known", va="center", fontsize="x-small", color="0.4")
                continue
            axes.barh(y, 100 * found.value, height=0.7 / len(report.arms), color=colours(report)[arm])
            axes.plot([100 * found.low, 100 * found.high], [y, y], color="0.2", linewidth=1)
    axes.set_yticks(np.arange(len(FLAGS)) + 0.4, [flag.replace("_", " ") for flag in FLAGS])
    axes.set(ylim=(len(FLAGS), -0.2), xlim=(0, None), xlabel="% of responses, with 95 % interval")
    _legend(axes, report)
    return png(figure)


def lengths_png(report: Report, task: str) -> bytes:
    """Share of the responses of at most so many tokens."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots()
    for arm in report.arms:
        known = [length for each in report.pairs.arm(arm).of_task(task) if (length := tokens(each)) is not None]
        if known:
            axes.ecdf(known, color=colours(report)[arm], label=arm)
    axes.set(xlabel="tokens of the response", ylabel="share that is no longer", xlim=(0, None))
    _legend(axes, report)
    return png(figure)


def evaporation_png(report: Report) -> bytes:
    """What studies of fewer problems would have reported, per comparison."""
    shown = [comparison for comparison in report.comparisons if comparison.evaporation]
    figure, axes = _rows_of(max(1, sum(len(comparison.evaporation) for comparison in shown)))
    names: list[str] = []
    for comparison in shown:
        for study in comparison.evaporation:
            row = len(names)
            axes.plot([100 * study.low, 100 * study.high], [row, row], color=COLOURS[0], linewidth=4, alpha=0.5)
            axes.plot(100 * study.best_of_looks, row, "^", color=COLOURS[1])
            axes.plot(100 * comparison.accuracy.difference, row, "|", color="0.2", markersize=14)
            if study.significant_gain is not None:
                sign = np.sign(comparison.accuracy.difference) or 1
                axes.plot(100 * sign * study.significant_gain, row, "x", color=COLOURS[3])
            names.append(f"{comparison.arm}, {comparison.task}, {study.size} problems")
    _name_rows(axes, names)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_xlabel(
        f"points from {report.baseline}; bar: 9 of 10 studies, |: found here, triangle: best of 10, "
        "x: mean size of those with p below 0.05"
    )
    return png(figure)


def colours(report: Report) -> dict[str, str]:
    """One for each arm, the same in all figures."""
    return dict(zip(report.arms, islice(cycle(COLOURS), len(report.arms)), strict=True))


def png(figure: Figure) -> bytes:
    """The picture; the same numbers give the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _rows_of(count: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(11, 1.1 + 0.36 * count), layout="constrained")
    return figure, figure.subplots()


def _name_rows(axes: Axes, names: list[str] | tuple[str, ...]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _legend(axes: Axes, report: Report) -> None:
    """Above the axes: nothing is hidden behind it."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=arm) for arm, colour in colours(report).items()]
    axes.legend(handles=patches, fontsize="small", ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
