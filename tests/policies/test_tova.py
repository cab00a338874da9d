"""TOVA: the newest query's attention over all resident tokens, one set per layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Granularity, Needs, Noise
from kvpolicy.policies.tova import TOVA
from tests.kernels.attention_by_loops import attention_by_loops, mean
from tests.policies.candidates import random_candidates

NOISE = Noise(0, 0, (0,))


def of_powers(powers: list[list[float]], queries: list[float]) -> Candidates:
    """Per KV head, keys of one channel whose attention under a query of 1 is in the ratio of `powers`."""
    keys = torch.tensor(powers).log()[None, ..., None]
    return Candidates((1, *keys.shape[1:3]), keys, None, torch.tensor(queries).view(1, -1, 1, 1))


def test_a_score_is_the_mean_over_all_query_heads_of_the_layer() -> None:
    # KV head 0 with queries 1 and -1: shares 1 1 2 of 4, then 2 2 1 of 5. KV head 1 with 1 and 0: 1 3 6 of 10, thirds.
    scores = TOVA().scores(of_powers([[1, 1, 2], [1, 3, 6]], [1, -1, 1, 0]), NOISE)
    assert scores.shape == (1, 1, 3)
    expected = [
        (1 / 4 + 2 / 5 + 1 / 10 + 1 / 3) / 4,
        (1 / 4 + 2 / 5 + 3 / 10 + 1 / 3) / 4,
        (2 / 4 + 1 / 5 + 6 / 10 + 1 / 3) / 4,
    ]
    assert scores.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_scores_are_attention_over_all_tokens_by_loops() -> None:
    candidates = random_candidates(3, 2, 33, 80, dtype=torch.bfloat16, group=3, queries=1)
    scores = TOVA().scores(candidates, Noise(0, 0, (0, 1, 2)))
    assert scores.dtype == torch.float32
    all_tokens: dict[str, Any] = {"domain": "all", "group": "mean", "pooling": "none", "kernel": 1}
    for layer in range(3):
        groups = zip(candidates.require("queries")[layer].chunk(2), candidates.require("keys")[layer], strict=True)
        expected = mean([attention_by_loops(queries, keys, 33, **all_tokens) for queries, keys in groups])
        assert scores[layer, 0].tolist() == pytest.approx(expected, rel=5e-6)
        assert scores[layer].sum().item() == pytest.approx(1, rel=1e-6)


def test_all_kv_heads_of_a_layer_keep_the_same_tokens() -> None:
    candidates = random_candidates(2, 3, 63, 64, queries=1)
    kept = TOVA().select(candidates, 20, 16, Noise(0, 0, (0, 1)))
    assert kept.shape == (2, 3, 20)
    assert torch.equal(kept, kept[:, :1].expand_as(kept))
    assert not torch.equal(kept[0], kept[1])
    best = TOVA().scores(candidates, Noise(0, 0, (0, 1))).topk(20).indices.sort().values
    assert torch.equal(kept[:, :1], best)


def test_no_token_is_kept_for_its_place() -> None:
    candidates = of_powers([[1, 5, 4, 3, 2]], [1])
    assert TOVA().select(candidates, 3, 16, NOISE).flatten().tolist() == [1, 2, 3]
    assert TOVA(recent=1).select(candidates, 3, 16, NOISE).flatten().tolist() == [1, 2, 4]  # as kvpress
    assert TOVA(sinks=1, recent=1).select(candidates, 3, 16, NOISE).flatten().tolist() == [0, 1, 4]


def test_of_tokens_with_equal_attention_the_oldest_stay() -> None:
    assert TOVA().select(of_powers([[1, 1, 1, 1, 2]], [1]), 3, 16, NOISE).flatten().tolist() == [0, 1, 4]


def test_one_query_is_read_and_no_token_is_forced() -> None:
    assert TOVA().needs(64) == Needs(keys=True, queries=1)
    assert TOVA().shares == Granularity.PER_LAYER
    assert TOVA().forced(64) == 0
    assert TOVA(recent=None).forced(64) == 64
    TOVA().check(1, 1)
    # The published rhythm: one token out for one in.
    assert [TOVA().due(resident, 10, 1) for resident in (10, 11)] == [False, True]


def test_of_several_queries_only_the_newest_counts() -> None:
    candidates = of_powers([[1, 5, 4, 3, 2]], [1])
    older = torch.tensor([[[[-9.0], [1.0]]]])
    two = Candidates(candidates.shape, candidates.keys, None, older)
    assert torch.equal(TOVA().scores(two, NOISE), TOVA().scores(candidates, NOISE))
