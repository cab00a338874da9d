"""Compaction against a loop over heads and ranks, in buffers whose unrelated slots are poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvpolicy.kernels.compact import PagedTokens, compact, compact_layers, compact_reference, gather_layers
from kvpolicy.kernels.fill_places import fill_places

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def compact_one_layer(buffer: torch.Tensor, row: torch.Tensor, keep: torch.Tensor, destination: torch.Tensor) -> None:
    compact_layers([[buffer]], row, keep[None], destination)


implementations = pytest.mark.parametrize("move", [compact, compact_reference, compact_one_layer])


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


@pytest.mark.parametrize(
    "widths",
    [
        pytest.param([(64, torch.bfloat16), (64, torch.bfloat16)], id="keys and values"),
        pytest.param([(80, torch.bfloat16), (80, torch.uint8), (1, torch.float16)], id="narrower values with a scale"),
        pytest.param([(5, torch.uint8), (256, torch.float32), (3, torch.float64)], id="odd widths"),
    ],
)
@pytest.mark.parametrize("place", ["beginning", "filled", "few", "one", "end", "shuffled", "fresh"])
def test_all_layers_of_all_pools_equal_the_reference(widths: list[tuple[int, torch.dtype]], place: str) -> None:
    generator = torch.Generator().manual_seed(len(place))
    layers, heads, tokens, kept = 3, 2, 63, 41
    slots = torch.randperm(150, generator=generator)
    row = slots[:tokens]
    destination = {"beginning": row[:kept], "end": row[-kept:], "shuffled": row.roll(7)[:kept].flip(0)}.get(
        place, slots[tokens:][:kept]
    )
    keep = torch.stack([torch.randperm(tokens, generator=generator)[:kept].sort().values for _ in range(6)])
    keep = keep.view(layers, heads, kept)
    if place in ("filled", "few", "one"):
        keep, destination = fill_places(keep), row[:kept]
    if place == "few":  # nothing to move in one layer and in one head of another
        keep[0] = keep[1, 1] = torch.arange(kept)
    if place == "one":
        keep[:] = torch.arange(kept)
        keep[1, 1, 7] = tokens - 1
    pools = [[random_bits((150, heads, width), dtype, generator) for _ in range(layers)] for width, dtype in widths]
    expected = [[buffer.clone() for buffer in buffers] for buffers in pools]
    for buffers in expected:
        for layer, buffer in enumerate(buffers):
            compact_reference(buffer, row, keep[layer], destination)
    compact_layers(pools, row, keep, destination)
    for found, wanted in zip(pools, expected, strict=True):
        for layer in range(layers):
            assert torch.equal(bits(found[layer]), bits(wanted[layer])), f"{layer = }"


def random_bits(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("kept", [0, 20])
def test_tokens_that_stay_are_not_touched(kept: int) -> None:
    given = case(33, 20)
    before = given.buffer.clone()
    keep = torch.arange(kept).expand(2, kept)
    compact_layers([[given.buffer]], given.row, keep[None], given.row[:kept])
    assert torch.equal(bits(given.buffer), bits(before))


def test_buffers_may_begin_anywhere_in_their_storage() -> None:
    given = case(63, 40, dtype=torch.bfloat16)
    expected = given.expected()
    shifted = torch.cat([given.buffer.new_zeros(1), given.buffer.flatten()])[1:].view(given.buffer.shape)
    compact_layers([[shifted]], given.row, given.keep[None], given.destination)
    assert torch.equal(bits(shifted), bits(expected))


@pytest.mark.parametrize(
    ("layers", "keep", "destination"),
    [
        pytest.param(2, (1, 2, 4), (4,), id="more layers"),
        pytest.param(1, (1, 3, 4), (4,), id="more heads"),
        pytest.param(1, (1, 2, 4), (5,), id="more destinations"),
    ],
)
def test_layers_that_do_not_fit_are_programming_errors(
    layers: int, keep: tuple[int, ...], destination: tuple[int, ...]
) -> None:
    arguments = [torch.zeros(shape, dtype=torch.int64) for shape in (keep, destination)]
    with pytest.raises(AssertionError, match="must"):
        compact_layers([[torch.zeros(9, 2, 8)] * layers], torch.arange(6), *arguments)


def test_paged_tokens_are_read_layer_by_layer_or_at_once() -> None:
    cases = [case(63, 40, heads=3, head_dim=80, dtype=torch.bfloat16) for _ in range(3)]
    buffers = [given.buffer * (layer + 1) for layer, given in enumerate(cases)]
    row = cases[0].row
    paged, gathered = PagedTokens(buffers, row), gather_layers(buffers, row)
    assert paged.shape == gathered.shape == (3, 3, 63, 80)
    assert all(torch.equal(*pair) for pair in zip(paged, gathered, strict=True))
    assert torch.equal(paged.gathered, gathered)
    assert paged.gathered is paged.gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gathered_rows_are_a_copy_of_whole_tokens_by_head(dtype: torch.dtype) -> None:
    given = case(63, 40, heads=3, head_dim=80, dtype=dtype)
    rows = gather_layers([given.buffer], given.row)[0]
    expected = [[given.buffer[int(slot), head] for slot in given.row] for head in range(3)]
    assert torch.equal(rows, torch.stack([torch.stack(head) for head in expected]))
    before = rows.clone()
    given.buffer.zero_()
    assert torch.equal(rows, before)
