"""Correlations and bands of `kvpolicy epikv-bands` from made-up importances."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from scipy.stats import spearmanr

from kvpolicy.reports.epikv.bands import LEVEL, Bands, Correlation, correlations, propose


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ties", [False, True])
def test_rho_is_that_of_scipy(ties: bool) -> None:
    importance, changes = drawn(60), drawn(5, 60, seed=1)
    changes += torch.tensor([2.0, 0.5, 0.0, -0.5, -2.0])[:, None] * importance
    if ties:
        importance, changes = importance.round(), changes.round()
    found = correlations(importance, changes)
    expected = [spearmanr(importance.numpy(), change.numpy()).statistic for change in changes]
    assert [c.rho for c in found] == pytest.approx(expected, rel=1e-9)
    assert [c.layer for c in found] == list(range(5))
    assert all(c.low < c.rho < c.high for c in found)


def test_the_interval_is_that_of_the_formula_for_independent_tokens() -> None:
    importance, changes = drawn(500), drawn(4, 500, seed=1)
    changes[0] += importance
    for c in correlations(importance, changes):
        assert 450 < c.n_effective <= 500
        half = NormalDist().inv_cdf(1 - 0.05 / 8) * math.sqrt((1 + c.rho**2 / 2) / (c.n_effective - 3))
        assert math.atanh(c.high) - math.atanh(c.rho) == pytest.approx(half)
        assert math.atanh(c.rho) - math.atanh(c.low) == pytest.approx(half)


def test_all_intervals_hold_together_as_often_as_they_say() -> None:
    """Without any relation at most one run in twenty finds a layer that differs, however many layers there are."""
    differs = 0
    for run in range(400):
        found = correlations(drawn(60, seed=run), drawn(20, 60, seed=1000 + run))
        differs += any(not c.low <= 0 <= c.high for c in found)
    assert differs <= 400 * (1 - LEVEL) + 3 * math.sqrt(400 * 0.05 * 0.95)
    assert differs > 4


def test_tokens_like_their_neighbours_count_for_less() -> None:
    """Two unrelated random walks: the nominal interval would exclude 0 most of the time."""
    steps = drawn(2, 2000, seed=5)
    slow = torch.stack([sum((0.95 ** (199 - k)) * s[k : k + 1801] for k in range(200)) for s in steps])
    (found,) = correlations(slow[0], slow[1:])
    assert found.n_effective == pytest.approx(1801 * (1 - 0.95**2) / (1 + 0.95**2), rel=0.3)
    assert found.low < 0 < found.high


@pytest.mark.parametrize("constant", ["importance", "change"])
def test_what_is_the_same_for_all_tokens_is_related_to_nothing(constant: str) -> None:
    importance, changes = drawn(30), drawn(3, 30, seed=1)
    (importance if constant == "importance" else changes[1]).fill_(2.5)
    found = correlations(importance, changes)[1]
    assert (found.rho, found.low, found.high) == (0, -1, 1)


def test_perfect_and_tiny_samples_have_an_interval() -> None:
    (found,) = correlations(torch.arange(9.0), torch.arange(9.0)[None])
    assert found.rho == pytest.approx(1)
    assert -1 <= found.low < found.high <= 1
    (found,) = correlations(torch.arange(3.0), torch.tensor([[1.0, 3.0, 2.0]]))
    assert (found.low, found.high) == (-1, 1)


def related(*rhos: float, half: float = 0.1) -> Bands:
    return propose([Correlation(layer, rho, rho - half, rho + half, 100) for layer, rho in enumerate(rhos)])


def test_the_layers_of_the_largest_and_the_smallest_rho_are_proposed() -> None:
    bands = related(0.0, 0.15, 0.3, 0.2, 0.05, -0.2, -0.4, -0.05, 0.9)
    assert bands.options == "band_a:2;band_b:6"
    assert bands.wide_options == "signal:adaptive;band_a:1;band_a_last:3;band_b:5;band_b_last:6"
    assert bands.verdict == "Both bands are supported: the intervals of their layers exclude zero."


def test_the_last_layer_is_never_proposed() -> None:
    assert related(0.1, 0.2, 0.9).options == "band_a:1;band_b:0"
    assert related(-0.1, -0.2, -0.9).options == "band_a:0;band_b:1"


def test_bands_that_nothing_supports_are_called_so() -> None:
    bands = related(0.05, 0.0, -0.05, 0.4)
    assert bands.options == "band_a:0;band_b:2"
    assert bands.wide_options == "signal:adaptive;band_a:0;band_a_last:0;band_b:2;band_b_last:2"
    assert bands.verdict == "No layer differs from zero: these bands are not supported."


def test_half_supported_bands_are_called_so() -> None:
    assert related(0.3, 0.05, -0.05, 0.0).verdict == (
        "Of these bands band_b is not supported (layer 2: rho -0.050, interval -0.150 to +0.050, "
        "which is not below zero)."
    )
    assert "band_a is not supported (layer 1: rho -0.200" in related(-0.3, -0.2, -0.4, 0.0).verdict
    assert related(-0.3, -0.2, -0.4, 0.0).b_supported


def test_the_options_are_options_of_the_policy() -> None:
    from kvpolicy.policies.base import Band
    from kvpolicy.policies.epikv import EpiKV
    from kvpolicy.policies.options import build, parse_options

    first = build(EpiKV, parse_options(related(0.3, 0.0, -0.3, 0.0).options))
    assert first.needs(1).hidden_bands == (Band(0, 0), Band(2, 2))
    bands = related(0.2, 0.3, 0.0, -0.2, -0.3, -0.15, 0.0)
    narrow, wide = (build(EpiKV, parse_options(text)) for text in (bands.options, bands.wide_options))
    assert narrow == EpiKV(band_a=1, band_b=4)
    assert wide.needs(1).hidden_bands == (Band(0, 1), Band(3, 5))
    narrow.check(64, 1)
    wide.check(64, 1)
