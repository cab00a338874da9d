"""CurDKV against VaSE's fixed-projection baseline and against kvpress' CURPress, both written from their formulas."""

from __future__ import annotations

import random

import pytest
import torch

from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.policies.curdkv import CurDKV
from tests.policies.candidates import random_candidates
from tests.policies.near_ties import check_top

CASES_PER_SIZE = 25
TOKENS = (1, 2, 16, 17, 63, 65, 111)


def fixed_scores(keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor, sinks: int) -> list[float]:
    """VaSE's `cur_fixed_gauss` for one head ``[N, D]``: projected energies, normalised, sinks set to 1."""
    k, v, g = keys.double(), values.double(), projection.double()
    energy = [float(((k[n] @ g) ** 2).sum() * ((v[n] @ g) ** 2).sum()) for n in range(len(k))]
    total = sum(energy)
    return [1.0 if n < sinks else e / total for n, e in enumerate(energy)]


def windowed_scores(keys: torch.Tensor, values: torch.Tensor, window: int, sinks: int) -> list[float]:
    """CURPress for one head ``[N, D]``: shares of their window's squared norms, multiplied, normalised."""
    shares = []
    for x in (keys.double(), values.double()):
        norms = [float((row**2).sum()) for row in x]
        windows = [norms[first : first + window] for first in range(0, len(norms), window)]
        totals = [sum(part) for part in windows]
        shares.append([norm / total for part, total in zip(windows, totals, strict=True) for norm in part])
    product = [k * v for k, v in zip(*shares, strict=True)]
    total = sum(product)
    return [1.0 if n < sinks else p / total for n, p in enumerate(product)]


def check_many(head_dim: int, dtype: torch.dtype, variant: str) -> None:
    """Compare random cases with the formula; recent tokens are taken out of the ranking, as they always stay."""
    rng = random.Random(head_dim)
    near_ties = heads_seen = 0
    for case in range(CASES_PER_SIZE):
        layers, heads, tokens = rng.randint(1, 2), rng.randint(1, 3), rng.choice(TOKENS)
        recent = rng.randint(0, min(16, tokens))
        sinks = rng.randint(0, min(4, tokens - recent))
        n_keep = rng.randint(max(1, sinks + recent), tokens)
        policy = CurDKV(variant=variant, sinks=sinks, recent=recent, window=rng.choice([5, 16]))  # type: ignore[arg-type]
        candidates = random_candidates(layers, heads, tokens, head_dim, dtype=dtype, seed=case)
        noise = Noise(seed=case, eviction=rng.randint(0, 9), layers=tuple(range(5, 5 + layers)))
        kept = policy.select(candidates, n_keep, 64, noise)
        # The projection of a generation: that of its first eviction.
        projection = policy.drawn_projection(head_dim, Noise(case, 0, noise.layers))
        older = tokens - recent
        for layer in range(layers):
            for head in range(heads):
                label = f"{case = }, {layer = }, {head = }"
                keys, values = (candidates.require(name)[layer, head] for name in ("keys", "values"))
                if variant == "fixed":
                    scores = fixed_scores(keys[:older], values[:older], projection[layer], sinks)
                else:
                    scores = windowed_scores(keys, values, policy.window, sinks)[:older]
                chosen = set(kept[layer, head].tolist())
                assert chosen >= set(range(older, tokens)), label
                near_ties += check_top(chosen - set(range(older, tokens)), scores, n_keep - recent, label)
                heads_seen += 1
    assert near_ties <= 0.05 * heads_seen, f"{near_ties} near ties of {heads_seen}: the comparison checks too little"


@pytest.mark.parametrize("variant", ["fixed", "windowed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [60, 64, 80, 96, 128])
def test_kept_tokens_are_those_of_the_published_formula(head_dim: int, dtype: torch.dtype, variant: str) -> None:
    check_many(head_dim, dtype, variant)


def test_the_projection_is_drawn_once_per_layer_and_generation() -> None:
    first = CurDKV().drawn_projection(96, Noise(1, 0, (0, 1)))
    assert torch.equal(first, CurDKV().drawn_projection(96, Noise(1, 57, (0, 1))))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, CurDKV().drawn_projection(96, Noise(2, 0, (0, 1))))


def test_the_projection_is_standard_normal_over_the_root_of_its_rank() -> None:
    draws = CurDKV().drawn_projection(128, Noise(0, 0, tuple(range(64)))).double()
    count = draws.numel()
    assert draws.shape == (64, 128, 20)
    assert abs(draws.mean()) < 5 * (1 / 20 / count) ** 0.5
    assert draws.var() * 20 == pytest.approx(1, abs=5 * (2 / count) ** 0.5)


def test_windowed_scores_of_a_worked_example() -> None:
    # Windows of two tokens and a last one of one: squared norms 1, 3 | 5, 5 | 7 of keys, 4, 4 | 9, 1 | 2 of values.
    keys = torch.tensor([1.0, 3.0, 5.0, 5.0, 7.0]).sqrt()[None, None, :, None]
    values = torch.tensor([4.0, 4.0, 9.0, 1.0, 2.0]).sqrt()[None, None, :, None]
    scores = CurDKV(variant="windowed", window=2).scores(Candidates((1, 1, 5), keys, values), Noise(0, 0, (0,)))
    expected = torch.tensor([1 / 8, 3 / 8, 9 / 20, 1 / 20, 1.0])
    torch.testing.assert_close(scores[0, 0], expected)


def test_a_window_is_scored_by_itself() -> None:
    candidates = random_candidates(1, 2, 48, 64)
    policy, noise = CurDKV(variant="windowed"), Noise(0, 0, (0,))
    before = policy.scores(candidates, noise)
    candidates.require("keys")[:, :, 16:32] *= 8
    candidates.require("values")[:, :, 20] *= 8
    after = policy.scores(candidates, noise)
    assert torch.equal(before[..., :16], after[..., :16])
    assert torch.equal(before[..., 32:], after[..., 32:])
    assert after[0, 0, 20] > before[0, 0, 20]


def test_published_defaults() -> None:
    assert CurDKV() == CurDKV(variant="fixed", sinks=4, recent=None, rank=20, window=16)
