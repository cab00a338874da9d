"""R-KV: its two terms apart and together, its three forms, and the options that it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.options import build
from kvpolicy.policies.rkv import RKV
from kvpolicy.policies.snapkv import SnapKV
from tests.kernels.attention_by_loops import attention_by_loops, softmax
from tests.kernels.redundancy_by_loops import redundancy_by_loops
from tests.policies.candidates import random_candidates
from tests.policies.near_ties import check_top

PERIOD = 8
NOISE = Noise(0, 0, (0,))


def of_keys(rows: list[list[float]], queries: int) -> Candidates:
    """One head with these keys; its queries are all alike."""
    keys = torch.tensor(rows)[None, None]
    return Candidates((1, 1, len(rows)), keys, None, torch.ones(1, 1, queries, keys.shape[-1]))


def keeps(policy: RKV, candidates: Candidates, n_keep: int) -> list[int]:
    kept: list[int] = policy.select(candidates, n_keep, PERIOD, NOISE).flatten().tolist()
    return kept


@pytest.mark.parametrize(
    ("options", "window", "attention", "threshold", "mix_lambda", "compared"),
    [
        ({}, 8, {"group": "max", "pooling": "max", "kernel": 7}, 0.5, 0.07, 63),
        ({"variant": "paper"}, 8, {"group": "max", "pooling": "max", "kernel": 7}, 0.5, 0.1, 63),
        ({"variant": "vase"}, PERIOD, {"group": "mean", "pooling": "avg", "kernel": 5}, None, 0.5, 63 - PERIOD),
        (
            {"window": 3, "mix_lambda": 0.9, "threshold": 0.1, "recent": 5, "pooling": "none"},
            3,
            {"group": "max", "pooling": "none", "kernel": 7},
            0.1,
            0.9,
            63,
        ),
    ],
    ids=["official", "paper", "vase", "options"],
)
def test_what_stays_is_what_the_published_formula_says(
    options: dict[str, Any],
    window: int,
    attention: dict[str, Any],
    threshold: float | None,
    mix_lambda: float,
    compared: int,
) -> None:
    policy, recent = RKV(**options), options.get("recent", window)
    older = 63 - recent
    for seed in range(4):
        candidates = random_candidates(2, 2, 63, 64, seed=seed, group=2, queries=window)
        kept = policy.select(candidates, 40, PERIOD, Noise(0, 0, (0, 1)))
        for layer in range(2):
            for head, queries in enumerate(candidates.require("queries")[layer].chunk(2)):
                keys = candidates.require("keys")[layer, head]
                paid = attention_by_loops(queries, keys, older, domain="candidates", **attention)
                redundant = softmax(redundancy_by_loops(keys[:compared], threshold))
                scores = [mix_lambda * a - (1 - mix_lambda) * r for a, r in zip(paid, redundant, strict=False)]
                chosen = set(kept[layer, head].tolist())
                assert chosen >= set(range(older, 63))
                check_top(chosen - set(range(older, 63)), scores, 40 - recent, f"{seed = }, {layer = }, {head = }")


@pytest.mark.parametrize(("variant", "form"), [("official", "rkv"), ("paper", "rkv"), ("vase", "vase")])
def test_with_a_lambda_of_one_it_is_the_snapkv_of_the_same_repository(variant: Any, form: Any) -> None:
    candidates = random_candidates(2, 3, 63, 64, queries=8)
    rkv, snapkv = RKV(variant=variant, mix_lambda=1.0, sinks=2), SnapKV(variant=form, sinks=2)
    chosen = [policy.select(candidates, 30, PERIOD, Noise(0, 0, (0, 1))) for policy in (rkv, snapkv)]
    assert torch.equal(*chosen)


# With a lambda of 0 redundancy alone decides; the last two tokens are recent.
ALONE: dict[str, Any] = {"mix_lambda": 0.0, "window": 2}


def test_of_three_similar_keys_the_newest_stays() -> None:
    candidates = of_keys(torch.eye(7)[[0, 1, 2, 1, 1, 5, 6]].tolist(), queries=2)
    assert keeps(RKV(**ALONE), candidates, 6) == [0, 2, 3, 4, 5, 6]
    assert keeps(RKV(**ALONE), candidates, 5) == [0, 2, 4, 5, 6]
    # Without the rule they are equally redundant, and of equals the oldest stays.
    assert keeps(RKV(**ALONE, threshold=0.0), candidates, 5) == [0, 1, 2, 5, 6]
    assert keeps(RKV(variant="vase", **ALONE), candidates, 5) == [0, 1, 2, 5, 6]
    assert keeps(RKV(variant="vase", **ALONE, threshold=0.5), candidates, 5) == [0, 2, 4, 5, 6]


def test_of_two_similar_keys_neither_counts() -> None:
    candidates = of_keys(torch.eye(6)[[0, 1, 2, 1, 4, 5]].tolist(), queries=2)
    assert keeps(RKV(**ALONE), candidates, 4) == [0, 1, 4, 5]  # all alike: the oldest
    assert keeps(RKV(**ALONE, threshold=0.0), candidates, 4) == [0, 2, 4, 5]


def test_the_official_form_compares_with_recent_keys_too() -> None:
    # Token 1 is like the two recent ones, each of which does not count the other.
    candidates = of_keys(torch.eye(4)[[0, 1, 2, 3, 1, 1]].tolist(), queries=2)
    for official in (RKV(**ALONE), RKV(variant="paper", **ALONE), RKV(**ALONE, threshold=0.0)):
        assert keeps(official, candidates, 5) == [0, 2, 3, 4, 5]
    assert keeps(RKV(variant="vase", **ALONE), candidates, 5) == [0, 1, 2, 4, 5]


def test_where_no_key_is_similar_the_oldest_is_spared() -> None:
    # Key 0 has a cosine of 0.4 with the next three, which are at right angles, like the recent two.
    rows = torch.eye(6)[[3, 0, 1, 2, 4, 5]]
    rows[0, :4] = torch.tensor([0.4, 0.4, 0.4, 0.52**0.5])
    candidates = of_keys(rows.tolist(), queries=2)
    assert keeps(RKV(**ALONE, threshold=0.0), candidates, 5) == [1, 2, 3, 4, 5]
    assert keeps(RKV(**ALONE), candidates, 5) == [0, 1, 2, 4, 5]
    # Now it is similar: it does not count the newest of the three, and none of them counts it.
    assert keeps(RKV(**ALONE, threshold=0.35), candidates, 5) == [0, 1, 3, 4, 5]


def test_sinks_are_kept_only_if_asked_for() -> None:
    candidates = of_keys(torch.eye(4)[[1, 1, 1, 2, 3, 0]].tolist(), queries=1)
    alone: dict[str, Any] = {"mix_lambda": 0.0, "window": 1}
    assert keeps(RKV(**alone), candidates, 4) == [2, 3, 4, 5]
    assert keeps(RKV(**alone, sinks=1), candidates, 4) == [0, 2, 3, 5]


@pytest.mark.parametrize(
    ("options", "period", "queries", "forced"),
    [
        pytest.param({}, 128, 8, 8, id="official"),
        pytest.param({"variant": "paper"}, 128, 8, 8, id="paper"),
        pytest.param({"variant": "vase"}, 64, 64, 64, id="vase"),
        pytest.param({"variant": "vase", "window": 5, "sinks": 4}, 64, 5, 9, id="vase with another window"),
        pytest.param({"recent": 20}, 128, 8, 20, id="more recent tokens"),
    ],
)
def test_what_is_read_and_what_is_always_kept(options: dict[str, Any], period: int, queries: int, forced: int) -> None:
    assert RKV(**options).needs(period) == Needs(keys=True, queries=queries)
    assert RKV(**options).forced(period) == forced
    RKV(**options).check(forced + 1, period)


@pytest.mark.parametrize(
    ("options", "budget", "sentence"),
    [
        pytest.param(
            {"recent": 7},
            100,
            "rkv scores with the queries of the newest 8 tokens but protects only 7; "
            "its recent option must be at least 8, or its window option at most 7",
            id="a window above the recent tokens",
        ),
        pytest.param(
            {"mix_lambda": 1.5},
            100,
            "mix_lambda:1.5 would reward redundancy; rkv mixes with 0 to 1, 1 being attention alone",
            id="a lambda above 1",
        ),
        pytest.param(
            {"sinks": 4},
            12,
            "kv_budget=12 leaves nothing to choose: rkv always keeps 12 tokens (sinks + recent), so the budget must be "
            "at least 13; raise kv_budget, or lower kv_period or the policy's recent option",
            id="a budget of the forced tokens",
        ),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], budget: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        RKV(**options).check(budget, 16)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("kernel", "4", "option 'kernel' must be odd"),
        ("window", "0", "option 'window' must be at least 1"),
        ("mix_lambda", "-0.1", "option 'mix_lambda' must be at least 0"),
        ("threshold", "-0.1", "option 'threshold' must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build(RKV, {name: value})
