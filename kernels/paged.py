"""How a kernel finds the rows of several requests in the paged buffers of all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pool:
    """One kind of buffer, keys or values, of all layers of a process.

    buffers : ``L`` tensors ``[S, H, D]`` of one shape, dtype and device, contiguous.
    addresses : int64 ``[L]`` on their device, where each begins.
    """

    buffers: tuple[torch.Tensor, ...]
    addresses: torch.Tensor

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> Pool:
        """The pool of these buffers, which must not be moved or freed while it is used."""
        first = buffers[0]
        for buffer in buffers:
            assert buffer.dim() == 3, f"{buffer.shape = } must be [S, H, D]"
            assert buffer.is_contiguous(), f"{buffer.stride() = } must be those of a contiguous buffer"
            found, wanted = (buffer.shape, buffer.dtype, buffer.device), (first.shape, first.dtype, first.device)
            assert found == wanted, f"{found = } must be {wanted = } in all layers"
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
        return cls(tuple(buffers), addresses.to(first.device))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(L, S, H, D)``."""
        slots, heads, head_dim = self.buffers[0].shape
        return len(self.buffers), slots, heads, head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers[0].dtype

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device


@dataclass(frozen=True)
class Rows:
    """The slots of ``R`` requests one after the other, each request's oldest token first.

    slots : int64 ``[T]``, on the device of the pool.
    lengths : tokens of each request, at least 0 (on the host: no kernel has to be waited for).
    starts : int64 ``[R + 1]`` on the device, where each request begins; ``T`` at the end.
    """

    slots: torch.Tensor
    lengths: tuple[int, ...]
    starts: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> Rows:
        """From one int64 tensor of slots per request; no wait for the device."""
        lengths = tuple(len(row) for row in rows)
        return cls(torch.cat(list(rows)), lengths, starts_of(lengths, rows[0].device))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


def starts_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 ``[R + 1]``: where each of so many consecutive stretches begins, and the end of the last."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device, non_blocking=True)
