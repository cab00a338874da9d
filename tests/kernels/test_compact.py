"""Compaction against a loop over heads and ranks, in buffers whose unrelated slots are poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvpolicy.kernels.compact import compact, compact_reference, gather_rows

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
implementations = pytest.mark.parametrize("move", [compact, compact_reference])


@dataclass
class Case:
    """One request in a pool whose other slots hold NaN."""

    buffer: torch.Tensor
    row: torch.Tensor
    keep: torch.Tensor
    destination: torch.Tensor

    def expected(self) -> torch.Tensor:
        after = self.buffer.clone()
        for head in range(self.keep.shape[0]):
            for rank in range(self.keep.shape[1]):
                source = int(self.row[int(self.keep[head, rank])])
                after[int(self.destination[rank]), head] = self.buffer[source, head]
        return after


def case(
    tokens: int, kept: int, *, heads: int = 2, head_dim: int = 64, fresh: int = 0, dtype: torch.dtype = torch.float32
) -> Case:
    """A scattered row; the destination is `fresh` new slots and a random choice of the row's own, shuffled."""
    generator = torch.Generator().manual_seed(tokens + kept)
    slots = torch.randperm(tokens + fresh + 20, generator=generator)
    row, new = slots[:tokens], slots[tokens : tokens + fresh]
    buffer = torch.full((len(slots), heads, head_dim), torch.nan, dtype=dtype)
    buffer[row] = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    keep = torch.stack([torch.randperm(tokens, generator=generator)[:kept].sort().values for _ in range(heads)])
    own = row[torch.randperm(tokens, generator=generator)[: kept - fresh]]
    return Case(buffer, row, keep, torch.cat([own, new])[torch.randperm(kept, generator=generator)])


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns, which unlike values can be compared where they are NaN."""
    return x.contiguous().view(torch.uint8)


CASES: dict[str, Callable[[], Case]] = {
    "one token": lambda: case(1, 1, head_dim=60),
    "one head": lambda: case(63, 40, heads=1),
    "budget + 1": lambda: case(33, 32, head_dim=96),
    "111 tokens in bf16": lambda: case(111, 50, heads=3, head_dim=80, dtype=torch.bfloat16),
    "some fresh slots": lambda: case(63, 60, fresh=10, head_dim=128, dtype=torch.float16),
    "fresh slots only": lambda: case(63, 20, fresh=20),
    "all kept, slots permuted": lambda: case(40, 40),
}
cases = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@implementations
@cases
def test_each_head_finds_its_own_tokens_in_the_shared_slots(move: Move, make: Callable[[], Case]) -> None:
    given = make()
    expected = given.expected()
    move(given.buffer, given.row, given.keep, given.destination)
    assert torch.equal(bits(given.buffer), bits(expected))
    assert given.buffer[given.destination].isfinite().all()


@implementations
@cases
def test_slots_that_are_no_destination_stay_bit_identical(move: Move, make: Callable[[], Case]) -> None:
    given = make()
    others = torch.ones(len(given.buffer), dtype=torch.bool)
    others[given.destination] = False
    before = bits(given.buffer[others])
    move(given.buffer, given.row, given.keep, given.destination)
    assert torch.equal(bits(given.buffer[others]), before)
    assert given.buffer[others].isnan().any()


@implementations
def test_two_tokens_can_trade_places(move: Move) -> None:
    buffer = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])[:, :, None]  # [slots, heads, 1]
    keep = torch.tensor([[0, 1], [1, 2]])
    move(buffer, torch.tensor([0, 1, 2]), keep, torch.tensor([1, 0]))
    assert buffer.squeeze(-1).tolist() == [[2.0, 30.0], [1.0, 20.0], [3.0, 30.0]]


@pytest.mark.parametrize(
    ("keep", "destination"),
    [
        pytest.param((3, 4), (4,), id="keep for more heads"),
        pytest.param((2, 4), (5,), id="more destinations than kept tokens"),
        pytest.param((2, 4), (4, 1), id="destinations in two axes"),
    ],
)
def test_shapes_that_do_not_fit_are_programming_errors(keep: tuple[int, ...], destination: tuple[int, ...]) -> None:
    arguments = [torch.zeros(shape, dtype=torch.int64) for shape in (keep, destination)]
    with pytest.raises(AssertionError, match="must"):
        compact(torch.zeros(9, 2, 8), torch.arange(6), *arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gathered_rows_are_a_copy_of_whole_tokens_by_head(dtype: torch.dtype) -> None:
    given = case(63, 40, heads=3, head_dim=80, dtype=dtype)
    rows = gather_rows(given.buffer, given.row)
    expected = [[given.buffer[int(slot), head] for slot in given.row] for head in range(3)]
    assert torch.equal(rows, torch.stack([torch.stack(head) for head in expected]))
    before = rows.clone()
    given.buffer.zero_()
    assert torch.equal(rows, before)
