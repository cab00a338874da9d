"""EpiKV's adaptation of LagKV against its formula in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from kvpolicy.policies.base import Candidates, Granularity, Needs, Noise
from kvpolicy.policies.epikv_lag import EpiKVLag, lag_spread
from tests.policies.candidates import random_candidates
from tests.policies.near_ties import check_top

NOISE = Noise(0, 0, (0,))


def deviation(x: list[float]) -> float:
    mean = sum(x) / len(x)
    return float((sum((value - mean) ** 2 for value in x) / (len(x) - 1)) ** 0.5)


def spread_by_loops(x: torch.Tensor, chunk: int) -> list[float]:
    """``[H, N, D]`` one token, head and channel at a time."""
    heads, tokens, channels = x.shape
    numbers = x.double().tolist()
    scores = []
    for token in range(tokens):
        before = range((token // chunk - 1) * chunk, token // chunk * chunk)
        total = 0.0
        for head in range(heads):
            scaled = list(numbers[head][token])
            if token >= chunk:
                for channel in range(channels):
                    reference = [numbers[head][row][channel] for row in before]
                    least, most = min(reference), max(reference)
                    scaled[channel] = (scaled[channel] - least) / (most - least + 1e-9)
            total += deviation(scaled)
        scores.append(total / heads)
    return scores


def held(layers: int, heads: int, tokens: int, prompt_len: int, *, dtype: torch.dtype, seed: int) -> Candidates:
    """Keys and values on the scale of their place in a range, so that raw and relative spreads compete."""
    drawn = random_candidates(layers, heads, tokens, 60, seed=seed)
    keys, values = ((0.2 * x).to(dtype) for x in (drawn.require("keys"), drawn.require("values")))
    positions = torch.arange(tokens).expand(layers, heads, -1)
    return Candidates(drawn.shape, keys, values, positions=positions, prompt_len=prompt_len, true_len=tokens)


def kept_rows(policy: EpiKVLag, candidates: Candidates, n_keep: int) -> list[int]:
    kept = policy.select(candidates, n_keep, 64, NOISE)
    assert kept.shape == (*candidates.shape[:2], n_keep)
    assert (kept == kept[0, 0]).all()
    rows: list[int] = kept[0, 0].tolist()
    assert rows == sorted(set(rows))
    return rows


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 40])
def test_the_spread_is_that_of_the_formula(tokens: int) -> None:
    x = random_candidates(1, 3, tokens, 60, seed=tokens).require("keys")[0]
    assert lag_spread(x, 8).tolist() == pytest.approx(spread_by_loops(x, 8), rel=1e-5)


def test_a_worked_example() -> None:
    # First chunk, raw: deviations of (0, 2) and (4, 2). Then (6, 3): channel 0 between 0 and 4, channel 1 always 2.
    x = torch.tensor([[[0.0, 2.0], [4.0, 2.0], [6.0, 2.0]]])
    root = 2**0.5
    assert lag_spread(x, 2).tolist() == pytest.approx([root, root, 1.5 / root])
    x[0, 2, 1] += 2.0**-10  # a channel that was constant before is divided by 1e-9
    assert lag_spread(x, 2)[2].item() == pytest.approx((2.0**-10 / 1e-9 - 1.5) / root)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_prompt_recent_and_the_highest_scores_are_kept(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    near_ties = 0
    for case in range(12):
        layers, heads, tokens, chunk = rng.randint(1, 3), rng.randint(1, 2), rng.randint(50, 90), rng.choice([8, 13])
        prompt_len = rng.randint(4, 12)
        recent = rng.choice([None, 0, 6])
        n_keep = rng.randint(30, tokens)
        newest = n_keep // 4 if recent is None else recent
        candidates = held(layers, heads, tokens, prompt_len, dtype=dtype, seed=case)
        scores = [0.0] * tokens
        for x in (candidates.require("keys"), candidates.require("values")):
            spread = spread_by_loops(x.double().mean(dim=0), chunk)
            scores = [total + value for total, value in zip(scores, spread, strict=True)]
        rows = kept_rows(EpiKVLag(chunk=chunk, recent=recent), candidates, n_keep)
        assert {*range(prompt_len), *range(tokens - newest, tokens)} <= set(rows)
        chosen = {row - prompt_len for row in rows if prompt_len <= row < tokens - newest}
        older = scores[prompt_len : tokens - newest]
        near_ties += check_top(chosen, older, n_keep - prompt_len - newest, f"{case = }")
    assert near_ties <= 1


def test_keys_and_values_are_averaged_over_layers_before_they_are_measured() -> None:
    candidates = held(1, 2, 60, 4, dtype=torch.float32, seed=1)
    keys, values = candidates.require("keys"), candidates.require("values")
    doubled = Candidates(
        (3, 2, 60),
        torch.cat([3 * keys + 5, -5 - keys * 1.5, 1.5 * keys]),
        values.expand(3, -1, -1, -1),
        positions=candidates.require("positions").expand(3, -1, -1),
        prompt_len=4,
        true_len=60,
    )
    assert kept_rows(EpiKVLag(chunk=16), doubled, 30) == kept_rows(EpiKVLag(chunk=16), candidates, 30)


def test_values_count_as_much_as_keys() -> None:
    candidates = held(1, 1, 60, 4, dtype=torch.float32, seed=2)
    swapped = Candidates(
        candidates.shape,
        candidates.values,
        candidates.keys,
        positions=candidates.positions,
        prompt_len=4,
        true_len=60,
    )
    policy = EpiKVLag(chunk=16)
    before = kept_rows(policy, candidates, 30)
    assert kept_rows(policy, swapped, 30) == before
    candidates.require("values")[0, 0, [20, 30]] *= 9
    assert set(kept_rows(policy, candidates, 30)) >= {20, 30}
    assert not set(before) >= {20, 30}


def test_a_prompt_that_is_too_long_loses_its_oldest() -> None:
    candidates = held(2, 2, 100, 90, dtype=torch.float32, seed=3)
    assert kept_rows(EpiKVLag(chunk=16), candidates, 40) == [*range(4), *range(64, 100)]


def test_inputs_are_not_modified() -> None:
    candidates, untouched = (held(2, 2, 60, 5, dtype=torch.float32, seed=3) for _ in range(2))
    EpiKVLag(chunk=16).select(candidates, 30, 64, NOISE)
    for name in ("keys", "values", "positions"):
        assert torch.equal(candidates.require(name), untouched.require(name))


def test_keys_that_are_no_numbers_never_cost_the_prompt() -> None:
    candidates = held(2, 2, 60, 10, dtype=torch.float32, seed=3)
    candidates.require("keys")[0, 0, 20] = torch.nan
    rows = kept_rows(EpiKVLag(chunk=8), candidates, 30)
    assert {*range(10), *range(53, 60)} <= set(rows)
    assert 20 in rows


def test_contract() -> None:
    policy = EpiKVLag()
    assert policy == EpiKVLag(sinks=4, recent=None, chunk=128)
    assert (policy.name, policy.granularity) == ("epikv-lag", Granularity.GLOBAL)
    assert (policy.spans_heads, policy.spans_layers) == (True, True)
    assert policy.needs(64) == Needs(keys=True, values=True, positions=True)
    assert [policy.due(100 + more, 100, 1) for more in (0, 1)] == [False, True]
    with pytest.raises(ValueError, match=r"kv_budget=5 .* epikv-lag always keeps 5 tokens"):
        policy.check(5, 1)
    policy.check(6, 1)
