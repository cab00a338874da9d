"""A policy that chooses for many requests at once keeps of each what it keeps of that request alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.policies.base import Candidates, Noise, Policy
from kvpolicy.policies.paged import PagedCandidates, PagedPolicy
from tests.kernels.interpreting import interpreted
from tests.policies.candidates import random_candidates
from tests.policies.matrix import SELECTING, Row

LAYERS, HEADS, GROUP, HEAD_DIM, PERIOD, FIRST_HEAD = (4, 7), 2, 3, 20, 8, 6
LENGTHS, KEPT = (60, 41, 33), (40, 40, 25)


def with_kernels() -> list[Row]:
    return [
        row for row in SELECTING if "STATISTICS" not in str(row) and getattr(row.build(), "has_kernels", False) is True
    ]


@pytest.fixture
def kernels() -> Iterator[None]:
    pytest.importorskip("triton")
    with interpreted():
        yield


def requests(policy: Policy, dtype: torch.dtype) -> list[Candidates]:
    queries = policy.needs(PERIOD).queries
    return [
        random_candidates(len(LAYERS), HEADS, tokens, HEAD_DIM, dtype=dtype, seed=seed, group=GROUP, queries=queries)
        for seed, tokens in enumerate(LENGTHS)
    ]


def together(policy: Policy, alone: list[Candidates]) -> PagedCandidates:
    """The same requests in pools of shuffled slots, in which nobody else's rows are numbers."""
    generator = torch.Generator().manual_seed(9)
    total = sum(LENGTHS)
    slots = torch.randperm(2 * total, generator=generator)[:total]
    pools = []
    for name in ("keys", "values"):
        buffers = torch.full((len(LAYERS), 2 * total, HEADS, HEAD_DIM), torch.nan, dtype=alone[0].require("keys").dtype)
        buffers[:, slots] = torch.cat([each.require(name) for each in alone], dim=2).transpose(1, 2)
        pools.append(Pool.of(list(buffers)))
    queries = torch.stack([each.require("queries") for each in alone]) if policy.needs(PERIOD).queries else None
    return PagedCandidates(
        keys=pools[0],
        values=pools[1],
        rows=Rows.of(list(slots.split(LENGTHS))),
        queries=queries,
        n_keep=KEPT,
        period=PERIOD,
        seeds=torch.tensor([3, 2**62, 3]),
        evictions=torch.tensor([0, 5, 1]),
        layers=LAYERS,
        first_head=FIRST_HEAD,
    )


def test_these_policies_have_kernels() -> None:
    assert {row.name for row in with_kernels()} == {
        "random",
        "vase-attnv",
        "vase-dkv",
        "evict-large-range",
        "evict-small-range",
        "snapkv",
        "curdkv",
    }


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("row", with_kernels(), ids=str)
def test_many_at_once_keep_what_each_keeps_alone(row: Row, dtype: torch.dtype) -> None:
    policy = row.fitted(PERIOD, recent=PERIOD)
    assert isinstance(policy, PagedPolicy)
    alone = requests(policy, dtype)
    paged = together(policy, alone)
    choice = policy.select_paged(paged)
    assert choice.starts.tolist() == [0, 40, 80, 105]
    for i, candidates in enumerate(alone):
        noise = Noise(int(paged.seeds[i]), int(paged.evictions[i]), LAYERS, first_head=FIRST_HEAD)
        expected = policy.select(candidates, KEPT[i], PERIOD, noise)
        kept = choice.keep[..., choice.starts[i] : choice.starts[i + 1]]
        assert torch.equal(kept, expected), f"request {i}"
