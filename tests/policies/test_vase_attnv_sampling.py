"""What VaSE-AttnV keeps over many seeds, and which budgets and options it takes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.vase_attnv import VaseAttnV
from tests.kernels.attention_by_loops import attention_by_loops
from tests.kernels.frequencies import check_counts, check_inclusions, inclusion_probabilities, sequences
from tests.policies.candidates import random_candidates

SEEDS, HEADS = 40, 1000
WEIGHTS = [8.0, 1.0, 4.0, 2.0, 1.0, 4.0]


def kept_over_seeds(policy: VaseAttnV, n_keep: int) -> torch.Tensor:
    """``[SEEDS * HEADS, n_keep - 1]``: what stays of six tokens that are attended to in proportion to WEIGHTS.

    Beside them is one recent token. Heads have equal keys and queries, and random numbers of their own.
    """
    keys = torch.tensor([*WEIGHTS, 1.0]).log().view(1, 1, 7, 1).expand(1, HEADS, -1, -1)
    candidates = Candidates((1, HEADS, 7), keys, keys, torch.ones(1, 2 * HEADS, 1, 1))
    kept = torch.cat([policy.select(candidates, n_keep, 1, Noise(seed, 0, (0,)))[0] for seed in range(SEEDS)])
    assert (kept[:, -1] == 6).all()
    return kept[:, :-1]


@pytest.mark.parametrize("draws", [1, 2, 3, 5])
def test_tokens_are_kept_as_often_as_by_drawing_one_after_the_other(draws: int) -> None:
    policy = VaseAttnV(sinks=0, reserve="off", pooling="none")
    kept = kept_over_seeds(policy, 1 + draws)
    counts = torch.bincount(kept.flatten(), minlength=6)
    check_inclusions(counts, len(kept), inclusion_probabilities(WEIGHTS, draws))
    assert counts[0] > counts[2] > counts[3] > counts[1]  # more attention, kept more often


def test_sets_of_kept_tokens_have_the_probabilities_of_drawing_one_after_the_other() -> None:
    kept = kept_over_seeds(VaseAttnV(sinks=0, reserve="off", pooling="none"), 3)
    of_sets: dict[int, float] = {}
    for (a, b), p in sequences(WEIGHTS, 2):
        of_sets[6 * min(a, b) + max(a, b)] = of_sets.get(6 * min(a, b) + max(a, b), 0.0) + p
    counts = torch.bincount((kept * torch.tensor([6, 1])).sum(-1), minlength=36)
    check_counts(counts, [of_sets.get(code, 0.0) for code in range(36)])


def test_beside_a_sink_the_others_are_drawn_as_if_it_were_not_there() -> None:
    kept = kept_over_seeds(VaseAttnV(sinks=1, reserve="off", pooling="none"), 4)
    assert (kept[:, 0] == 0).all()
    counts = torch.bincount(kept[:, 1:].flatten(), minlength=6)[1:]
    check_inclusions(counts, len(kept), inclusion_probabilities(WEIGHTS[1:], 2))


@pytest.mark.parametrize(("sinks", "reserved"), [(0, 2), (1, 3), (2, 3)])
def test_a_random_reserve_takes_all_but_the_sinks_equally_often(sinks: int, reserved: int) -> None:
    kept = kept_over_seeds(VaseAttnV(sinks=sinks, reserve="random", n_value_reserve=reserved), 1 + reserved)
    counts = torch.bincount(kept.flatten(), minlength=6)
    assert (counts[:sinks] == len(kept)).all()
    share = (reserved - sinks) / (6 - sinks)
    check_inclusions(counts[sinks:], len(kept), [share] * (6 - sinks))


@pytest.mark.parametrize(("temperature", "exponent"), [(0.5, 2.0), (2.0, 0.5)])
def test_the_temperature_sharpens_or_flattens_the_draws(temperature: float, exponent: float) -> None:
    kept = kept_over_seeds(VaseAttnV(sinks=0, reserve="off", pooling="none", temperature=temperature), 3)
    powers = [weight**exponent for weight in WEIGHTS]
    check_inclusions(torch.bincount(kept.flatten(), minlength=6), len(kept), inclusion_probabilities(powers, 2))


def test_over_many_seeds_more_attention_means_kept_more_often() -> None:
    candidates, policy, rounds = random_candidates(1, 1, 63, 64, queries=8), VaseAttnV(reserve="off", sinks=0), 400
    attention = attention_by_loops(
        candidates.require("queries")[0],
        candidates.require("keys")[0, 0],
        55,
        domain="candidates",
        group="mean",
        pooling="avg",
        kernel=5,
    )
    kept = [policy.select(candidates, 30, 8, Noise(seed, 0, (0,))).flatten() for seed in range(rounds)]
    share = torch.bincount(torch.cat(kept), minlength=63)[:55].double() / rounds
    by_attention = torch.tensor(attention).argsort()
    fifths = [float(share[fifth].mean()) for fifth in by_attention.view(5, 11)]
    # Standard error of a mean of 11 shares: 0.5 / sqrt(11 * 400) = 0.0075 at most, as tokens exclude each other.
    assert all(more - less > 0.05 for less, more in itertools.pairwise(fifths)), fifths


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        pytest.param({}, Needs(keys=True, values=True, queries=16), id="default"),
        pytest.param({"reserve": "variance"}, Needs(keys=True, values=True, queries=16), id="variance"),
        pytest.param({"reserve": "l2"}, Needs(keys=True, values=True, queries=16), id="norm"),
        pytest.param({"reserve": "random"}, Needs(keys=True, values=False, queries=16), id="random reserve"),
        pytest.param({"reserve": "off"}, Needs(keys=True, values=False, queries=16), id="no reserve"),
        pytest.param({"sample": False}, Needs(keys=True, values=True, queries=16), id="no sampling"),
        pytest.param({"window": 5}, Needs(keys=True, values=True, queries=5), id="a window of its own"),
        pytest.param({"recent": 20}, Needs(keys=True, values=True, queries=16), id="more recent tokens"),
    ],
)
def test_what_is_read(options: dict[str, Any], needs: Needs) -> None:
    assert VaseAttnV(**options).needs(16) == needs


def test_published_defaults() -> None:
    published: dict[str, Any] = {"sinks": 4, "n_value_reserve": 0.25, "pooling": "avg", "kernel": 5, "temperature": 1.0}
    assert VaseAttnV() == VaseAttnV(recent=None, window=None, reserve="range", sample=True, **published)
    assert VaseAttnV().forced(64) == 68
    assert VaseAttnV().needs(64).queries == 64


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        pytest.param({}, 128, id="a quarter of the budget"),
        pytest.param({"n_value_reserve": 0.5}, 128, id="all beside the recent tokens, as a share"),
        pytest.param({"n_value_reserve": 64}, 128, id="all beside the recent tokens, as a count"),
        pytest.param({"n_value_reserve": 4}, 128, id="the sinks alone"),
        pytest.param({"n_value_reserve": 0, "sinks": 0}, 65, id="neither sinks nor reserve"),
        pytest.param({"n_value_reserve": 1000, "reserve": "off"}, 69, id="a reserve that is off may have any size"),
        pytest.param({"window": 8, "recent": 8}, 16, id="another window"),
    ],
)
def test_budgets_that_work(options: dict[str, Any], budget: int) -> None:
    VaseAttnV(**options).check(budget, 64)


@pytest.mark.parametrize(
    ("options", "budget", "sentence"),
    [
        pytest.param(
            {},
            68,
            "kv_budget=68 leaves nothing to choose: vase-attnv always keeps 68 tokens (sinks + recent), so the budget "
            "must be at least 69; raise kv_budget, or lower kv_period or the policy's recent option",
            id="a budget of the forced tokens",
        ),
        pytest.param(
            {"n_value_reserve": 65},
            128,
            "n_value_reserve:65 is 65 of kv_budget=128 tokens for vase-attnv; "
            "it must be at least the 4 sinks and at most the 64 tokens beside the recent ones; "
            "raise kv_budget, or set n_value_reserve",
            id="a count beyond the room",
        ),
        pytest.param(
            {"n_value_reserve": 0.75},
            128,
            "n_value_reserve:0.75 is 96 of kv_budget=128 tokens for vase-attnv; "
            "it must be at least the 4 sinks and at most the 64 tokens beside the recent ones; "
            "raise kv_budget, or set n_value_reserve",
            id="a share beyond the room",
        ),
        pytest.param(
            {"n_value_reserve": 0.02, "sinks": 3},
            128,
            "n_value_reserve:0.02 is 2 of kv_budget=128 tokens for vase-attnv; "
            "it must be at least the 3 sinks and at most the 64 tokens beside the recent ones; "
            "raise kv_budget, or set n_value_reserve",
            id="too small for the sinks",
        ),
        pytest.param(
            {"recent": 63},
            128,
            "vase-attnv scores with the queries of the newest 64 tokens but protects only 63; "
            "its recent option must be at least 64, or its window option at most 63",
            id="one recent token less than the window",
        ),
        pytest.param(
            {"recent": 0},
            128,
            "vase-attnv scores with the queries of the newest 64 tokens but protects only 0; "
            "its recent option must be at least 64, or its window option at most 0",
            id="no recent token",
        ),
    ],
)
def test_budgets_and_options_that_cannot_work_are_refused(options: dict[str, Any], budget: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        VaseAttnV(**options).check(budget, 64)
