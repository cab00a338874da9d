"""Positions and statistics of resident tokens through evictions, against lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kvpolicy.policies.base import Candidates, Granularity, Needs, Noise, Policy
from kvpolicy.sglang_plugin.token_state import TokenState

LAYERS, HEADS, KEPT, PERIOD = 3, 2, 6, 4
CPU, EVERY = torch.device("cpu"), slice(None)


@dataclass(frozen=True)
class Sharing(Policy):
    """Chooses nothing; says who shares a set."""

    name: ClassVar[str] = "sharing"

    who: Granularity = Granularity.PER_HEAD
    positions: bool = True
    widths: tuple[int, ...] = ()  # type: ignore[misc]  # a property of the base

    @property
    def shares(self) -> Granularity:
        return self.who

    def needs(self, period: int) -> Needs:
        return Needs(positions=self.positions)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        raise AssertionError


@pytest.mark.parametrize("who", list(Granularity))
def test_positions_and_statistics_follow_the_kept_tokens(who: Granularity) -> None:
    """Five evictions; a shared set is one choice for all that share it."""
    generator = torch.Generator().manual_seed(0)
    state, true_len = TokenState(Sharing(who), observed=10), 10
    expected = [[list(range(10)) for _ in range(HEADS)] for _ in range(LAYERS)]
    for _ in range(5):
        shape = (LAYERS, HEADS, len(expected[0][0]))
        positions = state.positions(true_len, EVERY, CPU).expand(shape)
        assert positions.tolist() == expected
        state.observe(positions * 0.5, true_len)
        drawn = torch.rand(shape, generator=generator)
        if who in (Granularity.PER_LAYER, Granularity.GLOBAL):
            drawn = drawn[:, :1]
        if who in (Granularity.PER_KV_HEAD_INDEX, Granularity.GLOBAL):
            drawn = drawn[:1]
        keep = drawn.topk(KEPT, dim=-1).indices.sort(dim=-1).values.expand(LAYERS, HEADS, KEPT)
        state.evicted(keep, true_len)
        new = list(range(true_len, true_len + PERIOD))
        expected = [[[row[i] for i in keep[layer, head].tolist()] + new for head, row in enumerate(rows)]
                    for layer, rows in enumerate(expected)]  # fmt: skip
        assert (state.previous_len, state.observed) == (true_len, true_len)
        true_len += PERIOD
        statistic = state.statistic((LAYERS, HEADS, KEPT + PERIOD), EVERY, CPU)
        assert statistic[..., :KEPT].mul(2).long().tolist() == [[row[:KEPT] for row in rows] for rows in expected]
        assert statistic[..., KEPT:].isnan().all()
        part = state.positions(true_len, slice(1, 3), CPU).expand(2, HEADS, -1)
        assert part.tolist() == expected[1:]


@pytest.mark.parametrize(
    ("who", "sets"),
    [
        (Granularity.PER_HEAD, LAYERS * HEADS),
        (Granularity.PER_LAYER, LAYERS),
        (Granularity.PER_KV_HEAD_INDEX, HEADS),
        (Granularity.GLOBAL, 1),
    ],
)
def test_a_shared_set_of_positions_is_stored_once(who: Granularity, sets: int) -> None:
    state = TokenState(Sharing(who), observed=10)
    assert state.bytes == 0
    state.evicted(torch.arange(KEPT).expand(LAYERS, HEADS, KEPT), 10)
    assert state.bytes == 4 * sets * KEPT


def test_what_no_policy_reads_is_not_stored() -> None:
    state = TokenState(Sharing(positions=False), observed=10)
    state.evicted(torch.arange(KEPT).expand(LAYERS, HEADS, KEPT), 10)
    assert state.bytes == 0
    with pytest.raises(AssertionError, match="does not declare that it needs positions"):
        state.positions(10, EVERY, CPU)


def test_bits_follow_the_kept_tokens_and_never_come_back() -> None:
    """Four evictions; a new token has all 8 until a choice gives it fewer."""
    generator = torch.Generator().manual_seed(1)
    state, true_len = TokenState(Sharing(widths=(8, 4, 2)), observed=10), 10
    assert state.mean_code_bits(10) == 8
    expected = [[[8] * 10 for _ in range(HEADS)] for _ in range(LAYERS)]
    for _ in range(4):
        shape = (LAYERS, HEADS, len(expected[0][0]))
        keep = torch.rand(shape, generator=generator).topk(KEPT, dim=-1).indices.sort(dim=-1).values
        now = torch.tensor([2, 4, 8])[torch.randint(3, keep.shape, generator=generator)].to(torch.uint8)
        state.evicted(keep, true_len, now)
        expected = [
            [
                [min(row[i], new) for i, new in zip(kept, wanted, strict=True)]
                for row, kept, wanted in zip(*of_layer, strict=True)
            ]
            for of_layer in zip(expected, keep.tolist(), now.tolist(), strict=True)
        ]
        assert state.code_bits is not None
        assert state.code_bits.tolist() == expected
        total = sum(sum(row) + 8 * PERIOD for rows in expected for row in rows)
        assert state.mean_code_bits(KEPT + PERIOD) == pytest.approx(total / (LAYERS * HEADS * (KEPT + PERIOD)))
        expected = [[row + [8] * PERIOD for row in rows] for rows in expected]
        true_len += PERIOD
    assert state.bytes == LAYERS * HEADS * KEPT * (4 + 1)
