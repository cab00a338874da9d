"""Figures of one trace: who holds which token, how tokens leave, and how far survivors' values spread."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvpolicy.reports.trace_file import TraceFile

COLUMNS = 800  # positions are averaged into at most this many columns, fewer than there are pixels
DPI = 100
HELD, NOT_YET = "Blues", "#ececec"
KEPT, EVICTED, PROMPT = "#1f5fa8", "#c8501e", "#c8501e"
RANGES_MISSING = "value ranges were not recorded in this trace"


def survival_map(axes: Axes, trace: TraceFile, eviction: int) -> None:
    """Position and age of the tokens against layer and KV head: dark where a head holds the token."""
    held = trace.held(eviction)
    tokens = held.shape[-1]
    rows = averaged(held.reshape(-1, tokens).astype(np.float64))
    axes.imshow(
        rows, aspect="auto", extent=(0, tokens, len(rows), 0), cmap=HELD, vmin=0, vmax=1, interpolation="nearest"
    )
    layers = np.unique(np.linspace(0, trace.layers - 1, min(trace.layers, 12)).astype(int))
    axes.set_yticks((layers + 0.5) * trace.heads, [str(layer) for layer in layers])
    axes.set_ylabel(f"layer, {trace.heads} KV heads each")
    age = axes.secondary_xaxis("top", functions=(lambda position: tokens - position, lambda age: tokens - age))
    age.set_xlabel("age (tokens since)")
    number = range(trace.evictions)[eviction]
    axes.set_xlabel(f"position, after eviction {number + 1} of {trace.evictions} (dark: held by this head)")
    _mark_prompt(axes, trace)


def survival_over_evictions(axes: Axes, trace: TraceFile) -> None:
    """Position against number of the eviction: the share of all heads that hold the token after it."""
    shares = trace.shares()
    evictions, tokens = shares.shape
    shown = axes.imshow(
        averaged(shares),
        aspect="auto",
        extent=(0, tokens, evictions + 0.5, 0.5),
        cmap=HELD,
        vmin=0,
        vmax=1,
        interpolation="nearest",  # blended colours would make files three times as large
    )
    axes.set_facecolor(NOT_YET)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position (grey: not generated yet)")
    axes.set_ylabel("eviction")
    axes.figure.colorbar(shown, ax=axes, label="share of all heads that hold the token", pad=0.01)
    _mark_prompt(axes, trace)


def value_ranges(axes: Axes, trace: TraceFile) -> None:
    """Value range of kept and of evicted tokens per layer: the middle quantile, and a band between the outer ones."""
    axes.set_xlabel("layer (means over KV heads and evictions)")
    axes.set_ylabel("value range")
    if trace.value_range is None:
        axes.text(0.5, 0.5, RANGES_MISSING, ha="center", va="center", transform=axes.transAxes)
        return
    layers = np.arange(trace.layers)
    low, *_, high = trace.quantiles
    middle = len(trace.quantiles) // 2
    for which, (name, colour) in enumerate((("kept", KEPT), ("evicted", EVICTED))):
        recorded = trace.value_range[:, which].astype(np.float64)
        quantiles = _mean(np.nansum(recorded, axis=(0, 2)), (~np.isnan(recorded)).sum(axis=(0, 2)))
        label = f"{name}: {trace.quantiles[middle]:.0%}, band {low:.0%} to {high:.0%}"
        axes.plot(layers, quantiles[:, middle], color=colour, marker="o", markersize=3, label=label)
        axes.fill_between(layers, quantiles[:, 0], quantiles[:, -1], color=colour, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def map_png(trace: TraceFile, eviction: int) -> bytes:
    """:func:`survival_map` as a PNG."""
    figure = Figure(figsize=(11, _map_height(trace)), layout="constrained")
    survival_map(figure.subplots(), trace, eviction)
    return _png(figure)


def over_evictions_png(trace: TraceFile) -> bytes:
    """:func:`survival_over_evictions` as a PNG."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    survival_over_evictions(figure.subplots(), trace)
    return _png(figure)


def ranges_png(trace: TraceFile) -> bytes:
    """:func:`value_ranges` as a PNG."""
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    value_ranges(figure.subplots(), trace)
    return _png(figure)


def save_all(trace: TraceFile, eviction: int, title: str, target: Path) -> None:
    """All three, one below the other, in one PNG."""
    heights = (_map_height(trace), 4.5, 3.5)
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    figure.suptitle(title)
    first, second, third = figure.subplots(3, height_ratios=heights)
    survival_map(first, trace, eviction)
    survival_over_evictions(second, trace)
    value_ranges(third, trace)
    target.write_bytes(_png(figure))


def averaged(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``[R, T]`` to ``[R, at most COLUMNS]``: means over equal stretches of positions, of what is not NaN."""
    tokens = rows.shape[-1]
    if tokens <= COLUMNS:
        return rows
    starts = np.arange(COLUMNS) * tokens // COLUMNS
    known = np.add.reduceat(~np.isnan(rows), starts, axis=-1, dtype=np.int64)
    return _mean(np.add.reduceat(np.nan_to_num(rows), starts, axis=-1), known)


def _mean(total: npt.NDArray[np.float64], count: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """NaN where nothing was counted."""
    mean = np.full(total.shape, np.nan)
    np.divide(total, count, out=mean, where=count > 0)
    return mean


def _map_height(trace: TraceFile) -> float:
    """Inches, so that every head has a row of pixels."""
    return 1.2 + max(3.8, trace.layers * trace.heads / DPI)


def _mark_prompt(axes: Axes, trace: TraceFile) -> None:
    axes.axvline(trace.prompt_len, color=PROMPT, linewidth=1)
    label = axes.text(trace.prompt_len, 0.03, "prompt ends", transform=axes.get_xaxis_transform())
    label.set(color=PROMPT, fontsize="small", bbox={"color": "white", "pad": 1})


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
