"""EpiKV-Seg against its published steps in plain Python."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvpolicy.policies.base import Candidates, Granularity, Needs, Noise
from kvpolicy.policies.epikv import EpiKV
from kvpolicy.policies.epikv_seg import EpiKVSeg
from tests.policies.candidates import random_candidates
from tests.policies.test_epikv_signal import random_change, signal_by_loops

NOISE = Noise(0, 0, (0,))


def held(
    positions: list[int], change: torch.Tensor, prompt_len: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Candidates:
    """A request that holds `positions`; the keys of some stretches vary more than those of others."""
    layers, heads, tokens = 2, 2, len(positions)
    drawn = random_candidates(layers, heads, tokens, 60, seed=seed)
    stretch = torch.rand(layers, heads, 1 + tokens // 16, generator=torch.Generator().manual_seed(seed + 1)) + 0.5
    scale = stretch.repeat_interleave(16, dim=-1)[..., :tokens, None]
    return Candidates(
        (layers, heads, tokens),
        keys=(drawn.require("keys") * scale).to(dtype),
        values=drawn.require("values").to(dtype),
        positions=torch.tensor(positions).expand(layers, heads, -1),
        hidden_change=change,
        prompt_len=prompt_len,
        true_len=prompt_len + change.shape[1],
    )


def quotas_by_loops(keys: torch.Tensor, older: int, policy: EpiKVSeg) -> list[int]:
    """Segment by segment, one key at a time."""
    layers, heads, _, channels = keys.shape
    statistics = []
    for start in range(0, older, policy.segment):
        rows = range(start, min(start + policy.segment, older))
        variances = []
        for layer in range(layers):
            for head in range(heads):
                for row in rows:
                    key = keys[layer, head, row].double().tolist()
                    mean = sum(key) / channels
                    variances.append(sum((x - mean) ** 2 for x in key) / (channels - 1))
        statistics.append(sum(variances) / len(variances))
    ascending, n = sorted(statistics), len(statistics)
    low, high = ascending[n // 3], ascending[2 * n // 3]
    return [policy.keep_high if s >= high else policy.keep_middle if s >= low else policy.keep_low for s in statistics]


def kept_by_loops(policy: EpiKVSeg, candidates: Candidates, n_keep: int) -> list[int]:
    """Rows that the published steps keep, where the prompt fits."""
    positions: list[int] = candidates.require("positions")[0, 0].tolist()
    change, prompt_len = candidates.require("hidden_change"), candidates.prompt_len
    recent = min(128, n_keep // 4) if policy.recent is None else policy.recent
    older = len(positions) - recent
    prompt = [row for row, position in enumerate(positions) if position < prompt_len]
    kept = {*prompt, *range(older, len(positions))}
    remaining = n_keep - len(kept)
    for number, quota in enumerate(quotas_by_loops(candidates.require("keys"), older, policy)):
        segment = range(number * policy.segment, min((number + 1) * policy.segment, older))
        decoded = [row for row in segment if positions[row] >= prompt_len]
        decoded.sort(
            key=lambda row: -signal_by_loops(change, positions[row] - prompt_len, policy.signal, policy.window)
        )
        chosen = decoded[: min(quota, remaining)]
        kept |= set(chosen)
        remaining -= len(chosen)
    return sorted(kept)


def kept_rows(policy: EpiKVSeg, candidates: Candidates, n_keep: int) -> list[int]:
    kept = policy.select(candidates, n_keep, 64, NOISE)
    assert kept.shape[:2] == candidates.shape[:2]
    assert kept.dtype == torch.int64
    assert (kept == kept[0, 0]).all()
    rows: list[int] = kept[0, 0].tolist()
    assert rows == sorted(set(rows))
    assert len(rows) <= n_keep
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kept_are_the_tokens_that_the_published_steps_keep(dtype: torch.dtype) -> None:
    rng, fewer, filled = random.Random(0), 0, 0
    for case in range(30):
        prompt_len, decoded = rng.randint(4, 60), rng.randint(60, 250)
        change = random_change(decoded, seed=case)
        columns = sorted(rng.sample(range(decoded), rng.randint(50, decoded)))
        positions = [*range(prompt_len), *(prompt_len + column for column in columns)]
        n_keep = rng.randint(prompt_len + 30, len(positions)) if prompt_len + 30 < len(positions) else len(positions)
        policy = EpiKVSeg(
            segment=rng.choice([16, 23]),
            keep_high=rng.randint(8, 16),
            keep_middle=rng.randint(4, 12),
            keep_low=rng.randint(0, 8),
            recent=rng.choice([None, 5]),
            signal=rng.choice(["zscore", "raw", "rolling"]),
        )
        recent = policy.recent_count(n_keep)
        if prompt_len >= n_keep - recent:
            continue
        candidates = held(positions, change, prompt_len, dtype=dtype, seed=case)
        rows = kept_rows(policy, candidates, n_keep)
        assert rows == kept_by_loops(policy, candidates, n_keep), f"{case = }"
        fewer += len(rows) < n_keep
        filled += len(rows) == n_keep
    assert min(fewer, filled) >= 3


def test_published_quotas_on_segments_of_128() -> None:
    """Nine segments and a rest; the variance rises from segment to segment."""
    tokens, prompt_len, recent = 9 * 128 + 50 + 128, 100, 128
    keys = torch.randn(1, 1, tokens, 64, generator=torch.Generator().manual_seed(0))
    keys = keys / keys.std(dim=-1, keepdim=True) * (1 + torch.arange(tokens) // 128)[:, None]
    candidates = Candidates(
        (1, 1, tokens),
        keys=keys,
        positions=torch.arange(tokens).expand(1, 1, -1),
        hidden_change=random_change(tokens - prompt_len),
        prompt_len=prompt_len,
        true_len=tokens,
    )
    rows = kept_rows(EpiKVSeg(), candidates, 1024)
    counts = [sum(128 * n <= row < 128 * (n + 1) for row in rows if row < tokens - recent) for n in range(10)]
    # Ten segments: three low, three middle, four high; the first holds 28 decode tokens beside the prompt.
    assert counts == [100 + 8, 8, 8, 32, 32, 32, 64, 64, 64, 50]
    assert len(rows) == sum(counts) + recent < 1024
    # The oldest fill first; what does not fit any more is cut.
    rows = kept_rows(EpiKVSeg(recent=0), candidates, 100 + 8 + 8 + 8 + 32 + 5)
    counts = [sum(128 * n <= row < 128 * (n + 1) for row in rows) for n in range(11)]
    assert counts == [108, 8, 8, 32, 5, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("older", [1, 15, 16, 17, 32, 33, 48, 100])
def test_quotas_of_few_segments_and_of_short_ones(older: int) -> None:
    keys = random_candidates(2, 2, 111, 60, seed=older).require("keys")
    policy = EpiKVSeg(segment=16)
    assert policy.quotas(keys, older) == quotas_by_loops(keys, older, policy)


def test_segments_that_are_alike_are_all_high() -> None:
    assert EpiKVSeg(segment=8).quotas(torch.ones(1, 1, 40, 4), 40) == [64] * 5


def test_keys_that_are_no_numbers_make_a_segment_high() -> None:
    keys = torch.rand(2, 2, 64, 8)
    keys[1, 0, 20] = torch.nan
    assert EpiKVSeg(segment=16).quotas(keys, 64)[1] == 64


def test_a_prompt_that_fills_the_budget_is_cut_as_by_epikv() -> None:
    for prompt_len, n_keep in ((100, 60), (45, 60), (46, 60)):
        candidates = held(list(range(130)), random_change(130 - prompt_len), prompt_len)
        flat = EpiKV().select(candidates, n_keep, 64, NOISE)
        assert torch.equal(EpiKVSeg().select(candidates, n_keep, 64, NOISE), flat)
    candidates = held(list(range(130)), random_change(86), 44)  # one token of room beside prompt and recent ones
    assert len(kept_rows(EpiKVSeg(), candidates, 60)) == 60


def test_sinks_beyond_a_short_prompt_stay() -> None:
    change = random_change(118)
    change[0, :10] = 0.0  # the first decode tokens have the lowest signal
    policy = EpiKVSeg(sinks=6, signal="raw", segment=16, keep_high=4, keep_middle=4, keep_low=4)
    rows = kept_rows(policy, held(list(range(120)), change, 2), 60)
    assert set(range(6)) <= set(rows)
    assert 6 not in rows


@pytest.mark.parametrize("reserve", [3, 500])
def test_the_value_reserve_replaces_the_lowest_signals_among_the_kept(reserve: int) -> None:
    tokens, prompt_len, n_keep = 150, 20, 100
    candidates = held(list(range(tokens)), random_change(tokens - prompt_len), prompt_len)
    values = candidates.require("values")
    values[:, :, [2, 10, 140]] *= 50  # prompt and recent tokens take no place
    plain = kept_rows(EpiKVSeg(segment=16, keep_high=6, keep_middle=3), candidates, n_keep)
    policy = EpiKVSeg(segment=16, keep_high=6, keep_middle=3, value_reserve=reserve)
    rows = kept_rows(policy, candidates, n_keep)
    older = tokens - 25
    chosen = [row for row in plain if prompt_len <= row < older]
    spread = (values.amax(-1) - values.amin(-1)).double().mean(dim=(0, 1))
    widest = sorted(range(prompt_len, older), key=lambda row: -spread[row])[: min(reserve, len(chosen))]
    signal = {
        row: signal_by_loops(candidates.require("hidden_change"), row - prompt_len, "zscore", 64) for row in chosen
    }
    rest = sorted(set(chosen) - set(widest), key=lambda row: -signal[row])[: len(chosen) - len(widest)]
    assert rows == sorted({*range(prompt_len), *range(older, tokens), *widest, *rest})
    assert len(rows) == len(plain)
    assert rows != plain


def test_one_token_a_step() -> None:
    """`kv_period=1`: due as soon as the budget is exceeded; what is cut below it has to grow first."""
    prompt_len, budget, change = 10, 60, random_change(300)
    policy, positions, evictions = EpiKVSeg(segment=16, keep_high=8, keep_middle=4, keep_low=2), list(range(10)), 0
    for column in range(300):
        positions.append(prompt_len + column)
        if policy.due(len(positions), budget, 1):
            assert len(positions) == budget + 1
            candidates = held(positions, change[:, : column + 1], prompt_len, seed=column)
            positions = [positions[row] for row in kept_rows(policy, candidates, budget)]
            assert set(range(prompt_len)) <= set(positions)
            evictions += 1
    assert 5 < evictions < 240


def test_contract() -> None:
    policy = EpiKVSeg()
    assert policy == EpiKVSeg(sinks=4, recent=None, segment=128, keep_high=64, keep_middle=32, keep_low=8)
    assert (policy.name, policy.granularity) == ("epikv-seg", Granularity.GLOBAL)
    assert (policy.spans_heads, policy.spans_layers) == (True, True)
    assert policy.needs(64) == Needs(keys=True, positions=True, hidden_bands=EpiKV().bands)
    assert EpiKVSeg(value_reserve=2).needs(64).values
    with pytest.raises(ValueError, match=r"kv_budget=5 .* epikv-seg always keeps 5 tokens"):
        policy.check(5, 1)
    with pytest.raises(ValueError, match="value_reserve:99"):
        replace(policy, value_reserve=99).check(100, 1)
