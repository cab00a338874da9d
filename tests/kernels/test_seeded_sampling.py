"""Seeded token sampling: SGLang's filters in loops, frequencies, and requests that do not see each other."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kvpolicy.kernels.keyed_noise import uniform
from kvpolicy.kernels.seeded_sampling import filtered_weights, sample_tokens
from tests.kernels.frequencies import check_counts

ROUNDS = 100_000
NO_FILTER = (1 << 30, 1.0, 0.0)


def filtered_by_loops(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """SGLang's PyTorch sampler for one request, in exact fractions; of equally likely tokens the lower id is first."""
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, before = [0.0] * len(probs), Fraction(0)
    for rank, token in enumerate(ranked):
        p = Fraction(probs[token])
        if rank < top_k and before <= Fraction(top_p) and p >= Fraction(min_p) * Fraction(probs[ranked[0]]):
            kept[token] = probs[token]
        before += p
    return kept


def tied_probs(tokens: int, *, seed: int, parts: int = 1024) -> torch.Tensor:
    """``[tokens]`` multiples of 1 / parts that add up to 1, many of them equal: sums of them are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(parts, generator=generator).square().mul(tokens).long()
    return torch.bincount(skewed, minlength=tokens) / parts


def columns(filters: list[tuple[int, float, float]]) -> list[torch.Tensor]:
    return [torch.tensor(column) for column in zip(*filters, strict=True)]


FILTERS = [
    pytest.param(NO_FILTER, id="no filter"),
    pytest.param((1, 1.0, 0.0), id="top-k 1"),
    pytest.param((5, 1.0, 0.0), id="top-k 5"),
    pytest.param((1 << 30, 1e-6, 0.0), id="tiny top-p"),
    pytest.param((1 << 30, 0.0, 0.0), id="top-p of zero"),
    pytest.param((1 << 30, 0.75, 0.0), id="top-p"),
    pytest.param((1 << 30, 1.0, 1.0), id="min-p 1"),
    pytest.param((1 << 30, 1.0, 0.25), id="min-p"),
    pytest.param((20, 0.875, 0.0625), id="all three"),
]


@pytest.mark.parametrize("given", FILTERS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 50, 1000])
def test_what_is_filtered_out_follows_the_rules_of_sglang(tokens: int, given: tuple[int, float, float]) -> None:
    probs = torch.stack([tied_probs(tokens, seed=seed) for seed in range(8)])
    untouched = probs.clone()
    kept = filtered_weights(probs, *columns([given] * 8))
    assert kept.tolist() == [filtered_by_loops(row, *given) for row in probs.tolist()]
    assert torch.equal(probs, untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
def test_each_request_has_its_own_filters(dtype: torch.dtype) -> None:
    filters = [(3, 1.0, 0.0), NO_FILTER, (1 << 30, 0.5, 0.0), (1 << 30, 1.0, 0.25), (1, 0.0, 1.0)]
    probs = tied_probs(20, seed=3, parts=128).to(dtype).expand(5, -1)  # sums of 128 parts are exact in bf16, too
    kept = filtered_weights(probs, *columns(filters))
    assert kept.dtype == dtype
    expected = [filtered_by_loops(probs[0].tolist(), *given) for given in filters]
    assert kept.tolist() == expected
    assert len({tuple(row) for row in expected}) == 5


def test_no_filter_leaves_all_tokens() -> None:
    probs = tied_probs(1000, seed=0)[None]
    assert torch.equal(filtered_weights(probs, *columns([NO_FILTER])), probs)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param((3, 1.0, 0.0), [2, 4, 5], id="top-k takes the lower ids"),
        pytest.param((1, 1.0, 0.0), [4], id="top-k 1 takes the likeliest"),
        pytest.param((1 << 30, 0.25, 0.0), [2, 4], id="before the second token there is exactly top-p"),
        pytest.param((1 << 30, 0.0, 0.0), [4], id="top-p of zero keeps the first"),
        pytest.param((1 << 30, 1.0, 0.5), [2, 4, 5, 6, 7, 8, 9], id="min-p keeps all that are exactly that likely"),
    ],
)
def test_equally_likely_tokens_at_the_cut(given: tuple[int, float, float], kept: list[int]) -> None:
    probs = torch.tensor([[0.0, 0.0, 0.125, 0.0, 0.25, *[0.125] * 5]])
    assert filtered_weights(probs, *columns([given])).nonzero()[:, 1].tolist() == kept


def test_filters_of_a_request_do_not_depend_on_the_batch() -> None:
    probs = torch.stack([tied_probs(300, seed=seed) for seed in range(6)])
    filters = [(5 * row + 1, 0.125 * (row + 2), 0.015625 * row) for row in range(6)]
    together = filtered_weights(probs, *columns(filters))
    for row in range(6):
        alone = filtered_weights(probs[row : row + 1], *columns(filters[row : row + 1]))
        assert torch.equal(alone[0], together[row])


WEIGHTS = {
    "probabilities": [0.4, 0.3, 0.2, 0.05, 0.05],
    "weights that do not add up to one": [0.0, 7.0, 2.0, 0.0, 1.0, 0.5],
    "one token": [0.0, 0.25, 0.0],
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("key", ["seed", "position"])
def test_tokens_are_drawn_in_proportion_to_their_weights(weights: list[float], key: str) -> None:
    varied, fixed = torch.arange(ROUNDS), torch.full((ROUNDS,), 17)
    seeds, positions = (varied, fixed) if key == "seed" else (fixed, varied)
    drawn = sample_tokens(torch.tensor(weights).expand(ROUNDS, -1), seeds, positions)
    assert drawn.dtype == torch.int64
    counts = torch.bincount(drawn, minlength=len(weights))
    check_counts(counts, [weight / sum(weights) for weight in weights])


@pytest.mark.parametrize("key", ["seed", "position"])
def test_neighbouring_seeds_and_positions_draw_independently(key: str) -> None:
    weights = [0.5, 0.3, 0.2]
    varied, fixed = torch.arange(2 * ROUNDS), torch.full((2 * ROUNDS,), 17)
    seeds, positions = (varied, fixed) if key == "seed" else (fixed, varied)
    first, second = sample_tokens(torch.tensor(weights).expand(2 * ROUNDS, -1), seeds, positions).view(-1, 2).unbind(1)
    pairs = torch.bincount(3 * first + second, minlength=9)
    check_counts(pairs, [a * b for a in weights for b in weights])


def test_a_token_of_weight_zero_is_never_drawn_even_beside_the_smallest() -> None:
    weights = torch.tensor([0.0, 2.0**-149, 0.0]).expand(ROUNDS, -1)
    assert (sample_tokens(weights, torch.arange(ROUNDS), torch.zeros(ROUNDS, dtype=torch.int64)) == 1).all()


def test_the_token_with_the_earliest_arrival_is_drawn() -> None:
    weights = torch.rand(20, 111, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(20) * 10**15 - 10**16, torch.arange(20) + 5
    drawn = sample_tokens(weights, seeds, positions)
    for row in range(20):
        keys = (torch.tensor(int(seeds[row])), torch.tensor(int(positions[row])), torch.arange(111))
        arrivals = -uniform(*keys).log() / weights[row].double()
        assert int(drawn[row]) == int(arrivals.argmin())


def test_a_request_draws_alike_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(64, 1000, generator=generator)
    seeds, positions = torch.randint(2**62, (64,), generator=generator), torch.randint(4096, (64,), generator=generator)
    together = sample_tokens(weights, seeds, positions)
    order = torch.randperm(64, generator=generator)
    assert torch.equal(sample_tokens(weights[order], seeds[order], positions[order]), together[order])
    for part in (slice(0, 1), slice(5, 6), slice(3, 40)):
        assert torch.equal(sample_tokens(weights[part], seeds[part], positions[part]), together[part])
    weights[1:], seeds[1:], positions[1:] = 1, 3, 0
    assert sample_tokens(weights, seeds, positions)[0] == together[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_the_dtype_of_positions_does_not_matter(dtype: torch.dtype) -> None:
    weights, seeds = torch.rand(20, 63, generator=torch.Generator().manual_seed(0)), torch.arange(20)
    expected = sample_tokens(weights, seeds, torch.arange(20))
    assert torch.equal(sample_tokens(weights, seeds, torch.arange(20, dtype=dtype)), expected)


@pytest.mark.parametrize("key", ["seed", "position"])
def test_another_seed_or_position_draws_another_token(key: str) -> None:
    weights, numbers = torch.ones(200, 1000), torch.arange(200)
    before = sample_tokens(weights, numbers, numbers)
    after = sample_tokens(weights, numbers + (key == "seed"), numbers + (key == "position"))
    # 0.2 coincidences expected; 8 or more have a probability of 5e-11.
    assert int((before == after).sum()) < 8
