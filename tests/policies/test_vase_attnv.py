"""VaSE-AttnV against loops in fp64, for every ablation, and at the ends of what it can be given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.policies.snapkv import SnapKV
from kvpolicy.policies.value_spread import Measure, value_spread
from kvpolicy.policies.vase_attnv import RESERVE, SAMPLING, VaseAttnV
from tests.policies.candidates import random_candidates
from tests.policies.vase_attnv_by_loops import check_against_loops

PERIOD = 8
ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "window below the recent tokens": {"window": 3, "recent": 11},
    "one query": {"window": 1, "recent": 1},
    "no sinks": {"sinks": 0},
    "reserve as a count": {"n_value_reserve": 7},
    "reserve of half": {"n_value_reserve": 0.5},
    "reserve by variance": {"reserve": "variance"},
    "reserve by norm": {"reserve": "l2"},
    "reserve at random": {"reserve": "random"},
    "no reserve": {"reserve": "off"},
    "neither reserve nor sinks": {"reserve": "off", "sinks": 0},
    "no sampling": {"sample": False},
    "no sampling and no reserve": {"sample": False, "reserve": "off", "sinks": 0},
    "no sampling, reserve at random": {"sample": False, "reserve": "random"},
    "no pooling": {"pooling": "none"},
    "max pooling": {"pooling": "max", "kernel": 7},
    "max pooling and no sampling": {"pooling": "max", "sample": False},
    "kernel 1": {"kernel": 1},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2 and no sampling": {"temperature": 2.0, "sample": False},
}
# layers, KV heads, group, tokens, head size, tokens kept
SIZES = (
    (2, 2, 2, 63, 64, 40),
    (1, 1, 1, 63, 80, 20),
    (1, 2, 7, 33, 96, 32),  # budget + 1
    (1, 3, 2, 111, 128, 51),
    (2, 1, 4, 65, 60, 17),
    (1, 2, 2, 30, 64, 30),  # all
    (2, 4, 1, 51, 64, 33),
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def noise_of(layers: int, seed: int = 0) -> Noise:
    return Noise(seed, 3, tuple(range(5, 5 + layers)))


@dtypes
@pytest.mark.parametrize("options", ARMS.values(), ids=ARMS)
def test_kept_tokens_are_those_of_the_loops(options: dict[str, Any], dtype: torch.dtype) -> None:
    policy, near_ties, heads_seen = VaseAttnV(**options), 0, 0
    for case, (layers, heads, group, tokens, head_dim, n_keep) in enumerate(SIZES):
        window = policy.needs(PERIOD).queries
        candidates = random_candidates(
            layers, heads, tokens, head_dim, dtype=dtype, seed=case, group=group, queries=window
        )
        ties, seen = check_against_loops(policy, candidates, n_keep, PERIOD, noise_of(layers, seed=case))
        near_ties, heads_seen = near_ties + ties, heads_seen + seen
    # Max pooling gives neighbours one score, so that without sampling many cuts fall between equals.
    allowed = 0.5 if (policy.pooling, policy.sample) == ("max", False) else 0.1
    assert near_ties <= allowed * heads_seen, f"{near_ties} near ties of {heads_seen}: the comparison checks too little"


@pytest.mark.parametrize("pooling", ["none", "avg", "max"])
@pytest.mark.parametrize("reserve", ["range", "random", "off"])
def test_equal_keys_are_sampled_by_chance_alone(pooling: Any, reserve: Any) -> None:
    candidates = random_candidates(2, 2, 63, 64, queries=PERIOD)
    candidates.require("keys")[:] = candidates.require("keys")[:, :, :1].clone()
    policy = VaseAttnV(pooling=pooling, reserve=reserve)
    near_ties, _ = check_against_loops(policy, candidates, 30, PERIOD, noise_of(2))
    assert near_ties == 0


def test_without_sampling_the_oldest_of_equally_attended_tokens_stay() -> None:
    candidates = random_candidates(1, 2, 63, 64, queries=PERIOD)
    candidates.require("keys")[:] = 0
    candidates.require("values")[:] = 0
    kept = VaseAttnV(sample=False, pooling="none").select(candidates, 30, PERIOD, noise_of(1))
    assert kept[0].tolist() == [[*range(22), *range(55, 63)]] * 2


@dtypes
@pytest.mark.parametrize("sample", [True, False], ids=["sampled", "highest"])
@pytest.mark.parametrize("room", [9, 12, 15])
def test_tokens_without_any_attention_stay_only_where_there_is_room_to_spare(
    sample: bool, room: int, dtype: torch.dtype
) -> None:
    # Logits are 2000 for twelve tokens and -2000 for eight: their attention is 0 in fp32 and even in fp64.
    ignored = torch.tensor([0, 1, 5, 6, 9, 13, 18, 19])
    keys = torch.zeros(1, 500, 21, 64, dtype=dtype)
    keys[..., 0] = 128
    keys[:, :, ignored, 0] = -128
    queries = torch.zeros(1, 500, 1, 64, dtype=dtype)
    queries[..., 0] = 125
    policy = VaseAttnV(recent=1, window=1, sinks=0, reserve="off", pooling="none", sample=sample)
    kept = policy.select(Candidates((1, 500, 21), keys, None, queries), 1 + room, PERIOD, noise_of(1))[0]
    of_ignored = torch.isin(kept, ignored).sum(dim=-1)
    assert (kept.diff(dim=-1) > 0).all()
    assert (of_ignored == max(0, room - 12)).all()


@pytest.mark.parametrize("reserve", ["range", "variance", "l2"])
def test_the_reserve_stays_whatever_is_sampled_beside_it(reserve: Measure) -> None:
    candidates = random_candidates(1, 3, 63, 64, queries=PERIOD)
    spread = value_spread(candidates.require("values")[:, :, :55], reserve)
    spread[..., :4] = torch.inf  # the sinks are part of it
    expected = spread.topk(10, dim=-1).indices[0].tolist()
    sampled = set()
    for seed in range(20):
        kept = VaseAttnV(reserve=reserve).select(candidates, 40, PERIOD, noise_of(1, seed))[0].tolist()
        for head, reserved in zip(kept, expected, strict=True):
            assert set(head) >= {*reserved, 0, 1, 2, 3}
        sampled.add(tuple(map(tuple, kept)))
    assert len(sampled) == 20


@pytest.mark.parametrize("reserve", ["range", "variance", "l2"])
def test_sinks_take_their_places_in_the_reserve_and_not_beside_it(reserve: Measure) -> None:
    candidates = random_candidates(1, 3, 63, 64, queries=PERIOD)
    spread = value_spread(candidates.require("values")[:, :, 4:55], reserve)
    spread_most = spread.topk(6, dim=-1).indices.add(4)[0].tolist()
    # With no room beside the reserve of ten, nothing is sampled: four sinks and six others.
    kept = VaseAttnV(reserve=reserve, n_value_reserve=10).select(candidates, 18, PERIOD, noise_of(1))[0].tolist()
    assert kept == [sorted([0, 1, 2, 3, *others, *range(55, 63)]) for others in spread_most]


def test_without_reserve_and_sampling_it_selects_as_snapkv() -> None:
    candidates = random_candidates(3, 2, 111, 96, queries=16, group=4)
    plain = VaseAttnV(sample=False, reserve="off", sinks=0)
    noise = noise_of(3)
    kept = plain.select(candidates, 50, 16, noise)
    assert torch.equal(kept, SnapKV().select(candidates, 50, 16, noise))
    with_sinks = replace(plain, sinks=4).select(candidates, 50, 16, noise)
    assert torch.equal(with_sinks, SnapKV(sinks=4).select(candidates, 50, 16, noise))


def test_sample_and_random_reserve_do_not_share_their_numbers() -> None:
    assert SAMPLING != RESERVE
    # Uniform attention and a random reserve: did they share numbers, the sample would be the next of the same order.
    candidates = random_candidates(1, 4, 63, 64, queries=PERIOD)
    candidates.require("keys")[:] = 0
    policy = VaseAttnV(reserve="random", pooling="none", n_value_reserve=10)
    kept = policy.select(candidates, 30, PERIOD, noise_of(1))
    highest = noise_of(1).uniform(4, 55, stream=SAMPLING)
    highest[..., :4] = 2
    shared = torch.cat([highest.topk(22, dim=-1).indices, torch.arange(55, 63).expand(1, 4, -1)], dim=-1)
    assert not (kept == shared.sort(dim=-1).values).all(dim=-1).any()
