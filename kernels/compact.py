"""Read tokens out of the paged buffers of one request, and move its kept ones into their destination slots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvpolicy.kernels.packed_buffer import Buffer, PackedBuffer
from kvpolicy.kernels.unpack_rows_paged import unpack_rows_paged

WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


def gather_layers(buffers: Sequence[Buffer], slots: torch.Tensor) -> torch.Tensor:
    """Read whole tokens of several layers, every head the same ones.

    ``L`` buffers ``[S, H, D]`` and ``slots [N]`` to ``[L, H, N, D]``, in whose memory a token's heads
    lie next to each other.
    """
    rows = _empty_rows(buffers[0], len(buffers), slots)
    for buffer, tokens in zip(buffers, rows, strict=True):
        _read(buffer, slots, tokens)
    return rows.transpose(1, 2)


def _empty_rows(like: Buffer, layers: int, slots: torch.Tensor) -> torch.Tensor:
    _, heads, head_dim = like.shape
    return torch.empty(layers, len(slots), heads, head_dim, dtype=like.dtype, device=like.device)


def _read(buffer: Buffer, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Read the tokens in `slots` into `rows` (``[N, H, D]``, contiguous)."""
    if isinstance(buffer, PackedBuffer):
        # On a device `read` would wait for it.
        rows.copy_(unpack_rows_paged(buffer, slots) if slots.is_cuda else buffer.read(slots))
    else:
        torch.index_select(buffer.flatten(1), 0, slots, out=rows.flatten(1))


@dataclass(frozen=True)
class PagedTokens:
    """What :func:`gather_layers` copies, for those who look at one layer after the other: read when it is asked for.

    Nobody may write the buffers before the last look.
    """

    buffers: Sequence[Buffer]
    slots: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """``(L, H, N, D)``."""
        _, heads, head_dim = self.buffers[0].shape
        return torch.Size((len(self.buffers), heads, len(self.slots), head_dim))

    @property
    def device(self) -> torch.device:
        return self.slots.device

    def __iter__(self) -> Iterator[torch.Tensor]:
        """One layer after the other, ``[H, N, D]``; each is overwritten by the next."""
        (rows,) = _empty_rows(self.buffers[0], 1, self.slots)
        for buffer in self.buffers:
            _read(buffer, self.slots, rows)
            yield rows.transpose(0, 1)

    @cached_property
    def gathered(self) -> torch.Tensor:
        """A copy of all layers, ``[L, H, N, D]``; made once."""
        return gather_layers(self.buffers, self.slots)


def compact_reference(buffer: torch.Tensor, row: torch.Tensor, keep: torch.Tensor, destination: torch.Tensor) -> None:
    """The same move, one element at a time, from a copy of the buffer."""
    before = buffer.clone()
    for head in range(keep.shape[0]):
        for i in range(keep.shape[1]):
            buffer[destination[i], head] = before[row[keep[head, i]], head]


def compact(buffer: torch.Tensor, row: torch.Tensor, keep: torch.Tensor, destination: torch.Tensor) -> None:
    """Write the token that head ``h`` keeps at rank ``i`` into slot ``destination[i]``, in place.

    After the call slot ``destination[i]`` holds, for each head, that head's own ``i``-th kept token:
    a slot stops belonging to one token. Source and destination slots may overlap: all rows are read
    before the first is written.

    Parameters
    ----------
    buffer : ``[S, H, D]``
        One layer's key or value pool, written in place.
    row : ``[N]`` int64
        The request's slots, oldest token first.
    keep : ``[H, K]`` int64
        Per KV head, indices into ``row``.
    destination : ``[K]`` int64
        Distinct slots.
    """
    slots, heads, head_dim = buffer.shape
    assert len(keep) == heads, f"{keep.shape = } must be for {heads = }"
    assert destination.shape == keep.shape[1:], f"{destination.shape = } must be {keep.shape[1:]}"
    head_ids = torch.arange(heads, device=buffer.device)
    source = row[keep].T * heads + head_ids
    target = destination[:, None] * heads + head_ids
    rows = buffer.view(slots * heads, head_dim)  # one row per slot and head
    rows.index_copy_(0, target.flatten(), rows.index_select(0, source.flatten()))


def compact_layers(
    pools: Sequence[Sequence[torch.Tensor]], row: torch.Tensor, keep: torch.Tensor, destination: torch.Tensor
) -> None:
    """:func:`compact` for all layers of keys and values; waits for the device, so meant for CPUs.

    What does not depend on the layer or the pool is done once, and what is in its slot already is not touched.

    Parameters
    ----------
    pools : keys and values, or what else is stored per token and head: each of ``L`` buffers ``[S, H, *]``
        Widths and dtypes may differ from pool to pool.
    row, destination : as in :func:`compact`
    keep : ``[L, H, K]`` int64
    """
    layers, heads, n_keep = keep.shape
    for buffers in pools:
        assert len(buffers) == layers, f"{len(buffers) = } must be {layers = }"
        assert buffers[0].shape[1] == heads, f"{buffers[0].shape = } must have {heads = }"
    assert destination.shape == (n_keep,), f"{destination.shape = } must be {(n_keep,)}"
    head = torch.arange(heads, device=row.device)[:, None]
    source = (row * heads).index_select(0, keep.flatten()).view(keep.shape) + head  # rows of single heads
    target = destination * heads + head
    moved = source != target
    count = int(moved.count_nonzero())
    if count > moved.numel() // 2:
        _move_tokens(pools, source, destination, moved)
    elif count > 0:
        _move_rows(pools, source, target, moved)


def _move_rows(
    pools: Sequence[Sequence[torch.Tensor]], source: torch.Tensor, target: torch.Tensor, moved: torch.Tensor
) -> None:
    """Move the rows of single heads for which `moved` (``[L, H, K]``) is true."""
    counts = moved.sum(dim=(1, 2)).tolist()
    sources, targets = (torch.split(rows[moved], counts) for rows in (source, target.expand(moved.shape)))
    for buffers in pools:
        word = _longest_word(buffers, buffers[0].shape[2:].numel())
        for buffer, from_rows, to_rows in zip(buffers, sources, targets, strict=True):
            rows = buffer.flatten(0, 1)
            rows.view(word).index_put_((to_rows,), rows.index_select(0, from_rows).view(word))


def _move_tokens(
    pools: Sequence[Sequence[torch.Tensor]], source: torch.Tensor, destination: torch.Tensor, moved: torch.Tensor
) -> None:
    """Move whole tokens, from the first on that any layer or head moves: heads are read apart and written together."""
    first = int(moved.flatten(0, 1).any(dim=0).nonzero()[0])
    destination = destination[first:]
    sources = source[..., first:].transpose(1, 2).flatten(1)  # [L, K * H], token by token
    for buffers in pools:
        word = _longest_word(buffers, buffers[0].shape[1:].numel())
        kept = buffers[0].new_empty(sources.shape[1], buffers[0].shape[2])
        words = kept.view(len(destination), -1).view(word)
        for buffer, from_rows in zip(buffers, sources, strict=True):
            torch.index_select(buffer.flatten(0, 1), 0, from_rows, out=kept)
            buffer.flatten(1).view(word).index_put_((destination,), words)


def _longest_word(buffers: Sequence[torch.Tensor], width: int) -> torch.dtype:
    """What `width` numbers of these buffers can be cut into, so that few words have to be moved."""
    common = math.gcd(width * buffers[0].itemsize, *(buffer.storage_offset() * buffer.itemsize for buffer in buffers))
    return next(word for word in WORDS if common % word.itemsize == 0)
