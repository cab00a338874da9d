"""Figures of a quantization-error report: arms, layers, tokens and positions. Heat maps are in `quant_error_maps`."""

from __future__ import annotations

import io
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvpolicy.reports.quant_error.advice import TAILS
from kvpolicy.reports.quant_error.arms import Arm, Comparison
from kvpolicy.reports.quant_error.measure import KINDS, Table
from kvpolicy.reports.quant_error.report import Report, described, shown_layers

DPI = 100
COLOURS = ("#1f5fa8", "#c8501e", "#2e8b57", "#7b4fa3", "#8a6d1d", "#b03a6f", "#3f8f9b", "#666666")
MARKERS = {"random": "x", "l2": "v", "range": "^", "oracle": "*"}


def arms_png(report: Report) -> bytes:
    """Real bits of the values against mean KL and attention error, for arms that leave the keys alone."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    measures = ((_kl, "mean KL, nats"), (_attention, "relative error of the attention output"))
    for axes, (measure, label) in zip(figure.subplots(1, 2), measures, strict=True):
        _arms(axes, report, [(arm, measure(report, arm)) for one in report.comparisons for arm in one.arms])
        axes.set_ylabel(label)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    return png(figure)


def _arms(axes: Axes, report: Report, errors: list[tuple[Arm, float]]) -> None:
    unprotected = sorted({(report.bits(a)[0], e, a.name) for a, e in errors if a.values.selector == "none"})
    axes.plot([x for x, _, _ in unprotected], [y for _, y, _ in unprotected], "o-", color="0.55", label="no protection")
    for bits, error, name in unprotected:
        axes.annotate(name, (bits, error), textcoords="offset points", xytext=(5, 5), fontsize="small")
    by_name = {arm.name: error for arm, error in errors}
    for colour, one in zip(cycle(COLOURS), report.comparisons, strict=False):
        for selector, arm in one.protected.items():
            axes.plot(
                report.bits(arm)[0],
                by_name[arm.name],
                MARKERS[selector],
                color=colour,
                label=f"{one.codec}, {100 * report.share:g}% by {selector}",
            )
    if all(error > 0 for _, error in errors):
        axes.set_yscale("log")
    axes.set_xlabel("real bits per number of the values")
    axes.margins(x=0.2, y=0.08)


def attention_png(report: Report) -> bytes:
    """Attention error per layer: plain, protected by range, and the controls."""
    figure = _rows(len(report.comparisons))
    column = figure.subplots(len(report.comparisons), 1, squeeze=False)[:, 0]
    for axes, one in zip(column, report.comparisons, strict=True):
        for arm, style, colour in _shown_arms(one):
            label = f"{arm.name}, {report.bits(arm)[0]:.2f} bits"
            _line(axes, report.attention(arm).mean(axis=1), label, colour, linestyle=style)
        axes.set(ylabel="relative error of\nthe attention output", ylim=(0, None))
        _legend(axes)
    return png(figure)


def _shown_arms(one: Comparison) -> list[tuple[Arm, str, str]]:
    arms = [(one.plain, "-", "0.4"), (one.protected["range"], "-", COLOURS[0])]
    arms += [(one.smaller, "--", COLOURS[1])] if one.smaller else []
    return arms + ([(one.larger, ":", COLOURS[2])] if one.larger else [])


def correlation_png(report: Report) -> bytes:
    """Correlation of range and error per layer, mean and extremes of the heads; values above, keys below."""
    figure = _rows(len(KINDS))
    for axes, kind in zip(figure.subplots(len(KINDS), 1), KINDS, strict=True):
        codecs = [codec for each, codec in described(report) if each == kind]
        for colour, codec in zip(cycle(COLOURS), codecs, strict=False):
            band(axes, report.correlation(kind, codec), codec, colour)
        axes.set(ylabel=f"{kind}: Pearson's r", ylim=(None, 1.02))
        _legend(axes)
    return png(figure)


def scatter_png(report: Report) -> bytes:
    """Value range against the error of single tokens, in some layers."""
    layers = shown_layers(len(report.layers))
    rows = len(report.comparisons)
    figure = Figure(figsize=(11, 2.8 * rows + 0.4), layout="constrained")
    for row, one in zip(figure.subplots(rows, len(layers), squeeze=False), report.comparisons, strict=True):
        for axes, layer in zip(row, layers, strict=True):
            points = report.layers[layer].points[one.codec]
            axes.plot(points.ranges, points.errors, ".", markersize=2.5, alpha=0.5, color=COLOURS[0])
            r = np.nanmean(report.correlation("values", one.codec)[layer])
            axes.set_title(f"{one.codec}, layer {layer}: r {r:.2f}", fontsize="medium")
            axes.set(xlim=(0, None), ylim=(0, None), xlabel="value range")
        row[0].set_ylabel("Euclidean error of the token")
    return png(figure)


def tails_png(report: Report) -> bytes:
    """Tail ratios per layer, mean and extremes of the heads."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), KINDS, strict=True):
        band(axes, report.tails(kind, "p99_to_p50"), "p99/p50", COLOURS[0])
        band(axes, report.tails(kind, "max_to_p50"), "max/p50", COLOURS[1])
        if kind == "values":
            for bits, tail in TAILS.items():
                if tail < axes.get_ylim()[1] * 1.5:
                    axes.axhline(tail, color="0.4", linestyle=":", label=f"{tail:g}, see rules: {bits} bits")
        axes.set(ylabel=f"range of {kind} over its median", ylim=(1, None))
        _legend(axes)
    return png(figure)


def held_png(report: Report) -> bytes:
    """Share of squared error that the protected tokens hold, per layer and selector."""
    figure = _rows(len(report.comparisons))
    column = figure.subplots(len(report.comparisons), 1, squeeze=False)[:, 0]
    for axes, one in zip(column, report.comparisons, strict=True):
        for colour, (selector, arm) in zip(COLOURS, one.protected.items(), strict=False):
            _line(axes, report.held(arm).mean(axis=1), selector, colour)
        axes.axhline(report.share, color="0.4", linestyle=":", label="their share of the tokens")
        axes.set(ylabel=f"{one.codec}: share of\nthe squared error", ylim=(0, None))
        _legend(axes)
    return png(figure)


def position_png(report: Report) -> bytes:
    """Squared error over mean squared length, in stretches of the text, mean of layers and heads."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), KINDS, strict=True):
        codecs = [codec for each, codec in described(report) if each == kind]
        for colour, codec in zip(cycle(COLOURS), codecs, strict=False):
            errors = report.by_position(kind, codec).mean(axis=0)
            middles = (np.arange(len(errors)) + 0.5) * report.tokens / len(errors)
            axes.plot(middles, errors, marker="o", markersize=3, color=colour, label=codec)
        axes.set(xlabel="position", ylabel=f"{kind}: squared error, relative", yscale="log")
        _legend(axes, columns=3)
    return png(figure)


def png(figure: Figure) -> bytes:
    """The picture; the same numbers give the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _kl(report: Report, arm: Arm) -> float:
    return float(report.outputs[arm.name].kl.mean())


def _attention(report: Report, arm: Arm) -> float:
    return float(report.attention(arm).mean())


def _rows(count: int) -> Figure:
    return Figure(figsize=(11, 2.9 * count), layout="constrained")


def _legend(axes: Axes, columns: int = 5) -> None:
    """Above the axes: nothing is hidden behind it."""
    axes.legend(fontsize="small", ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _line(axes: Axes, layers: Table, label: str, colour: str, linestyle: str = "-") -> None:
    axes.plot(layers, marker="o", markersize=3, color=colour, linestyle=linestyle, label=label)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def band(axes: Axes, table: Table, label: str, colour: str) -> None:
    """Mean of each row of ``[L, H]`` and, shaded, its extremes; what is not finite is left out."""
    table = np.where(np.isfinite(table), table, np.nan)
    known = ~np.isnan(table).all(axis=1)
    layers, table = np.flatnonzero(known), table[known]
    axes.plot(layers, np.nanmean(table, axis=1), marker="o", markersize=3, color=colour, label=label)
    axes.fill_between(layers, np.nanmin(table, axis=1), np.nanmax(table, axis=1), color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
