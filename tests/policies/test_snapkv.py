"""SnapKV's three forms against attention written in loops, and the budgets that they refuse."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.snapkv import SnapKV
from tests.kernels.attention_by_loops import attention_by_loops
from tests.policies.candidates import random_candidates
from tests.policies.near_ties import check_top

PERIOD = 8
VASE = {"domain": "candidates", "group": "mean", "pooling": "avg", "kernel": 5}
RKV = {"domain": "candidates", "group": "max", "pooling": "max", "kernel": 7}
KVPRESS = {**VASE, "domain": "all"}


@dataclass(frozen=True)
class Arm:
    """Options, and what they make of SnapKV: the queries, the recent tokens and the arguments of the attention."""

    label: str
    options: dict[str, Any]
    window: int
    recent: int
    attention: dict[str, Any]
    sinks: int = 0

    def __str__(self) -> str:
        return self.label


ARMS = (
    Arm("default", {}, PERIOD, PERIOD, VASE),
    Arm("vase", {"variant": "vase", "recent": 11}, PERIOD, 11, VASE),
    Arm("vase, group max", {"group": "max", "sinks": 4}, PERIOD, PERIOD, {**VASE, "group": "max"}, sinks=4),
    Arm("vase, no pooling", {"pooling": "none"}, PERIOD, PERIOD, {**VASE, "pooling": "none"}),
    Arm("vase, kernel 1", {"kernel": 1}, PERIOD, PERIOD, {**VASE, "kernel": 1}),
    Arm("vase, all tokens", {"domain": "all", "window": 3}, 3, 3, KVPRESS),
    Arm("rkv", {"variant": "rkv"}, 8, 8, RKV),
    Arm("rkv, one query", {"variant": "rkv", "window": 1}, 1, 1, RKV),
    Arm("rkv, average", {"variant": "rkv", "pooling": "avg", "recent": 9}, 8, 9, {**RKV, "pooling": "avg"}),
    Arm("kvpress", {"variant": "kvpress", "window": 12}, 12, 12, KVPRESS),
    Arm("kvpress, kernel 7", {"variant": "kvpress", "window": 5, "kernel": 7}, 5, 5, {**KVPRESS, "kernel": 7}),
    Arm("kvpress, mean to max", {"variant": "kvpress", "window": 5, "group": "max"}, 5, 5, {**KVPRESS, "group": "max"}),
)
# layers, KV heads, group, tokens, head size, tokens kept
SIZES = (
    (2, 2, 2, 63, 64, 40),
    (1, 1, 1, 63, 80, 20),
    (1, 2, 7, 33, 96, 32),  # budget + 1
    (1, 3, 2, 111, 128, 50),
    (2, 1, 4, 65, 60, 17),
    (1, 2, 2, 30, 64, 30),  # all
)


def noise_of(layers: int) -> Noise:
    return Noise(0, 0, tuple(range(layers)))


def check_selection(policy: SnapKV, arm: Arm, candidates: Candidates, n_keep: int) -> list[bool]:
    """Assert for each head that it keeps what the loops say; which cuts were near ties."""
    layers, heads, tokens = candidates.shape
    assert candidates.require("queries").shape[2] == arm.window
    kept, near_ties = policy.select(candidates, n_keep, PERIOD, noise_of(layers)), []
    forced = {*range(arm.sinks), *range(tokens - arm.recent, tokens)}
    for layer in range(layers):
        groups = candidates.require("queries")[layer].chunk(heads)
        for head in range(heads):
            keys = candidates.require("keys")[layer, head]
            scores = attention_by_loops(groups[head], keys, tokens - arm.recent, **arm.attention)
            chosen = set(kept[layer, head].tolist())
            assert chosen >= forced
            others = {token - arm.sinks for token in chosen - forced}
            label = f"{tokens = }, {layer = }, {head = }"
            near_ties.append(check_top(others, scores[arm.sinks :], n_keep - len(forced), label))
    return near_ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_the_tokens_with_the_most_attention_stay(arm: Arm, dtype: torch.dtype) -> None:
    policy, near_ties = SnapKV(**arm.options), []
    for case, (layers, heads, group, tokens, head_dim, n_keep) in enumerate(SIZES):
        window = policy.needs(PERIOD).queries
        candidates = random_candidates(
            layers, heads, tokens, head_dim, dtype=dtype, seed=case, group=group, queries=window
        )
        near_ties += check_selection(policy, arm, candidates, n_keep)
    # Max pooling gives neighbours one score, so that most of its cuts fall between equals.
    assert arm.attention["pooling"] == "max" or sum(near_ties) <= 1, f"{near_ties}: the comparison checks too little"


@pytest.mark.parametrize(
    ("variant", "window", "attention"),
    [("vase", 64, VASE), ("rkv", 8, RKV), ("kvpress", 64, KVPRESS)],
    ids=["vase", "rkv", "kvpress"],
)
def test_published_forms_at_their_own_window(variant: Any, window: int, attention: dict[str, Any]) -> None:
    policy = SnapKV(variant=variant)
    assert policy.needs(64) == Needs(keys=True, queries=window)
    assert policy.forced(64) == window
    candidates = random_candidates(1, 2, 151, 64, queries=window)
    kept = policy.select(candidates, 100, 64, noise_of(1))[0].tolist()
    for head, queries in enumerate(candidates.require("queries")[0].chunk(2)):
        scores = attention_by_loops(queries, candidates.require("keys")[0, head], 151 - window, **attention)
        assert set(kept[head]) >= set(range(151 - window, 151))
        check_top(set(kept[head]) - set(range(151 - window, 151)), scores, 100 - window, f"{head = }")


@pytest.mark.parametrize("variant", ["vase", "rkv", "kvpress"])
def test_of_tokens_with_equal_attention_the_oldest_stay(variant: Any) -> None:
    candidates = random_candidates(1, 2, 63, 64, queries=8)
    candidates.require("keys")[:] = 0
    kept = SnapKV(variant=variant, window=8, pooling="none").select(candidates, 30, PERIOD, noise_of(1))
    assert kept[0].tolist() == [[*range(22), *range(55, 63)]] * 2


@pytest.mark.parametrize("variant", ["vase", "rkv", "kvpress"])
@pytest.mark.parametrize(
    ("domain", "best"),
    [pytest.param("candidates", 3, id="candidates"), pytest.param("all", 5, id="all"), pytest.param(None, 0, id="own")],
)
def test_attention_to_recent_tokens_counts_where_the_domain_is_all(variant: Any, domain: Any, best: int) -> None:
    # Two queries. One attends to token 3, but far more to itself; the other attends, somewhat less, to token 5.
    keys, queries = torch.zeros(1, 1, 12, 2), torch.eye(2)[None, None]
    keys[0, 0, 3], keys[0, 0, 10], keys[0, 0, 5] = torch.tensor([[3.0, 0.0], [9.0, 0.0], [0.0, 2.5]])
    candidates = Candidates((1, 1, 12), keys, keys, queries)
    policy = SnapKV(variant=variant, window=2, pooling="none", group="mean", domain=domain)
    best = best or {"kvpress": 5}.get(variant, 3)
    assert policy.select(candidates, 3, PERIOD, noise_of(1)).flatten().tolist() == [best, 10, 11]


def test_no_sink_is_kept_for_its_place() -> None:
    candidates = random_candidates(1, 2, 63, 64, queries=8)
    # All queries point along one channel, all keys but the first four too: these are attended to least.
    keys, queries = candidates.require("keys"), candidates.require("queries")
    queries[..., 0], keys[..., 0] = 10.0, 10.0
    keys[:, :, :4, 0] = -10.0
    assert SnapKV(pooling="none").select(candidates, 59, PERIOD, noise_of(1))[0].tolist() == [[*range(4, 63)]] * 2
    with_sinks = SnapKV(pooling="none", sinks=2).select(candidates, 61, PERIOD, noise_of(1))[0]
    assert with_sinks[:, :2].tolist() == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("options", "period", "needs", "forced"),
    [
        pytest.param({}, 16, 16, 16, id="one period"),
        pytest.param({"recent": 20}, 16, 16, 20, id="more recent tokens"),
        pytest.param({"window": 5}, 16, 5, 5, id="a window of its own"),
        pytest.param({"window": 5, "recent": 16, "sinks": 4}, 16, 5, 20, id="all given"),
        pytest.param({"variant": "rkv"}, 128, 8, 8, id="rkv"),
        pytest.param({"variant": "kvpress"}, 512, 64, 64, id="kvpress"),
        pytest.param({"variant": "kvpress", "window": 32}, 512, 32, 32, id="kvpress with another window"),
    ],
)
def test_what_is_read_and_what_is_always_kept(options: dict[str, Any], period: int, needs: int, forced: int) -> None:
    assert SnapKV(**options).needs(period) == Needs(keys=True, queries=needs)
    assert SnapKV(**options).forced(period) == forced
    SnapKV(**options).check(forced + 1, period)


@pytest.mark.parametrize(
    ("options", "budget", "sentence"),
    [
        pytest.param(
            {"variant": "kvpress", "recent": 8},
            100,
            "snapkv scores with the queries of the newest 64 tokens but protects only 8; "
            "its recent option must be at least 64, or its window option at most 8",
            id="a window above the recent tokens",
        ),
        pytest.param(
            {"recent": 15},
            100,
            "snapkv scores with the queries of the newest 16 tokens but protects only 15; "
            "its recent option must be at least 16, or its window option at most 15",
            id="one recent token less than the period",
        ),
        pytest.param(
            {"sinks": 4},
            20,
            "kv_budget=20 leaves nothing to choose: snapkv always keeps 20 tokens (sinks + recent), so the budget must "
            "be at least 21; raise kv_budget, or lower kv_period or the policy's recent option",
            id="a budget of the forced tokens",
        ),
    ],
)
def test_budgets_and_windows_that_cannot_work_are_refused(options: dict[str, Any], budget: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        SnapKV(**options).check(budget, 16)
