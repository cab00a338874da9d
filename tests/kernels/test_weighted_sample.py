"""Gumbel top-k against the exact probabilities of drawing one item after the other without replacement."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy.kernels.keyed_noise import uniform
from kvpolicy.kernels.weighted_sample import SMALLEST_WEIGHT, gumbel_keys, weighted_sample
from tests.kernels.frequencies import (
    check_counts,
    check_inclusions,
    check_same_distribution,
    count_sequences,
    inclusion_probabilities,
    sequence_probabilities,
)

ROUNDS = 100_000
WEIGHTS: dict[str, list[float]] = {
    "five unequal weights": [0.45, 0.25, 0.15, 0.1, 0.05],
    "five equal weights": [0.2] * 5,
    "one weight outweighs the others": [12.0, 1.0, 1.0, 1.0],
    "weights far below one": [3e-9, 2e-9, 1e-9],
}
weightings = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)


def numbers(rounds: int, items: int, *, seed: int) -> torch.Tensor:
    """``[rounds, items]`` uniform numbers; rounds share none."""
    return uniform(torch.tensor(seed), torch.arange(rounds)[:, None], torch.arange(items))


def draw(weights: list[float], draws: int, *, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[ROUNDS, draws]``: what is drawn in independent rounds from the same weights."""
    given = torch.tensor(weights, dtype=dtype).expand(ROUNDS, -1)
    return weighted_sample(given, draws, numbers(ROUNDS, len(weights), seed=seed))


@weightings
@pytest.mark.parametrize("draws", [1, 2, 3])
def test_ordered_draws_have_the_probabilities_of_drawing_one_after_the_other(weights: list[float], draws: int) -> None:
    drawn = draw(weights, draws, seed=draws)
    check_counts(count_sequences(drawn, len(weights)), sequence_probabilities(weights, draws))


@weightings
@pytest.mark.parametrize("draws", [2, 3])
def test_items_are_included_as_often_as_by_drawing_one_after_the_other(weights: list[float], draws: int) -> None:
    counts = torch.bincount(draw(weights, draws, seed=10 + draws).flatten(), minlength=len(weights))
    check_inclusions(counts, ROUNDS, inclusion_probabilities(weights, draws))


@weightings
def test_the_first_draw_is_in_proportion_to_the_weights(weights: list[float]) -> None:
    first = draw(weights, len(weights), seed=20)[:, 0]
    check_counts(torch.bincount(first, minlength=len(weights)), [weight / sum(weights) for weight in weights])


@weightings
@pytest.mark.parametrize("draws", [2, 3])
def test_draws_are_distributed_as_those_of_torch_multinomial(weights: list[float], draws: int) -> None:
    generator = torch.Generator().manual_seed(draws)
    theirs = torch.tensor(weights).expand(ROUNDS, -1).multinomial(draws, replacement=False, generator=generator)
    ours = draw(weights, draws, seed=30 + draws)
    check_same_distribution(count_sequences(ours, len(weights)), count_sequences(theirs, len(weights)))


def test_a_weight_of_zero_is_never_drawn_while_a_positive_one_is_left() -> None:
    weights = [0.0, 0.5, 0.0, 0.3, 0.2]
    for draws in (1, 2, 3):
        check_counts(count_sequences(draw(weights, draws, seed=40), 5), sequence_probabilities(weights, draws))


def test_weights_of_zero_are_drawn_once_the_positive_ones_have_run_out() -> None:
    drawn = draw([0.0, 0.6, 0.0, 0.4, 0.0], 4, seed=41)
    assert (drawn[:, :2].sort(dim=-1).values == torch.tensor([1, 3])).all()
    assert (drawn[:, 2] != drawn[:, 3]).all()
    # Which two of the three zeros come last, and in which order, is left to chance alone.
    rank = torch.tensor([0, -1, 1, -1, 2])[drawn[:, 2:]]
    check_counts(count_sequences(rank, 3), sequence_probabilities([1.0] * 3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_weights_that_are_all_zero_are_drawn_alike(dtype: torch.dtype) -> None:
    drawn = draw([0.0] * 4, 2, seed=42, dtype=dtype)
    check_counts(count_sequences(drawn, 4), sequence_probabilities([1.0] * 4, 2))


def test_the_smallest_fp32_number_comes_before_every_zero() -> None:
    smallest = 2.0**-149
    assert (draw([0.0, 1.0, 0.0, smallest, 0.0], 2, seed=43) == torch.tensor([1, 3])).all()


def test_no_uniform_number_lets_a_zero_pass_the_smallest_fp32_number() -> None:
    least, most = 2.0**-53, 1 - 2.0**-53  # the ends of what `keyed_noise.uniform` gives
    weights, extreme = torch.tensor([0.0, 2.0**-149]), torch.tensor([most, least], dtype=torch.float64)
    assert weighted_sample(weights, 2, extreme).tolist() == [1, 0]
    assert gumbel_keys(weights, extreme).isfinite().all()


@pytest.mark.parametrize("factor", [2.0**-60, 1e-30, 3.7, 1e30])
def test_scaling_all_weights_changes_nothing(factor: float) -> None:
    weights = torch.rand(200, 111, generator=torch.Generator().manual_seed(0)).double()
    u = numbers(200, 111, seed=50)
    assert torch.equal(weighted_sample(weights * factor, 40, u), weighted_sample(weights, 40, u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_weights_are_widened_and_not_the_noise_narrowed(dtype: torch.dtype) -> None:
    weights = torch.rand(50, 63, generator=torch.Generator().manual_seed(0)).to(dtype)
    u = numbers(50, 63, seed=51)
    assert torch.equal(weighted_sample(weights, 20, u), weighted_sample(weights.double(), 20, u))
    assert gumbel_keys(weights, u).dtype == torch.float64


def test_a_key_is_the_log_weight_plus_a_gumbel_number() -> None:
    weights, u = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    pairs = zip([SMALLEST_WEIGHT, 1.0, 5.0], u.tolist(), strict=True)
    expected = [math.log(weight) - math.log(-math.log(chance)) for weight, chance in pairs]
    assert gumbel_keys(weights, u).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("shape", [(1,), (63,), (2, 3, 33), (2, 1, 7, 5), (0, 4)], ids=str)
def test_all_axes_but_the_last_are_kept_and_indices_are_distinct(shape: tuple[int, ...]) -> None:
    *leading, items = shape
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(items))
    u = numbers(math.prod(leading), items, seed=60).view(shape)
    untouched = weights.clone(), u.clone()
    for draws in {0, 1, items // 2, items}:
        drawn = weighted_sample(weights, draws, u)
        assert drawn.shape == (*leading, draws)
        assert drawn.dtype == torch.int64
        assert all(len({*row} & {*range(items)}) == draws for row in drawn.view(math.prod(leading), draws).tolist())
    assert torch.equal(weights, untouched[0])
    assert torch.equal(u, untouched[1])


def test_fewer_draws_are_the_first_of_more() -> None:
    weights, u = torch.rand(20, 33, generator=torch.Generator().manual_seed(0)), numbers(20, 33, seed=61)
    assert torch.equal(weighted_sample(weights, 7, u), weighted_sample(weights, 33, u)[:, :7])


@pytest.mark.parametrize(
    ("weights", "draws", "noise", "sentence"),
    [
        pytest.param((2, 5), 2, torch.zeros(5, dtype=torch.float64), "must equal", id="one noise for all rows"),
        pytest.param((5,), 2, torch.zeros(6, dtype=torch.float64), "must equal", id="noise for more items"),
        pytest.param((5,), 2, torch.zeros(5), "must be float64", id="noise in fp32"),
        pytest.param((5,), 6, torch.zeros(5, dtype=torch.float64), "draws = 6 of 5 items", id="more than there are"),
        pytest.param((5,), -1, torch.zeros(5, dtype=torch.float64), "draws = -1 of 5 items", id="a negative number"),
    ],
)
def test_arguments_that_do_not_fit_are_programming_errors(
    weights: tuple[int, ...], draws: int, noise: torch.Tensor, sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        weighted_sample(torch.ones(weights), draws, noise)
