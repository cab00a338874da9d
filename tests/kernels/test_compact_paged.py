"""Compaction of several requests at once against one element at a time, bit for bit, in buffers full of random bits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvpolicy.kernels import compact_paged as compact_paged_module
from kvpolicy.kernels.compact import compact_reference
from kvpolicy.kernels.compact_paged import compact_paged
from kvpolicy.kernels.fill_places import fill_places
from kvpolicy.kernels.paged import Pool, Rows
from tests.kernels.compiling import machine_code
from tests.kernels.far_slots import far_buffer
from tests.kernels.interpreting import interpreted

FREE = 9  # slots that no request owns
LAYERS, HEADS = 2, 3
# The rows of the wider pools are more than a program moves at a time.
WIDTHS = [
    pytest.param(1, torch.uint8, id="one byte"),
    pytest.param(3, torch.uint8, id="3 bytes"),
    pytest.param(1, torch.float32, id="one number"),
    pytest.param(60, torch.bfloat16, id="60 in bf16"),
    pytest.param(63, torch.float16, id="63 in fp16"),
    pytest.param(80, torch.float16, id="80 in fp16"),
    pytest.param(96, torch.float32, id="96 in fp32"),
    pytest.param(100, torch.uint8, id="100 bytes"),
    pytest.param(128, torch.bfloat16, id="128 in bf16"),
    pytest.param(256, torch.float32, id="256 in fp32"),
]
# Where each request's kept tokens go, given its own slots, how many, and free ones.
DESTINATIONS: dict[str, Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]] = {
    "the beginning of the row": lambda row, kept, free: row[:kept],
    "its end": lambda row, kept, free: row[len(row) - kept :],
    "its beginning reversed": lambda row, kept, free: row[:kept].flip(0),
    "its middle shuffled, and fresh slots": lambda row, kept, free: torch.cat([row, free])[kept // 3 :].roll(5)[:kept],
    "fresh slots": lambda row, kept, free: free[:kept],
}


@dataclass
class Case:
    """Requests in pools, and where their tokens go."""

    pools: list[list[torch.Tensor]]
    rows: list[torch.Tensor]
    keep: list[torch.Tensor]  # [L, H, n_keep] of each
    destinations: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        device: torch.device,
        sizes: list[tuple[int, int]],
        widths: list[tuple[int, torch.dtype]],
        place: str = "the beginning of the row",
    ) -> Case:
        """Requests of `sizes` (resident, kept), their slots scattered over the pools and each other."""
        generator = torch.Generator().manual_seed(len(sizes) + sizes[0][0])
        owned, kept = sum(resident for resident, _ in sizes), sum(kept for _, kept in sizes)
        slots = torch.randperm(owned + kept + FREE, generator=generator)
        rows = slots[:owned].split([resident for resident, _ in sizes])
        fresh = slots[owned : owned + kept].split([kept for _, kept in sizes])
        keep = [
            torch.stack([torch.randperm(n, generator=generator)[:k].sort().values for _ in range(LAYERS * HEADS)])
            for n, k in sizes
        ]
        destinations = [DESTINATIONS[place](row, k, free) for row, (_, k), free in zip(rows, sizes, fresh, strict=True)]
        assert all(len(destination) == k for destination, (_, k) in zip(destinations, sizes, strict=True))
        pools = [
            [
                torch.randint(256, (len(slots), HEADS, width * dtype.itemsize), dtype=torch.uint8, generator=generator)
                .to(device)
                .view(dtype)
                for _ in range(LAYERS)
            ]
            for width, dtype in widths
        ]
        return cls(
            pools,
            [row.to(device) for row in rows],
            [kept.view(LAYERS, HEADS, -1).to(device) for kept in keep],
            [destination.to(device) for destination in destinations],
        )

    def expected(self) -> list[list[torch.Tensor]]:
        after = [[buffer.clone() for buffer in buffers] for buffers in self.pools]
        for buffers in after:
            for row, keep, destination in zip(self.rows, self.keep, self.destinations, strict=True):
                for layer, buffer in enumerate(buffers):
                    compact_reference(buffer, row, keep[layer], destination)
        return after

    def move(self, *, in_place: bool, keep: torch.Tensor | None = None) -> None:
        pools = [Pool.of(buffers) for buffers in self.pools]
        keep = torch.cat(self.keep, dim=-1) if keep is None else keep
        compact_paged(pools, Rows.of(self.rows), keep, Rows.of(self.destinations), in_place=in_place)

    def check(self, expected: list[list[torch.Tensor]]) -> None:
        for found, wanted in zip(self.pools, expected, strict=True):
            for layer in range(LAYERS):
                assert torch.equal(found[layer].view(torch.uint8), wanted[layer].view(torch.uint8)), f"{layer = }"


SEVERAL = [(63, 40), (0, 0), (33, 32), (1, 1), (111, 70), (17, 0), (40, 40)]


@pytest.mark.parametrize(("head_dim", "dtype"), WIDTHS)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "staged"])
def test_every_request_equals_the_reference_bit_for_bit(
    device: torch.device, in_place: bool, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case.of(device, SEVERAL, [(head_dim, dtype)])
    expected = case.expected()
    case.move(in_place=in_place)
    case.check(expected)


@pytest.mark.parametrize("place", DESTINATIONS)
@pytest.mark.parametrize("sizes", [[(129, 90)], SEVERAL], ids=["one request", "several"])
def test_destinations_may_overlap_the_row_in_any_order(
    device: torch.device, sizes: list[tuple[int, int]], place: str
) -> None:
    case = Case.of(device, sizes, [(256, torch.float32)], place)
    expected = case.expected()
    case.move(in_place=False)
    case.check(expected)


def test_staged_requests_may_take_slots_that_another_still_reads(device: torch.device) -> None:
    case = Case.of(device, [(63, 40), (50, 32)], [(64, torch.bfloat16)])
    first, second = case.rows
    case.destinations = [torch.cat([second[:20], first[:20]]), torch.cat([first[20:40], second[20:32]])]
    before = [buffer.clone() for buffer in case.pools[0]]
    case.move(in_place=False)
    for layer, buffer in enumerate(case.pools[0]):
        expected = before[layer].clone()
        for row, keep, destination in zip(case.rows, case.keep, case.destinations, strict=True):
            for head in range(HEADS):
                expected[destination, head] = before[layer][row[keep[layer, head]], head]
        assert torch.equal(buffer.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("order", [torch.clone, fill_places], ids=["ascending", "places filled"])
def test_a_long_row_moves_in_place_tile_by_tile(device: torch.device, order: Callable[..., torch.Tensor]) -> None:
    case = Case.of(device, [(900, 640), (700, 699)], [(64, torch.bfloat16)])
    case.keep = [order(keep) for keep in case.keep]
    expected = case.expected()
    case.move(in_place=True)
    case.check(expected)


def test_slots_that_are_no_destination_are_never_written(device: torch.device) -> None:
    case = Case.of(device, SEVERAL, [(64, torch.bfloat16), (1, torch.float32)])
    others = torch.ones(len(case.pools[0][0]), dtype=torch.bool, device=device)
    others[torch.cat(case.destinations)] = False
    before = [[buffer[others].view(torch.uint8) for buffer in buffers] for buffers in case.pools]
    case.move(in_place=True)
    for found, wanted in zip(case.pools, before, strict=True):
        for layer in range(LAYERS):
            assert torch.equal(found[layer][others].view(torch.uint8), wanted[layer])
    assert int(others.sum()) > FREE


def test_pools_of_equal_rows_share_one_launch(device: torch.device, launches: Counter[str]) -> None:
    case = Case.of(
        device, SEVERAL, [(64, torch.bfloat16), (64, torch.float16), (2, torch.float16), (32, torch.float32)]
    )
    expected = case.expected()
    case.move(in_place=True)
    assert dict(launches) == {"_compact_kernel": 2}
    case.check(expected)


@pytest.mark.parametrize(
    ("limit", "expected_launches"),
    [
        pytest.param(2**28, 2, id="all rows are staged at once"),
        pytest.param(3 * HEADS * 183 * 128, 4, id="three of four buffers at a time"),
        pytest.param(1, 8, id="one buffer at a time"),
    ],
)
def test_rows_are_staged_as_far_as_memory_goes(
    device: torch.device,
    launches: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    expected_launches: int,
) -> None:
    monkeypatch.setattr(compact_paged_module, "STAGE_BYTES", limit)
    case = Case.of(device, SEVERAL, [(64, torch.bfloat16), (64, torch.bfloat16)], "its beginning reversed")
    expected = case.expected()
    case.move(in_place=False)
    assert dict(launches) == {"_compact_kernel": expected_launches}
    case.check(expected)


def test_nothing_is_launched_where_nothing_is_kept(device: torch.device, launches: Counter[str]) -> None:
    case = Case.of(device, [(0, 0), (5, 0)], [(64, torch.bfloat16)])
    expected = case.expected()
    case.move(in_place=False)
    case.check(expected)
    assert not launches


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_buffers_may_begin_anywhere(device: torch.device, offset: int) -> None:
    case = Case.of(device, [(63, 40)], [(64, torch.uint8)])
    case.pools = [
        [torch.cat([buffer.new_zeros(offset), buffer.flatten()])[offset:].view(buffer.shape) for buffer in buffers]
        for buffers in case.pools
    ]
    expected = case.expected()
    case.move(in_place=False)
    case.check(expected)


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(lambda keep: keep[:1, :1].expand(LAYERS, HEADS, -1), id="one choice for all heads"),
        pytest.param(lambda keep: keep.permute(2, 0, 1).contiguous().permute(1, 2, 0), id="ranks are far apart"),
        pytest.param(lambda keep: torch.cat([keep, keep], dim=-1)[..., : keep.shape[-1]], id="a part of a tensor"),
    ],
)
def test_strides_of_the_choice_do_not_matter(device: torch.device, shared: Callable[[Any], torch.Tensor]) -> None:
    case = Case.of(device, SEVERAL, [(80, torch.float16)])
    keep = shared(torch.cat(case.keep, dim=-1))
    case.keep = list(keep.split([k for _, k in SEVERAL], dim=-1))
    expected = case.expected()
    case.move(in_place=True, keep=keep)
    case.check(expected)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda pools, rows, keep, to: ([pools[0], other_slots(pools[1])], rows, keep, to), id="slots"),
        pytest.param(lambda pools, rows, keep, to: (pools, rows, keep[:1], to), id="layers"),
        pytest.param(lambda pools, rows, keep, to: (pools, rows, keep[:, :2], to), id="heads"),
        pytest.param(lambda pools, rows, keep, to: (pools, rows, keep[..., 1:], to), id="kept tokens"),
        pytest.param(lambda pools, rows, keep, to: (pools, rows, keep.int(), to), id="dtype of the choice"),
        pytest.param(
            lambda pools, rows, keep, to: (pools, dataclasses.replace(rows, slots=rows.slots.int()), keep, to),
            id="dtype of the slots",
        ),
        pytest.param(
            lambda pools, rows, keep, to: (pools, dataclasses.replace(rows, lengths=rows.lengths[:1]), keep, to),
            id="number of requests",
        ),
        pytest.param(
            lambda pools, rows, keep, to: (pools, dataclasses.replace(rows, lengths=(3, 9)), keep, to),
            id="more kept than resident",
        ),
    ],
)
def test_what_does_not_fit_is_a_programming_error(change: Callable[..., Any]) -> None:
    case = Case.of(torch.device("cpu"), [(9, 5), (6, 4)], [(8, torch.float32), (8, torch.float32)])
    pools = [Pool.of(buffers) for buffers in case.pools]
    arguments = change(pools, Rows.of(case.rows), torch.cat(case.keep, dim=-1), Rows.of(case.destinations))
    with pytest.raises(AssertionError, match="must"):
        compact_paged(*arguments, in_place=False)


def other_slots(pool: Pool) -> Pool:
    return Pool.of([buffer[1:] for buffer in pool.buffers])


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "staged"])
def test_slots_beyond_two_to_the_31_elements(device: torch.device, in_place: bool) -> None:
    buffer = far_buffer(8, 127, device)  # its rows are moved by two bytes, so that elements are what is counted
    row = torch.tensor([3, len(buffer) - 1, len(buffer) - 2, 7], device=device)
    tokens = torch.randn(len(row), 8, 127, generator=torch.Generator().manual_seed(0)).to(device, buffer.dtype)
    buffer[row] = tokens
    keep = torch.tensor([[0, 2, 3], [1, 2, 3]], device=device).repeat(4, 1)[None]
    destination = Rows.of([row[:3]])
    compact_paged([Pool.of([buffer])], Rows.of([row]), keep, destination, in_place=in_place)
    expected = tokens[keep[0].T, torch.arange(8, device=device)]
    assert torch.equal(buffer[row[:3]], expected)
    assert torch.equal(buffer[row[3]], tokens[3])


@pytest.mark.parametrize(("head_dim", "dtype"), [(1, torch.uint8), (64, torch.bfloat16), (80, torch.float16)])
def test_all_warps_wait_between_reading_a_tile_and_writing_it(head_dim: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    case = Case.of(torch.device("cpu"), SEVERAL, [(head_dim, dtype)])
    with interpreted() as launched:
        case.move(in_place=True)
    code = machine_code(launched[0])
    reads, writes = code.ptx.rindex("ld.global"), code.ptx.index("st.global")
    assert "bar.sync" in code.ptx[reads:writes]
    assert code.spilled == 0
