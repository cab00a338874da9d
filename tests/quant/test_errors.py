"""Error measures against their formulas, one number after the other."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from kvpolicy.quant.errors import (
    correlation,
    error_by_position,
    error_share,
    row_errors,
    tail_ratios,
    token_errors,
)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
SHAPES = [(3, 8), (2, 1, 1), (2, 3, 17, 64), (4, 9, 80)]


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    rows = torch.randn(shape, generator=generator).to(dtype)
    return rows, (rows.float() + 0.1 * torch.randn(shape, generator=generator)).to(dtype)


def close(actual: torch.Tensor, expected: list[float], shape: tuple[int, ...]) -> None:
    assert actual.dtype == torch.float64
    assert actual.shape == shape
    assert actual.flatten().tolist() == pytest.approx(expected, rel=1e-11, abs=1e-300, nan_ok=True)


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_of_a_head(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, restored = pair(*shape, dtype=dtype)
    errors = row_errors(rows, restored)
    heads = list(zip(*(x.double().reshape(-1, shape[-2] * shape[-1]).tolist() for x in (rows, restored)), strict=True))
    noise = [sum((b - a) ** 2 for a, b in zip(x, y, strict=True)) for x, y in heads]
    signal = [sum(a**2 for a in x) for x, _ in heads]
    after = [sum(b**2 for b in y) for _, y in heads]
    dots = [sum(a * b for a, b in zip(x, y, strict=True)) for x, y in heads]
    lead, numbers = shape[:-2], shape[-2] * shape[-1]
    close(errors.mse, [n / numbers for n in noise], lead)
    close(errors.relative, [math.sqrt(n) / math.sqrt(s) for n, s in zip(noise, signal, strict=True)], lead)
    close(errors.sqnr_db, [10 * math.log10(s / n) for n, s in zip(noise, signal, strict=True)], lead)
    close(errors.max_abs, [max(abs(b - a) for a, b in zip(x, y, strict=True)) for x, y in heads], lead)
    close(errors.cosine, [d / math.sqrt(s) / math.sqrt(t) for d, s, t in zip(dots, signal, after, strict=True)], lead)


def test_errors_that_have_no_denominator() -> None:
    """One head each: exact, exact zeros, zeros that became numbers, numbers that became zeros, the opposite."""
    one, none = torch.ones(2, 4), torch.zeros(2, 4)
    errors = row_errors(torch.stack([one, none, none, one, one]), torch.stack([one, none, one, none, -one]))
    inf = math.inf
    close(errors.mse, [0, 0, 1, 1, 4], (5,))
    close(errors.relative, [0, 0, inf, 1, 2], (5,))
    close(errors.sqnr_db, [inf, inf, -inf, 0, 10 * math.log10(1 / 4)], (5,))
    close(errors.max_abs, [0, 0, 1, 1, 2], (5,))
    close(errors.cosine, [1, 1, 0, 0, -1], (5,))


def test_large_and_small_numbers_neither_overflow_nor_vanish() -> None:
    size = torch.tensor([3e38, 1.0, 1e-37]).view(3, 1, 1)
    rows, restored = size.expand(3, 5, 16), (0.5 * size).expand(3, 5, 16)
    errors = row_errors(rows, restored)
    close(errors.relative, [0.5] * 3, (3,))
    close(errors.sqnr_db, [10 * math.log10(4)] * 3, (3,))
    close(errors.cosine, [1] * 3, (3,))
    assert errors.mse.isfinite().all()


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_error_of_a_token(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, restored = pair(*shape, dtype=dtype)
    tokens = zip(*(x.double().reshape(-1, shape[-1]).tolist() for x in (rows, restored)), strict=True)
    expected = [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for x, y in tokens]
    close(token_errors(rows, restored), expected, shape[:-1])


@pytest.mark.parametrize("measure", [row_errors, token_errors])
def test_shapes_that_differ_are_refused(measure: object) -> None:
    with pytest.raises(AssertionError, match="must be"):
        measure(torch.zeros(2, 3, 4), torch.zeros(3, 4))  # type: ignore[operator]


def test_correlation_of_each_head() -> None:
    x, y = pair(2, 3, 50)
    x, y = x.exp() + 1000, y - 5
    pairs = zip(x.double().view(-1, 50).tolist(), y.double().view(-1, 50).tolist(), strict=True)
    expected = [statistics.correlation(a, b) for a, b in pairs]
    assert correlation(x, y).view(-1).tolist() == pytest.approx(expected, rel=1e-9)
    assert correlation(x, 2 * x - 7).view(-1).tolist() == pytest.approx([1] * 6, rel=1e-5)
    assert correlation(x, -x).view(-1).tolist() == pytest.approx([-1] * 6, rel=1e-12)
    many = torch.randn(1000, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(correlation(many, 3 * many + 1).max()) == 1


def test_a_constant_correlates_with_nothing_and_spoils_no_other_head() -> None:
    """The mean of 0.1 is not 0.1 by rounding, so that its variance is not 0."""
    x, y = (z.double() for z in pair(4, 41))
    x[0], y[1], x[2], y[2] = 0.1, 0.1, 0.1, 0.0
    found = correlation(x, y)
    assert found.isnan().tolist() == [True, True, True, False]
    assert float(found[3]) == pytest.approx(statistics.correlation(x[3].tolist(), y[3].tolist()), rel=1e-5)
    assert correlation(torch.ones(2, 1), torch.zeros(2, 1)).isnan().all()


def test_tail_ratios_of_each_head() -> None:
    ranges = pair(2, 3, 301)[0].exp()
    found = tail_ratios(ranges)
    p99, largest = [], []
    for row in ranges.view(-1, 301).double().tolist():
        ordered = sorted(row)
        p99.append(ordered[297] / ordered[150])  # 301 numbers: 0.99 * 300 is a whole place
        largest.append(ordered[300] / ordered[150])
    close(found.p99_to_p50, p99, (2, 3))
    close(found.max_to_p50, largest, (2, 3))


def test_percentiles_between_two_numbers_are_interpolated() -> None:
    found = tail_ratios(torch.tensor([4.0, 1, 3, 2]))
    close(found.p99_to_p50, [3.97 / 2.5], ())
    close(found.max_to_p50, [4 / 2.5], ())


def test_tails_over_a_median_of_nothing() -> None:
    found = tail_ratios(torch.tensor([[0.0] * 200, [0.0] * 199 + [1], [0.0] * 101 + [1] * 99, [2.0] * 200]))
    close(found.p99_to_p50, [1, 1, math.inf, 1], (4,))
    close(found.max_to_p50, [1, math.inf, math.inf, 1], (4,))


def test_share_of_the_error_that_some_tokens_hold() -> None:
    errors = torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    protected = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    close(error_share(errors, protected), [0.4, 0, 1, 0, 0], (5,))


@pytest.mark.parametrize(("tokens", "bins"), [(12, 4), (13, 4), (7, 7), (5, 1), (100, 7), (3, 2)])
def test_error_by_position(tokens: int, bins: int) -> None:
    errors = pair(2, 3, tokens)[0].square()
    found = error_by_position(errors, bins)
    expected, sizes = [], set()
    for row in errors.double().view(-1, tokens).tolist():
        for part in range(bins):
            members = row[math.floor(part * tokens / bins) : math.floor((part + 1) * tokens / bins)]
            sizes.add(len(members))
            expected.append(math.fsum(members) / len(members))
    close(found, expected, (2, 3, bins))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("bins", [0, 6, -1])
def test_stretches_without_tokens_are_refused(bins: int) -> None:
    with pytest.raises(AssertionError, match="bins"):
        error_by_position(torch.zeros(2, 5), bins)


def test_more_numbers_than_torch_takes_percentiles_of() -> None:
    """`torch.quantile` refuses more than 2^24 numbers, which a cache of a long text has."""
    ranges = torch.linspace(1, 3, 2**17 + 1).repeat(130, 1)
    assert ranges.numel() > 2**24
    found = tail_ratios(ranges)
    assert np.allclose(found.p99_to_p50, 2.98 / 2, rtol=1e-5)
