"""Heat maps of a quantization-error report: layer against KV head, keys and values apart, one panel per codec."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvpolicy.reports.quant_error.arms import Arm
from kvpolicy.reports.quant_error.figures import png
from kvpolicy.reports.quant_error.measure import Kind, Table
from kvpolicy.reports.quant_error.report import Report

COLUMNS = 4
# Measure of RowErrors -> (title, whether colours are logarithmic).
MEASURES = {
    "relative": ("relative Frobenius error", False),
    "sqnr_db": ("SQNR, dB", False),
    "mse": ("mean squared error", True),
    "max_abs": ("largest error", True),
    "cosine": ("cosine between rows before and after", False),
}


def errors_png(report: Report, measure: str) -> bytes:
    """One of MEASURES."""
    title, logarithmic = MEASURES[measure]
    panels = [(name, report.errors(arm, kind, measure)) for name, arm, kind in _unprotected(report)]
    return _panels(panels, title, logarithmic)


def attention_map_png(report: Report) -> bytes:
    """Attention error, mean over the query heads that share a KV head."""
    panels = []
    for name, arm, _ in _unprotected(report):
        heads = report.attention(arm)
        panels.append((name, heads.reshape(len(heads), report.kv_heads, -1).mean(axis=2)))
    return _panels(panels, "relative error of the attention output", False)


def correlation_map_png(report: Report) -> bytes:
    """Correlation of range with the error of a token."""
    panels = [
        (name, report.correlation(kind, (arm.values if kind == "values" else arm.keys).codec.name))
        for name, arm, kind in _unprotected(report)
    ]
    return _panels(panels, "Pearson's r of range and error", False)


def _unprotected(report: Report) -> list[tuple[str, Arm, Kind]]:
    values: list[tuple[str, Arm, Kind]] = [(f"V {one.codec}", one.plain, "values") for one in report.comparisons]
    return values + [(f"K {arm.keys.codec.name}", arm, "keys") for arm in report.keys]


def _panels(panels: list[tuple[str, Table]], title: str, logarithmic: bool) -> bytes:
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = 0.9 + min(5.0, max(1.2, 0.14 * len(panels[0][1])))
    figure = Figure(figsize=(11, 0.5 + rows * height), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, table) in zip(grid, panels, strict=False):
        _panel(axes, table, logarithmic)
        axes.set_title(name, fontsize="medium")
    for axes in grid[len(panels) :]:
        axes.remove()
    return png(figure)


def _panel(axes: Axes, table: Table, logarithmic: bool) -> None:
    shown = np.where(np.isfinite(table), table, np.nan)
    scale = "log" if logarithmic and np.nanmin(shown, initial=np.inf) > 0 else "linear"
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", norm=scale)
    axes.set_facecolor("#ececec")
    axes.set(xlabel="KV head", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes)
