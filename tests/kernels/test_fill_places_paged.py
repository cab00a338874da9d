"""Kept tokens of several requests in their places in one launch, against one place after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from kvpolicy.kernels import fill_places_paged as op
from kvpolicy.kernels.fill_places_paged import fill_places_paged, fill_places_paged_reference
from kvpolicy.kernels.paged import Rows

ON_GPUS = (op.BLOCK, op.WARPS)
LAYERS, HEADS = 2, 3
# (resident, kept): in tiles of 64 none, one place, less than one, one, one place more, several; all kept, most gone.
SEVERAL = [(63, 40), (0, 0), (1, 1), (64, 64), (80, 65), (17, 0), (300, 190), (111, 7)]


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "BLOCK", 64)
    monkeypatch.setattr(op, "WARPS", 1)


def case(device: torch.device, sizes: list[tuple[int, int]]) -> tuple[torch.Tensor, Rows]:
    generator = torch.Generator().manual_seed(len(sizes))
    keep = [
        torch.rand(LAYERS, HEADS, tokens, generator=generator).topk(kept).indices.sort(dim=-1).values
        for tokens, kept in sizes
    ]
    return torch.cat(keep, dim=-1).to(device), Rows.of([torch.arange(kept, device=device) for _, kept in sizes])


@pytest.mark.parametrize("sizes", [[(63, 40)], [(1, 1)], [(1030, 1025)], SEVERAL], ids=["one", "1", "1025", "several"])
def test_every_request_equals_the_reference(device: torch.device, sizes: list[tuple[int, int]]) -> None:
    keep, destination = case(device, sizes)
    before = keep.clone()
    assert torch.equal(fill_places_paged(keep, destination), fill_places_paged_reference(keep, destination))
    assert torch.equal(keep, before)


def test_with_the_tiles_of_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "BLOCK", ON_GPUS[0])
    monkeypatch.setattr(op, "WARPS", ON_GPUS[1])
    keep, destination = case(device, [*SEVERAL, (1100, 1029)])
    assert torch.equal(fill_places_paged(keep, destination), fill_places_paged_reference(keep, destination))


def test_all_requests_share_one_launch(device: torch.device, launches: Counter[str]) -> None:
    fill_places_paged(*case(device, SEVERAL))
    assert dict(launches) == {"_fill_places_kernel": 1}


def test_nothing_is_launched_where_nothing_is_kept(device: torch.device, launches: Counter[str]) -> None:
    assert fill_places_paged(*case(device, [(5, 0), (0, 0)])).shape == (LAYERS, HEADS, 0)
    assert not launches


@pytest.mark.parametrize(
    "strided",
    [
        pytest.param(lambda keep: keep[:1, :1].expand(LAYERS, HEADS, -1), id="one choice for all heads"),
        pytest.param(lambda keep: keep.transpose(0, 1).contiguous().transpose(0, 1), id="layers within heads"),
        pytest.param(lambda keep: keep.mT.contiguous().mT, id="heads within tokens"),
    ],
)
def test_choices_may_lie_in_any_strides(device: torch.device, strided: Callable[[torch.Tensor], torch.Tensor]) -> None:
    keep, destination = case(device, SEVERAL)
    keep = strided(keep)
    expected = fill_places_paged_reference(keep.contiguous(), destination)
    assert torch.equal(fill_places_paged(keep, destination), expected)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        pytest.param(torch.zeros(2, 3, 40, dtype=torch.int32), "must be int64", id="dtype"),
        pytest.param(torch.zeros(2, 3, 41, dtype=torch.int64), "must have destination.total = 40", id="tokens"),
    ],
)
def test_what_does_not_fit_is_a_programming_error(keep: torch.Tensor, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        fill_places_paged(keep, Rows.of([torch.arange(40)]))
