"""ThinKV by hand: sparsity and the choice of tokens; and what holds over a whole request."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpolicy.kernels.kmeans_medoids import kmeans_medoids_reference
from kvpolicy.policies.base import Candidates, Granularity, Needs
from kvpolicy.policies.thinkv import ThinKV
from tests.policies.candidates import random_candidates
from tests.policies.matrix import noise_of
from tests.policies.thinkv_segments import synthetic

NEW = float("nan")
PERIOD = 8


def worked(
    powers: list[float], positions: list[int], unseen: int, *, statistic: list[float] | None = None
) -> Candidates:
    """One head of size 1. A query of 1 pays each token attention in proportion to its power."""
    tokens = len(powers)
    return Candidates(
        (1, 1, tokens),
        keys=torch.tensor(powers).log().view(1, 1, -1, 1),
        queries=torch.ones(1, 1, unseen, 1),
        positions=torch.tensor(positions).view(1, 1, -1),
        statistic=torch.tensor(statistic or [NEW] * tokens).view(1, 1, -1),
        unseen=unseen,
        true_len=positions[-1] + 1,
    )


def observed(candidates: Candidates, **options: Any) -> list[float]:
    statistic = ThinKV(**options).observe(candidates, PERIOD)
    assert statistic.dtype == torch.float32
    return statistic.flatten().tolist()


def test_a_worked_example_of_sparsity() -> None:
    # Entries below a hundredth of the largest: of 1000 5 20 1 two; of 1000 5 20 1 9 three.
    found = observed(worked([1000, 5, 20, 1, 9], [0, 1, 2, 3, 4], 2))
    assert found == pytest.approx([NEW, NEW, NEW, 2 / 4, 3 / 5], nan_ok=True)


def test_an_entry_of_a_hundredth_is_not_sparse_and_a_later_token_neither() -> None:
    # The largest is the last token: the first query does not see it, and has 0 of 2.
    assert observed(worked([1, 50, 5000], [0, 1, 2], 2))[1:] == pytest.approx([0 / 2, 1 / 3])
    assert observed(worked([1.01, 100], [0, 1], 1))[1:] == [0]
    assert observed(worked([0.99, 100], [0, 1], 1))[1:] == [0.5]


def test_sparsity_is_the_mean_over_the_heads_of_the_last_layers() -> None:
    # Two layers, two KV heads, two query heads each. A query of 1 over powers of 1 and 1000 has 1 of 2, one of 0 none.
    keys = torch.tensor([1.0, 1000.0]).log().view(1, 1, 2, 1).expand(2, 2, 2, 1)
    queries = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]]).view(2, 4, 1, 1)
    now = Candidates(
        (2, 2, 2),
        keys=keys,
        queries=queries,
        positions=torch.tensor([0, 1]).expand(2, 2, 2),
        statistic=torch.full((2, 2, 2), NEW),
        unseen=1,
        true_len=2,
    )
    for layers, share in ((1, 1 / 8), (2, 5 / 16), (4, 5 / 16)):
        found = ThinKV(layers=layers).observe(now, PERIOD)
        assert found[..., 0].isnan().all()
        assert found[..., 1].tolist() == [[pytest.approx(share)] * 2] * 2


def test_a_complete_segment_has_the_mean_of_its_queries() -> None:
    # Segments of three: positions 3 to 5 are complete and known, 0 to 2 have a query that was not recorded, 6 is alone.
    before = [NEW, 0.25, 0.5, 0.5, 0.75, 0.25, NEW]
    now = worked([1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6], 1, statistic=before)
    after = observed(now, segment=3)
    assert after == pytest.approx([NEW, NEW, NEW, 0.5, 0.5, 0.5, 0], nan_ok=True)
    assert now.require("statistic").flatten().tolist() == pytest.approx(before, nan_ok=True)


def test_means_stay_bit_for_bit_when_segments_lose_tokens_and_heads_hold_different_ones() -> None:
    # Segments of four: one token of the first, three of the second, and the incomplete third.
    positions = torch.tensor([[0, 4, 5, 7, 8, 9, 10], [2, 4, 6, 7, 8, 9, 10]]).view(1, 2, 7)
    statistic = torch.tensor([0.1, 0.7, 0.7, 0.7, 0.3, 0.2, 0.6]).expand(1, 2, 7)
    now = Candidates((1, 2, 7), positions=positions, statistic=statistic, true_len=11)
    assert torch.equal(ThinKV(segment=4).observe(now, PERIOD), statistic)


@pytest.mark.parametrize("parts", [[1] * 12, [5, 7], [11, 1]], ids=str)
def test_sparsity_is_the_same_however_the_queries_are_divided(parts: list[int]) -> None:
    policy = ThinKV(segment=8, layers=2)
    whole = random_candidates(3, 2, 63, 64, group=3, queries=12)
    keys, queries = whole.require("keys") * 3, whole.require("queries")
    statistic, seen = torch.full((3, 2, 51), NEW), 0
    for part in parts:
        seen += part
        statistic = torch.cat([statistic, torch.full((3, 2, part), NEW)], dim=-1)
        now = Candidates(
            statistic.shape,
            keys=keys[:, :, : 51 + seen],
            queries=queries[:, :, :seen],
            positions=torch.arange(51 + seen).expand(statistic.shape),
            statistic=statistic,
            unseen=part,
            true_len=51 + seen,
        )
        statistic = policy.observe(now, 12)
    at_once = policy.observe(replace(now, statistic=torch.full((3, 2, 63), NEW), unseen=12), 12)
    torch.testing.assert_close(statistic, at_once, rtol=1e-6, atol=0, equal_nan=True)
    assert at_once[..., :56].isnan().all()  # 48 to 55 begin before the first decode token
    assert (at_once[..., 56:] > 0).all()


def test_each_head_keeps_the_medoids_of_its_own_keys() -> None:
    now = synthetic([0.9, 0.2, 0.5], 7, previous_len=55)
    kept = ThinKV(segment=16).select(now, 40, PERIOD, noise_of(2))
    # 55 tokens: the transition drops to 8 and to 4, and with 43 left the execution drops to 8.
    assert kept.shape == (2, 3, 4 + 8 + 16 + 7)
    keys = now.require("keys")
    first = kmeans_medoids_reference(keys[:, :, :16], 4, 10)
    second = kmeans_medoids_reference(keys[:, :, 16:32], 8, 10) + 16
    rest = torch.arange(32, 55).expand(2, 3, 23)
    assert torch.equal(kept, torch.cat([first, second, rest], dim=-1))
    assert not torch.equal(kept[0, 0], kept[0, 1])
    assert not torch.equal(kept, ThinKV(segment=16, iterations=0).select(now, 40, PERIOD, noise_of(2)))


def test_a_transition_that_ended_since_the_last_eviction_thins_all_before_it() -> None:
    for previous_len, left in ((47, [8, 8, 16, 3]), (48, [16, 16, 16, 3])):
        now = synthetic([0.1, 0.5, 0.9], 3, previous_len=previous_len)
        kept = ThinKV(segment=16, low=0.2, high=0.8).select(now, 51, PERIOD, noise_of(2))
        assert torch.bincount(kept[0, 0] // 16).tolist() == left
    # Ended at the very end of the text: complete, and the newest.
    kept = ThinKV(segment=16).select(synthetic([0.1, 0.5, 0.9], 0), 48, PERIOD, noise_of(2))
    assert torch.bincount(kept[0, 0] // 16).tolist() == [8, 8, 16]


def test_an_incomplete_segment_is_never_thinned() -> None:
    kept = ThinKV(segment=16).select(synthetic([0.5, 0.5, 0.5], 15), 16, PERIOD, noise_of(2))
    assert kept[..., -15:].tolist() == [[list(range(48, 63))] * 3] * 2
    assert kept.shape[-1] == 15  # the others would need 12: they are dropped
    with pytest.raises(AssertionError, match="do not fit"):
        ThinKV(segment=16).select(synthetic([0.5], 15), 14, PERIOD, noise_of(2))


def test_segments_are_cut_by_position_where_tokens_are_missing() -> None:
    # Tokens 0-15 thinned to 4 of them, another for each head, 16-31 dropped; 32-47 complete.
    older = torch.tensor([[0, 1, 5, 9], [2, 3, 4, 15]])
    positions = torch.cat([older, torch.arange(32, 50).expand(2, 18)], dim=-1).view(1, 2, 22)
    now = replace(
        random_candidates(1, 2, 22, 60),
        positions=positions,
        statistic=torch.full((1, 2, 22), NEW),
        true_len=50,
        previous_len=30,
    )
    kept = ThinKV(segment=16).select(now, 20, PERIOD, noise_of(1))
    assert kept[..., :4].tolist() == [[[0, 1, 2, 3]] * 2]
    assert torch.equal(kept[..., 4:12], kmeans_medoids_reference(now.require("keys")[:, :, 4:20], 8, 10) + 4)
    assert kept[..., 12:].tolist() == [[[20, 21]] * 2]


def test_a_thinned_segment_has_the_sparsity_of_its_own_tokens() -> None:
    now = replace(
        random_candidates(2, 2, 26, 60),
        positions=torch.cat([torch.arange(16), torch.arange(16, 32, 2), torch.arange(32, 34)]).expand(2, 2, 26),
        statistic=torch.tensor([0.5] * 16 + [0.9] * 8 + [0.1] * 2).expand(2, 2, 26),
        true_len=34,
        previous_len=33,
    )
    kept = ThinKV(segment=16, low=0.2, high=0.8).select(now, 22, PERIOD, noise_of(2))
    assert torch.bincount(now.require("positions")[0, 0, kept[0, 0]] // 16).tolist() == [16, 4, 2]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("budget", "period", "prompt_len"), [(40, 8, 30), (48, 20, 100), (33, 1, 3)])
def test_over_a_whole_request(budget: int, period: int, prompt_len: int, seed: int) -> None:
    policy, text = ThinKV(segment=16, layers=2), 180
    policy.check(budget, period)
    whole = random_candidates(3, 2, text, 32, seed=seed, queries=text)
    positions = torch.arange(prompt_len).expand(3, 2, -1)
    statistic = torch.full((3, 2, prompt_len), NEW)
    seen, previous_len, evictions, sparsity = prompt_len, 0, 0, {}
    for true_len in range(prompt_len + 1, text + 1):
        positions = torch.cat([positions, torch.full((3, 2, 1), true_len - 1)], dim=-1)
        statistic = torch.cat([statistic, torch.full((3, 2, 1), NEW)], dim=-1)
        resident = positions.shape[-1]
        due = policy.due(resident, budget, period)
        if not due and true_len - seen < period:
            continue
        now = Candidates(
            tuple(positions.shape),  # type: ignore[arg-type]
            keys=whole.require("keys").gather(2, positions[..., None].expand(-1, -1, -1, 32)),
            queries=whole.require("queries")[:, :, max(0, true_len - period) : true_len],
            positions=positions,
            statistic=statistic,
            unseen=true_len - seen,
            prompt_len=prompt_len,
            true_len=true_len,
            previous_len=previous_len,
        )
        statistic, seen = policy.observe(now, period), true_len
        for number, value in zip((positions[0, 0] // 16).tolist(), statistic[0, 0].tolist(), strict=True):
            if (number + 1) * 16 <= true_len and not math.isnan(value):
                assert sparsity.setdefault(number, value) == value  # a complete segment never changes
        assert all(number * 16 >= prompt_len for number in sparsity)
        if due:
            kept = policy.select(
                replace(now, statistic=statistic), policy.n_keep(resident, budget), period, noise_of(3)
            )
            assert (kept.diff(dim=-1) > 0).all()
            positions, statistic = positions.gather(2, kept), statistic.gather(2, kept)
            sizes = [torch.bincount(row // 16, minlength=12) for row in positions.flatten(0, 1)]
            assert all(torch.equal(size, sizes[0]) for size in sizes)
            assert set(sizes[0][: true_len // 16].tolist()) <= {0, 4, 8, 16}
            assert sizes[0].sum() <= budget
            assert sizes[0][true_len // 16] == true_len % 16
            previous_len, evictions = true_len, evictions + 1
    assert evictions > 1
    assert len(set(sparsity.values())) > 2


def test_what_is_read_and_shared() -> None:
    policy = ThinKV()
    assert policy.needs(64) == Needs(keys=True, queries=64, positions=True)
    assert policy.accumulates
    assert policy.shares == Granularity.PER_HEAD
    assert policy.spans_heads
    assert policy.spans_layers
    assert (policy.segment, policy.layers, policy.least) == (128, 4, 4)


def test_a_budget_must_hold_a_segment() -> None:
    ThinKV(segment=16).check(16, 64)
    sentence = (
        "kv_budget=15 does not hold one segment of 16 tokens, which thinkv thins only when it is complete; "
        "raise kv_budget, or lower the segment option to at most the budget"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        ThinKV(segment=16).check(15, 64)


@pytest.mark.parametrize(("low", "high"), [(None, 0.5), (0.5, None), (0.0, None), (None, 0.0), (0.6, 0.5)])
def test_thresholds_are_two_in_order_or_none(low: float | None, high: float | None) -> None:
    sentence = (
        f"thinkv was given low:{low} and high:{high}; "
        "its thresholds must be two numbers, low at most high, or both none"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        ThinKV(low=low, high=high).check(1024, 64)
    ThinKV(low=0.5, high=0.6).check(1024, 64)
