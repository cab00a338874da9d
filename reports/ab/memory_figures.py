"""Figures of what the arms held: residency of single responses, accuracy against bytes, matched memory."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvpolicy.reports.ab.figures import COLOURS, colours, png
from kvpolicy.reports.ab.memory import TOLERANCE
from kvpolicy.reports.ab.report import Contrast, Report

MIB = 2**20
_MOMENTS = {"kv_bytes_mean": "mean over its steps", "kv_bytes_peak": "largest", "kv_bytes_end": "at its end"}


def residency_png(report: Report, task: str) -> bytes:
    """What each response held, against its length: mean, peak and end; dashed: the whole cache."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, len(_MOMENTS), sharey=True)
    for axes, (name, label) in zip(panels, _MOMENTS.items(), strict=True):
        full: dict[float, float] = {}
        for arm in report.arms:
            records = [each.record for each in report.pairs.arm(arm).of_task(task) if each.record is not None]
            lengths = [record["full_end"] for record in records]
            held = [record[name] / MIB for record in records]
            axes.plot(lengths, held, ".", markersize=4, alpha=0.6, color=colours(report)[arm], label=arm)
            if name == "kv_bytes_mean":
                full |= {record["full_end"]: record["kv_bytes_full_mean"] / MIB for record in records}
            else:
                full |= {record["full_end"]: record["kv_bytes_full_end"] / MIB for record in records}
        ends = sorted(full)
        axes.plot(ends, [full[end] for end in ends], "--", color="0.4", linewidth=1, label="whole cache")
        axes.set_title(label, fontsize="medium")
        axes.set(xlabel="tokens at the end, prompt included", xlim=(0, None))
    panels[0].set(ylabel="KV MiB of a response", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=6, fontsize="small")
    return png(figure)


def frontier_png(report: Report, task: str) -> bytes:
    """Accuracy against mean KV bytes."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots()
    for arm in report.arms:
        found = report.of(arm, task)
        if found.memory is None:
            continue
        rate, held = found.accuracy, found.memory.kv_bytes_mean / MIB
        errors = [[100 * (rate.value - rate.low)], [100 * (rate.high - rate.value)]]
        axes.errorbar(held, 100 * rate.value, yerr=errors, fmt="o", color=colours(report)[arm], capsize=3)
        axes.annotate(arm, (held, 100 * rate.value), textcoords="offset points", xytext=(7, 4), fontsize="small")
    axes.margins(x=0.12)
    axes.set(xlabel="KV MiB, mean over decode steps", ylabel="accuracy in %, with 95 % interval", xlim=(0, None))
    return png(figure)


def matches_png(report: Report, task: str) -> bytes:
    """Mean KV bytes of each pair of arms, second over first, and the band within which they count as matched."""
    pairs = [(one, other, found) for (each, one, other), found in report.memory.items() if each == task]
    figure = Figure(figsize=(11, 1.1 + 0.36 * max(1, len(pairs))), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(1 / (1 + TOLERANCE), 1 + TOLERANCE, color=COLOURS[2], alpha=0.25, linewidth=0)
    axes.axvline(1, color="0.3", linewidth=1)
    for row, (_, _, found) in enumerate(pairs):
        axes.plot(found.ratio, row, "o", color=COLOURS[2] if found.matched else COLOURS[1])
        word = "matched" if found.matched else "unmatched"
        axes.annotate(word, (found.ratio, row), textcoords="offset points", xytext=(8, -3), fontsize="small")
    axes.set_yticks(range(len(pairs)), [f"{other} over {one}" for one, other, _ in pairs])
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if _within(axes, tick)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"mean KV bytes, times; green band: within {100 * TOLERANCE:.0f} %")
    axes.margins(x=0.15)
    return png(figure)


def contrasts_png(contrasts: list[Contrast]) -> bytes:
    """The same arm against the nearest cache after prefill, and against the nearest mean cache."""
    figure = Figure(figsize=(11, 1.1 + 0.36 * 2 * len(contrasts)), layout="constrained")
    axes = figure.subplots()
    names: list[str] = []
    for contrast in contrasts:
        found = contrast.found
        for gain, colour, name in (
            (found.by_prefill_gain, COLOURS[1], f"{found.by_prefill} (after prefill)"),
            (found.by_mean_gain, COLOURS[0], f"{found.by_mean} (mean cache)"),
        ):
            row = len(names)
            axes.plot([100 * gain.low, 100 * gain.high], [row, row], color=colour, linewidth=4, alpha=0.5)
            axes.plot(100 * gain.difference, row, "o", color=colour)
            names.append(f"{contrast.arm} over {name}")
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("points, with 95 % interval of each; orange: nearest after prefill, blue: nearest on average")
    return png(figure)


def _within(axes: Axes, tick: float) -> bool:
    low, high = np.array(axes.get_xlim()) * (0.8, 1.25)
    return bool(low <= tick <= high)
