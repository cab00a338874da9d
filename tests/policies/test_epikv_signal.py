"""EpiKV's signals against the published formula in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy.policies.epikv_signal import Signal, band_signal

SIGNALS: tuple[Signal, ...] = ("zscore", "raw", "rolling", "adaptive")
signals = pytest.mark.parametrize("signal", SIGNALS)


def z_score(values: list[float], window: int) -> float:
    newest = values[-window:]
    if len(newest) < 2:
        return 0.0
    mean = sum(newest) / len(newest)
    variance = sum((value - mean) ** 2 for value in newest) / len(newest)
    return (newest[-1] - mean) / (math.sqrt(variance) + 1e-6)


def signal_by_loops(change: torch.Tensor, column: int, signal: str, window: int) -> float:
    """As the published code computes it when the token of `column` is generated: from two growing buffers."""
    a, b = (band[: column + 1] for band in change.double().tolist())
    if signal == "raw":
        return float(a[-1] - b[-1])
    if signal == "rolling":
        count = len(a[-window:])
        return float(sum(a[-window:]) / count - sum(b[-window:]) / count)
    return (1.29 if signal == "adaptive" else 1.0) * z_score(a, window) - z_score(b, window)


def random_change(decoded: int, seed: int = 0) -> torch.Tensor:
    """Positive, unequal, with a trend, as real changes are."""
    generator = torch.Generator().manual_seed(seed)
    trend = torch.linspace(3, 1, max(decoded, 1))[:decoded]
    return torch.randn(2, decoded, generator=generator).mul(0.5).exp() * torch.stack([trend, 4 - trend])


@signals
@pytest.mark.parametrize("window", [2, 3, 64])
@pytest.mark.parametrize("decoded", [1, 2, 63, 64, 65, 200])
def test_the_signal_is_that_of_the_published_formula(decoded: int, window: int, signal: Signal) -> None:
    change = random_change(decoded, seed=window)
    found = band_signal(change, torch.arange(decoded), signal, window)
    expected = [signal_by_loops(change, column, signal, window) for column in range(decoded)]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_worked_example() -> None:
    # A: 1, 3 -> z = (3 - 2) / 1; then window 3, 5 -> z = (5 - 4) / 1.  B: 4, 4 -> z = 0; then 4, 0 -> z = (0 - 2) / 2.
    change = torch.tensor([[1.0, 3.0, 5.0], [4.0, 4.0, 0.0]])
    columns = torch.arange(3)
    assert band_signal(change, columns, "zscore", 2).tolist() == pytest.approx([0, 1, 2], abs=3e-6)
    assert band_signal(change, columns, "adaptive", 2).tolist() == pytest.approx([0, 1.29, 2.29], abs=3e-6)
    assert band_signal(change, columns, "rolling", 2).tolist() == [-3, -2, 2]
    assert band_signal(change, columns, "raw", 2).tolist() == [-3, -1, 5]
    constant = torch.ones(2, 9)
    assert band_signal(constant, torch.arange(9), "zscore", 4).tolist() == [0] * 9


@signals
def test_a_signal_is_fixed_when_its_token_is_generated(signal: Signal) -> None:
    change = random_change(150)
    whole = band_signal(change, torch.arange(150), signal, 64)
    for seen in (1, 2, 64, 149):
        assert torch.equal(band_signal(change[:, :seen], torch.arange(seen), signal, 64), whole[:seen])
    some = torch.tensor([0, 5, 100, 149])
    assert torch.equal(band_signal(change, some, signal, 64), whole[some])


@signals
def test_before_the_first_token_the_signal_is_zero(signal: Signal) -> None:
    for change in (random_change(5), torch.empty(2, 0)):
        assert band_signal(change, torch.tensor([-1, -1]), signal, 64).tolist() == [0, 0]
