"""The curve of `kvpolicy epikv-bands`: rank correlation with importance, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvpolicy.reports.epikv.bands import LEVEL, Bands, Correlation


def draw(path: Path, found: Sequence[Correlation], bands: Bands, title: str) -> None:
    """Write a PNG: the curve, its intervals, and the layers that are proposed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    layers = [c.layer for c in found]
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.fill_between(
        layers,
        [c.low for c in found],
        [c.high for c in found],
        alpha=0.2,
        linewidth=0,
        label=f"{LEVEL:.0%} for all layers together",
    )
    axes.plot(layers, [c.rho for c in found], marker="o", markersize=3)
    for name, c, first, last, supported, colour in (
        ("A", bands.a, bands.a_first, bands.a_last, bands.a_supported, "tab:green"),
        ("B", bands.b, bands.b_first, bands.b_last, bands.b_supported, "tab:red"),
    ):
        label = f"{name}: layer {c.layer}" + ("" if supported else ", not supported")
        axes.axvspan(first - 0.5, last + 0.5, color=colour, alpha=0.2, label=label)
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("Spearman's rho")
    axes.set_title(f"Change of hidden state against importance, {title}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
