"""Move the kept rows of several requests, in all layers, heads and pools at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from kvpolicy.kernels.paged import Pool, Rows

STAGE_BYTES = 256 * 2**20  # copied aside at a time, where rows cannot move in place
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # rows are moved as words of so many bytes


def compact_paged(pools: Sequence[Pool], rows: Rows, keep: torch.Tensor, destination: Rows, *, in_place: bool) -> None:
    """Write the token that head ``h`` of a request keeps at rank ``i`` into the ``i``-th slot of its destination.

    What :func:`kvpolicy.kernels.compact.compact` does for one request and buffer, bit for bit in any dtype, in one
    launch for all pools whose rows have as many bytes, or two where rows are staged. Nothing waits for the device.

    Parameters
    ----------
    pools : ``[S, H, D]`` buffers of ``L`` layers each
        Keys, values and whatever else is stored per token and head; D and dtype may differ from pool to pool.
    rows : the slots of the requests, oldest token first
    keep : ``[L, H, K]`` int64
        Per layer and head, indices into each request's own row; K counts the kept tokens of all requests, one request
        after the other.
    destination : as many slots of each request as it keeps tokens
        Distinct. They may be slots of its own row in any order, or of any other row's if rows are staged.
    in_place : bool
        The caller's word that each request's destination is the beginning of its own row (``destination ==
        row[:n_keep]``), as at every eviction but a request's first, and that its `keep` ascends or comes from
        :func:`kvpolicy.kernels.fill_places.fill_places`. Moved tile after tile, no row is then written before it was
        read, and rows that stay are left alone. It is not checked: that would wait for the device. False is right
        always, and costs twice the traffic: rows are staged, that is, first copied aside, those of all requests in as
        many layers at a time as fit into `STAGE_BYTES`, then into their slots.
    """
    layers, slots, heads, _ = pools[0].shape
    for pool in pools:
        found, wanted = (*pool.shape[:3], pool.device), (layers, slots, heads, keep.device)
        assert found == wanted, f"layers, slots, heads and device of a pool are {found}, must be {wanted}"
    expected = (layers, heads, destination.total)
    assert keep.shape == expected, f"{keep.shape = } must be {expected}"
    dtypes = {index.dtype for index in (keep, rows.slots, destination.slots)}
    assert dtypes == {torch.int64}, f"indices and slots are {dtypes}, must be int64"
    assert len(rows.lengths) == len(destination.lengths), f"{rows.lengths = } must fit {destination.lengths = }"
    for resident, kept in zip(rows.lengths, destination.lengths, strict=True):
        assert kept <= resident, f"{kept = } must be at most {resident = }"
    if destination.total == 0:
        return
    keep = keep if keep.stride(-1) == 1 else keep.contiguous()
    groups: dict[int, list[Pool]] = {}
    for pool in pools:
        groups.setdefault(pool.shape[-1] * pool.dtype.itemsize, []).append(pool)
    for row_bytes, group in groups.items():
        _move(group, row_bytes, rows, keep, destination, in_place)


def _move(group: list[Pool], row_bytes: int, rows: Rows, keep: torch.Tensor, destination: Rows, in_place: bool) -> None:
    """Move all buffers whose rows have `row_bytes`."""
    from kvpolicy.kernels import compact_paged_kernel  # needs Triton, which importing this file does not

    table = group[0].addresses if len(group) == 1 else torch.cat([pool.addresses for pool in group])
    alignment = math.gcd(16, *(buffer.data_ptr() for pool in group for buffer in pool.buffers))
    word = WORDS[math.gcd(8, row_bytes, alignment)]
    heads, tokens, width = keep.shape[1], keep.shape[2], row_bytes // word.itemsize
    launch = functools.partial(compact_paged_kernel.launch, width=width, alignment=alignment)
    if in_place:
        launch(table, 0, rows, keep, destination, table.new_empty(0, dtype=word), read=True, write=True)
        return
    step = min(len(table), max(1, STAGE_BYTES // (heads * tokens * row_bytes)))
    stage = table.new_empty((step, heads, tokens, width), dtype=word)
    for first in range(0, len(table), step):
        part = stage[: len(table) - first]
        launch(table, first, rows, keep, destination, part, read=True, write=False)
        launch(table, first, rows, keep, destination, part, read=False, write=True)
