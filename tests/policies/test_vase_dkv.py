"""VaSE-DKV against the formula of arXiv 2606.03928, in fp64 and one token at a time."""

from __future__ import annotations

import random

import pytest
import torch

from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.policies.curdkv import CurDKV
from kvpolicy.policies.vase_dkv import VaseDKV
from tests.policies.candidates import random_candidates
from tests.policies.near_ties import check_top

CASES_PER_SIZE = 25
TOKENS = (1, 2, 17, 63, 65, 111)


def published_scores(keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor, sinks: int) -> list[float]:
    """One head's candidates ``[N, D]`` to scores: projected energies, normalised, the sinks set to 1."""
    k, v, g = keys.double(), values.double(), projection.double()
    energy = [float(((k[n] @ g) ** 2).sum() * ((v[n] @ g) ** 2).sum()) for n in range(len(k))]
    total = sum(energy)
    return [1.0 if n < sinks else e / total for n, e in enumerate(energy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [60, 64, 80, 96, 128])
def test_kept_tokens_are_those_of_the_published_formula(head_dim: int, dtype: torch.dtype) -> None:
    rng = random.Random(head_dim)
    near_ties = heads_seen = 0
    for case in range(CASES_PER_SIZE):
        layers, heads, tokens = rng.randint(1, 2), rng.randint(1, 3), rng.choice(TOKENS)
        recent = rng.randint(0, min(16, tokens))
        sinks = rng.randint(0, min(4, tokens - recent))
        n_keep = rng.randint(max(1, sinks + recent), tokens)
        policy = VaseDKV(sinks=sinks, recent=recent, rank=rng.choice([4, 20]))
        candidates = random_candidates(layers, heads, tokens, head_dim, dtype=dtype, seed=case)
        noise = Noise(seed=case, eviction=rng.randint(0, 9), layers=tuple(range(5, 5 + layers)))
        kept = policy.select(candidates, n_keep, 64, noise)
        projection = policy.drawn_projection(head_dim, noise)
        older = tokens - recent
        for layer in range(layers):
            for head in range(heads):
                label = f"{case = }, {layer = }, {head = }"
                keys, values = (candidates.require(name)[layer, head, :older] for name in ("keys", "values"))
                scores = published_scores(keys, values, projection[layer], sinks)
                chosen = set(kept[layer, head].tolist())
                assert chosen >= set(range(older, tokens)), label
                near_ties += check_top(chosen - set(range(older, tokens)), scores, n_keep - recent, label)
                heads_seen += 1
    assert near_ties <= 0.05 * heads_seen, f"{near_ties} near ties of {heads_seen}: the comparison checks too little"


def test_the_projection_is_standard_normal_over_the_root_of_its_rank() -> None:
    for rank in (5, 20):
        draws = torch.stack(
            [VaseDKV(rank=rank).drawn_projection(128, Noise(0, eviction, tuple(range(36)))) for eviction in range(4)]
        ).double()
        count = draws.numel()
        assert draws.shape == (4, 36, 128, rank)
        assert abs(draws.mean()) < 5 * (1 / rank / count) ** 0.5
        assert draws.var() * rank == pytest.approx(1, abs=5 * (2 / count) ** 0.5)


@pytest.mark.parametrize("key", ["seed", "eviction", "layer"])
def test_projections_of_two_rounds_are_uncorrelated(key: str) -> None:
    arguments = {"seed": 0, "eviction": 0, "layer": 0}
    a, b = (
        VaseDKV().drawn_projection(128, Noise(n["seed"], n["eviction"], (n["layer"],))).flatten().double()
        for n in (arguments, {**arguments, key: 1})
    )
    correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    assert abs(correlation) < 5 / len(a) ** 0.5


def test_the_projection_keeps_energy_on_average() -> None:
    x = torch.randn(96, generator=torch.Generator().manual_seed(0)).double()
    noise = Noise(seed=3, eviction=0, layers=tuple(range(1000)))
    projected = (x @ VaseDKV().drawn_projection(96, noise).double()).square().sum(-1)
    # Each is |x|^2 chi2(20) / 20, of standard deviation |x|^2 sqrt(2 / 20).
    assert projected.mean() / x.square().sum() == pytest.approx(1, abs=5 * (2 / 20 / 1000) ** 0.5)


def test_all_heads_share_one_projection() -> None:
    one = random_candidates(1, 1, 63, 80)
    keys, values = (one.require(name).repeat(1, 3, 1, 1) for name in ("keys", "values"))
    kept = VaseDKV(recent=8).select(Candidates((1, 3, 63), keys, values), 30, 64, Noise(0, 0, (7,)))
    assert torch.equal(kept[:, 0], kept[:, 1])
    assert torch.equal(kept[:, 0], kept[:, 2])


def test_keys_and_values_share_one_projection() -> None:
    candidates = random_candidates(1, 2, 63, 64)
    swapped = Candidates(candidates.shape, candidates.values, candidates.keys)
    noise = Noise(0, 0, (0,))
    assert torch.equal(VaseDKV().scores(candidates, noise), VaseDKV().scores(swapped, noise))


def test_tokens_without_value_go_first() -> None:
    candidates = random_candidates(2, 2, 111, 60)
    empty = torch.arange(10, 40)
    candidates.require("values")[:, :, empty] = 0
    kept = VaseDKV(recent=16).select(candidates, 81, 64, Noise(0, 0, (0, 1)))
    assert not torch.isin(kept, empty).any()


def test_published_defaults() -> None:
    assert VaseDKV() == VaseDKV(sinks=4, recent=None, rank=20, projection="redrawn")
    assert VaseDKV().forced(64) == 68


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("eviction", [0, 1, 7])
def test_with_a_fixed_projection_it_selects_what_curdkv_selects(eviction: int, dtype: torch.dtype) -> None:
    candidates, noise = random_candidates(3, 2, 111, 96, dtype=dtype), Noise(5, eviction, (0, 1, 2))
    fixed = VaseDKV(projection="fixed", recent=8)
    kept = fixed.select(candidates, 40, 64, noise)
    assert torch.equal(kept, CurDKV(recent=8).select(candidates, 40, 64, noise))
    assert not torch.equal(kept, VaseDKV(recent=8).select(candidates, 40, 64, noise))


def test_a_fixed_projection_belongs_to_a_layer_and_a_request() -> None:
    fixed = VaseDKV(projection="fixed")
    first = fixed.drawn_projection(96, Noise(1, 0, (0, 1)))
    assert torch.equal(first, fixed.drawn_projection(96, Noise(1, 57, (0, 1))))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, fixed.drawn_projection(96, Noise(2, 0, (0, 1))))
