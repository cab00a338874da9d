"""VaSE-AttnV as the docstring of the policy says it, for one KV head, one token at a time in fp64."""

from __future__ import annotations

import math

import torch

from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.policies.vase_attnv import RESERVE, SAMPLING, VaseAttnV
from tests.kernels.attention_by_loops import attention_by_loops
from tests.policies.near_ties import possible_tops
from tests.policies.test_value_spread import spread_by_loops


def tops_of(scores: dict[int, float], count: int) -> list[set[int]]:
    """The highest `count` keys of `scores`, in every way that rounding allows."""
    tokens = list(scores)
    return [{tokens[i] for i in top} for top in possible_tops(list(scores.values()), count)]


def kept_by_loops(
    policy: VaseAttnV, candidates: Candidates, layer: int, head: int, n_keep: int, recent: int, noise: Noise
) -> list[set[int]]:
    """What the policy may keep: one set, unless the reserve's or the sample's cut is a near tie."""
    _, heads, tokens = candidates.shape
    older = range(tokens - recent)
    newest = set(range(tokens - recent, tokens))
    room = n_keep - recent

    if policy.reserve == "off":
        reserved = policy.sinks
    elif policy.n_value_reserve < 1:
        reserved = math.floor(policy.n_value_reserve * n_keep)
    else:
        reserved = int(policy.n_value_reserve)
    reserved = min(reserved, room)

    # The sinks are in the reserve; the tokens that spread most fill it up.
    sinks = set(range(policy.sinks))
    beside = [token for token in older if token not in sinks]
    if policy.reserve == "off":
        reserves = [sinks]
    else:
        if policy.reserve == "random":
            spread = noise.uniform(heads, len(older), stream=RESERVE)[layer, head].tolist()
        else:
            spread = spread_by_loops(candidates.require("values")[layer, head], policy.reserve)
        reserves = [sinks | top for top in tops_of({n: spread[n] for n in beside}, reserved - len(sinks))]

    attention = attention_by_loops(
        candidates.require("queries")[layer].chunk(heads)[head],
        candidates.require("keys")[layer, head],
        len(older),
        domain="candidates",
        group="mean",
        pooling=policy.pooling,
        kernel=policy.kernel,
        temperature=policy.temperature,
    )
    chances = noise.uniform(heads, len(older), stream=SAMPLING)[layer, head].tolist()
    # Gumbel top-k without its outer logarithm: an exponential race, in which w / -log u is the speed of an item.
    scores = [w / -math.log(u) if policy.sample else w for w, u in zip(attention, chances, strict=True)]
    return [
        newest | reserve | drawn
        for reserve in reserves
        for drawn in tops_of({n: scores[n] for n in older if n not in reserve}, room - reserved)
    ]


def check_against_loops(
    policy: VaseAttnV, candidates: Candidates, n_keep: int, period: int, noise: Noise
) -> tuple[int, int]:
    """Assert that every head keeps what the loops say; the number of near ties, and of heads."""
    layers, heads, _ = candidates.shape
    assert candidates.require("queries").shape[2] == policy.needs(period).queries
    kept, near_ties = policy.select(candidates, n_keep, period, noise), 0
    recent = period if policy.recent is None else policy.recent
    for layer in range(layers):
        for head in range(heads):
            possible = kept_by_loops(policy, candidates, layer, head, n_keep, recent, noise)
            chosen = set(kept[layer, head].tolist())
            assert chosen in possible, f"{layer = }, {head = }: {sorted(chosen ^ possible[0])} differ"
            near_ties += len(possible) > 1
    return near_ties, layers * heads


def bare(candidates: Candidates) -> Candidates:
    """Without values, which some arms do not read."""
    return Candidates(candidates.shape, candidates.keys, None, candidates.queries)


def as_set(kept: torch.Tensor) -> set[int]:
    return set(kept.flatten().tolist())
