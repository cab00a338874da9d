"""Projected energy against the sum that defines it, in fp64 and one element at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvpolicy.kernels.compact import PagedTokens
from kvpolicy.kernels.projected_energy import projected_energy, projected_energy_reference

# Relative error of one score. Inputs are widened exactly and all arithmetic is fp32, so the dtype of the cache does
# not matter; a kernel that multiplies in lower precision may widen its own entry.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}

Energy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
implementations = pytest.mark.parametrize("energy", [projected_energy, projected_energy_reference])


def loop(keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """``sum_r (sum_d k_d G_dr)^2 * sum_r (sum_d v_d G_dr)^2`` for ``[L, H, N, D]`` and ``[L, D, r]``."""
    layers, heads, tokens, _ = keys.shape
    result = torch.empty(layers, heads, tokens, dtype=torch.float64).fill_(torch.nan)
    for layer in range(layers):
        columns = projection[layer].double().T
        for head in range(heads):
            for n in range(tokens):
                energies = [
                    sum(float((x[layer, head, n].double() * column).sum()) ** 2 for column in columns)
                    for x in (keys, values)
                ]
                result[layer, head, n] = energies[0] * energies[1]
    return result


@implementations
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "head_dim", "rank"),
    [
        pytest.param(1, 1, 1, 60, 20, id="one token"),
        pytest.param(2, 3, 63, 64, 20, id="63 tokens"),
        pytest.param(1, 2, 111, 80, 16, id="111 tokens"),
        pytest.param(3, 1, 33, 96, 20, id="one head"),
        pytest.param(1, 2, 65, 128, 7, id="odd rank"),
    ],
)
def test_scores_equal_the_defining_sum(
    energy: Energy, layers: int, heads: int, tokens: int, head_dim: int, rank: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    keys, values = (torch.randn(layers, heads, tokens, head_dim, generator=generator).to(dtype) for _ in range(2))
    projection = torch.randn(layers, head_dim, rank, generator=generator)
    scores = energy(keys, values, projection)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(
        scores.double(), loop(keys, values, projection), rtol=TOLERANCE[dtype], atol=0, check_dtype=False
    )


@implementations
def test_large_keys_do_not_overflow_the_cache_dtype(energy: Energy) -> None:
    keys = torch.full((1, 1, 1, 64), 300.0, dtype=torch.float16)  # 64 * 300^2 is beyond fp16
    assert float(energy(keys, keys, torch.ones(1, 64, 1))) == pytest.approx((64 * 300.0) ** 4)


@implementations
def test_a_worked_example(energy: Energy) -> None:
    # k G = (1*1 + 2*3, 1*2 + 2*4) = (7, 10), v G = (1*1 - 1*3, 1*2 - 1*4) = (-2, -2)
    keys, values = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2), torch.tensor([1.0, -1.0]).view(1, 1, 1, 2)
    projection = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert energy(keys, values, projection).tolist() == [[[(49 + 100) * (4 + 4)]]]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_in_a_pool_score_as_they_do_when_gathered(threads: int) -> None:
    generator = torch.Generator().manual_seed(threads)
    layers, slots, row = 3, 1200, torch.randperm(1200, generator=generator)[:1003]
    pools = torch.randn(2, layers, slots, 3, 64, generator=generator).bfloat16()
    projection = torch.randn(layers, 64, 20, generator=generator)
    keys, values = (PagedTokens(list(pool), row) for pool in pools)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        scores = projected_energy(keys, values, projection)
        assert torch.equal(scores, projected_energy(keys.gathered, values.gathered, projection))
    finally:
        torch.set_num_threads(before)
    expected = projected_energy_reference(keys.gathered, values.gathered, projection)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=0)


def test_a_token_that_is_not_finite_leaves_the_others_alone() -> None:
    keys = torch.randn(2, 3, 63, 64, generator=torch.Generator().manual_seed(0))
    projection = torch.ones(2, 64, 20)
    before = projected_energy(keys, keys, projection)
    keys[1, 2, 40], keys[0, 0, 0] = torch.nan, torch.inf
    after = projected_energy(keys, keys, projection)
    changed = ~after.isfinite()
    assert changed.nonzero().tolist() == [[0, 0, 0], [1, 2, 40]]
    assert torch.equal(after[~changed], before[~changed])


@implementations
def test_no_tokens(energy: Energy) -> None:
    empty = torch.zeros(2, 3, 0, 64)
    assert energy(empty, empty, torch.ones(2, 64, 20)).shape == (2, 3, 0)


@pytest.mark.parametrize(
    ("keys", "values", "projection"),
    [
        pytest.param((1, 2, 5, 8), (1, 2, 6, 8), (1, 8, 4), id="keys and values differ"),
        pytest.param((2, 5, 8), (2, 5, 8), (1, 8, 4), id="no layer axis"),
        pytest.param((3, 2, 5, 8), (3, 2, 5, 8), (1, 8, 4), id="projections of too few layers"),
        pytest.param((1, 2, 5, 8), (1, 2, 5, 8), (1, 6, 4), id="projection of another head size"),
    ],
)
def test_shapes_that_do_not_fit_are_programming_errors(
    keys: tuple[int, ...], values: tuple[int, ...], projection: tuple[int, ...]
) -> None:
    with pytest.raises(AssertionError, match="shape"):
        projected_energy(torch.zeros(keys), torch.zeros(values), torch.zeros(projection))
