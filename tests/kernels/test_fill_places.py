"""Kept tokens in their places, against one place after the other."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.compact import compact
from kvpolicy.kernels.fill_places import fill_places, fill_places_reference


def chosen(layers: int, heads: int, tokens: int, kept: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + kept)
    order = torch.rand(layers, heads, tokens, generator=generator).topk(kept).indices
    return order.sort(dim=-1).values


@pytest.mark.parametrize(
    ("tokens", "kept"), [(1, 1), (63, 40), (64, 0), (40, 40), (111, 7), (111, 110), (300, 150)], ids=str
)
def test_equals_the_reference(tokens: int, kept: int) -> None:
    keep = chosen(2, 3, tokens, kept)
    before = keep.clone()
    assert torch.equal(fill_places(keep), fill_places_reference(keep))
    assert torch.equal(keep, before)


@pytest.mark.parametrize(
    ("keep", "filled"),
    [
        pytest.param([0, 1, 2], [0, 1, 2], id="nothing is evicted in front"),
        pytest.param([0, 2, 3, 5], [0, 5, 2, 3], id="one from the end"),
        pytest.param([2, 4, 5, 9], [4, 5, 2, 9], id="more, in their order"),
        pytest.param([7, 8, 9], [7, 8, 9], id="none stays"),
    ],
)
def test_places_are_filled_from_the_end_of_the_row(keep: list[int], filled: list[int]) -> None:
    assert fill_places(torch.tensor(keep)).tolist() == filled
    assert fill_places_reference(torch.tensor([keep])).tolist() == [filled]


def test_the_same_tokens_are_kept_and_as_many_move_as_are_evicted_in_front() -> None:
    keep = chosen(4, 3, 200, 170)
    filled = fill_places(keep)
    assert torch.equal(filled.sort(dim=-1).values, keep)
    moved = (filled != torch.arange(170)).sum(dim=-1)
    assert torch.equal(moved, (keep >= 170).sum(dim=-1))
    assert int(moved.max()) <= 30


def test_over_many_evictions_oldest_and_newest_stay_at_the_ends() -> None:
    """Appended tokens come last, the first are never evicted: what a policy that reads no order is promised."""
    sinks, budget, period = 4, 40, 8
    row = torch.arange(budget + period)
    buffer = torch.arange(budget + period, dtype=torch.float64).view(-1, 1, 1).repeat(1, 2, 1)  # who lies in each slot
    generator = torch.Generator().manual_seed(0)
    for eviction in range(12):
        newest = budget + period * (eviction + 1)
        buffer[budget:] = torch.arange(newest - period, newest, dtype=torch.float64).view(-1, 1, 1)
        scores = torch.rand(2, budget + period, generator=generator)
        scores[:, :sinks], scores[:, -period:] = 2.0, 2.0
        keep = fill_places(scores.topk(budget).indices.sort(dim=-1).values)
        before = [set(buffer[:, head, 0].tolist()) for head in range(2)]
        compact(buffer, row, keep, row[:budget])
        for head in range(2):
            held = buffer[:budget, head, 0].tolist()
            assert held[:sinks] == [0.0, 1.0, 2.0, 3.0]
            assert set(range(newest - period, newest)) <= set(held) <= before[head]
            assert len(set(held)) == budget
