"""Which layers' changes of hidden state go with the importance of tokens, and which bands that supports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch

LEVEL = 0.95


class Correlation(NamedTuple):
    """Spearman's rank correlation of one layer's change with importance.

    low, high : approximate interval; all layers' intervals hold together with probability `LEVEL`, since the
        extremes of many layers are looked at.
    n_effective : independent tokens that the measured ones, each like its neighbours, are worth.
    """

    layer: int
    rho: float
    low: float
    high: float
    n_effective: float


class Bands(NamedTuple):
    """What a run proposes: the layers of the largest and the smallest correlation, and adjacent ones like them.

    first, last : of the layers around the extreme one whose intervals exclude 0 on the same side; the layer itself
        if its own does not.
    supported : whether the interval of the extreme layer excludes 0, on the side that the band needs.
    any_differs : whether the interval of any layer excludes 0.
    """

    a: Correlation
    a_first: int
    a_last: int
    a_supported: bool
    b: Correlation
    b_first: int
    b_last: int
    b_supported: bool
    any_differs: bool

    @property
    def options(self) -> str:
        """``kv_options`` of `epikv` for single layers."""
        return f"band_a:{self.a.layer};band_b:{self.b.layer}"

    @property
    def wide_options(self) -> str:
        """``kv_options`` of `epikv` for averages over adjacent layers."""
        a = f"band_a:{self.a_first};band_a_last:{self.a_last}"
        return f"signal:adaptive;{a};band_b:{self.b_first};band_b_last:{self.b_last}"

    @property
    def verdict(self) -> str:
        """How much the proposal is worth, in a sentence."""
        if self.a_supported and self.b_supported:
            return "Both bands are supported: the intervals of their layers exclude zero."
        if not self.any_differs:
            return "No layer differs from zero: these bands are not supported."
        wrong = [
            f"{name} is not supported (layer {c.layer}: rho {c.rho:+.3f}, interval {c.low:+.3f} to {c.high:+.3f}, "
            f"which is not {side} zero)"
            for name, c, supported, side in (
                ("band_a", self.a, self.a_supported, "above"),
                ("band_b", self.b, self.b_supported, "below"),
            )
            if not supported
        ]
        return f"Of these bands {' and '.join(wrong)}."


def correlations(importance: torch.Tensor, changes: torch.Tensor) -> list[Correlation]:
    """Of each layer, from ``importance [n]`` and ``changes [L, n]`` of the same tokens in order of position.

    The interval is that of Fisher's transformation with the variance ``(1 + rho² / 2) / (n - 3)`` (Bonett and
    Wright, 2000), for as many independent tokens as the lag-1 autocorrelations of the ranks leave, each layer at
    ``1 - (1 - LEVEL) / L``. A layer whose change, or an importance, that is the same for all tokens has the
    correlation 0.
    """
    quantile = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * len(changes)))
    x = _centred_ranks(importance)
    found = []
    for layer, change in enumerate(changes):
        y = _centred_ranks(change)
        norm = float((x.square().sum() * y.square().sum()).sqrt())
        rho = float(x @ y) / norm if norm else 0.0
        persistence = _lag_one(x) * _lag_one(y)
        n_effective = len(x) * min(1.0, (1 - persistence) / (1 + persistence))
        low, high = -1.0, 1.0
        if n_effective > 3 and norm:
            z = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, rho)))
            half = quantile * math.sqrt((1 + rho**2 / 2) / (n_effective - 3))
            low, high = math.tanh(z - half), math.tanh(z + half)
        found.append(Correlation(layer, rho, low, high, n_effective))
    return found


def propose(found: Sequence[Correlation]) -> Bands:
    """The bands that correlations of all layers suggest; the last layer's output cannot be read while serving."""
    usable = found[:-1]
    a, b = max(usable, key=lambda c: c.rho), min(usable, key=lambda c: c.rho)
    above, below = [c.low > 0 for c in usable], [c.high < 0 for c in usable]
    of_a, of_b = (*_run(above, a.layer), above[a.layer]), (*_run(below, b.layer), below[b.layer])
    return Bands(a, *of_a, b, *of_b, any_differs=any(above + below))


def _run(belongs: Sequence[bool], layer: int) -> tuple[int, int]:
    """First and last of the adjacent layers around `layer` that belong; `layer` alone if it does not."""
    first = last = layer
    if belongs[layer]:
        while first > 0 and belongs[first - 1]:
            first -= 1
        while last + 1 < len(belongs) and belongs[last + 1]:
            last += 1
    return first, last


def _centred_ranks(x: torch.Tensor) -> torch.Tensor:
    """fp64 ranks less their mean; equal numbers share the mean of their ranks."""
    ascending = x.contiguous().sort().values
    below, not_above = (torch.searchsorted(ascending, x.contiguous(), right=right) for right in (False, True))
    ranks = (below + not_above).double() / 2
    return ranks - ranks.mean()


def _lag_one(centred: torch.Tensor) -> float:
    """Lag-1 autocorrelation."""
    total = float(centred.square().sum())
    return float(centred[1:] @ centred[:-1]) / total if total else 0.0
