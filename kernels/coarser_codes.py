"""Fewer levels for codes that are stored already: rows of a packed buffer as if they had been packed in fewer bits."""

from __future__ import annotations

import functools

import torch

from kvpolicy.kernels.pack_rows import BITS
from kvpolicy.kernels.packed_buffer import PackedBuffer


def coarser_codes(codes: torch.Tensor, bits: int, to: int) -> torch.Tensor:
    """The nearest of ``2^to`` levels for each code of `bits` bits; both stand for the same minimum and maximum.

    ``2^to`` levels that are evenly spaced from 0 to ``2^bits - 1`` are codes themselves, a multiple of 5, 17 or 85
    apart: an odd number, so there are no ties. A group of such codes with the scale and the minimum as stored is what
    the codec of `to` bits would make of its numbers, but for the rounding of the scale.

    Parameters
    ----------
    codes : uint8, as :class:`PackedRows` has them, ``8 / bits`` a byte
    bits, to : of `BITS`; with `to` not below `bits` nothing changes
    """
    assert codes.dtype == torch.uint8, f"{codes.dtype = } must be uint8"
    return codes if to >= bits else _table(bits, to).to(codes.device)[codes.int()]


@functools.cache
def _table(bits: int, to: int) -> torch.Tensor:
    """uint8 ``[256]``: what becomes of each byte."""
    assert {bits, to} <= {*BITS}, f"{bits = } and {to = } must be of {BITS}"
    step = (2**bits - 1) // (2**to - 1)
    shifts = torch.arange(0, 8, bits)
    codes = torch.arange(256)[:, None] >> shifts & 2**bits - 1
    bytes_: torch.Tensor = ((codes + step // 2) // step * step << shifts).sum(dim=1)
    return bytes_.to(torch.uint8)


def coarsen_rows(buffer: PackedBuffer, slots: torch.Tensor, bits: torch.Tensor) -> None:
    """Leave the rows in `slots` as many levels as `bits` says, in place; waits for the device.

    Parameters
    ----------
    slots : int64 ``[K]``, distinct
    bits : uint8 ``[H, K]``, of `BITS`, per KV head; those of the buffer or more leave a row as it is
    """
    heads, width = buffer.codes.shape[1:]
    assert bits.shape == (heads, len(slots)), f"{bits.shape = } must be {(heads, len(slots))}"
    rows = buffer.codes.view(-1, width)
    for to in BITS:
        if to < buffer.bits:
            head, place = (bits == to).nonzero(as_tuple=True)
            numbers = slots[place] * heads + head
            rows[numbers] = coarser_codes(rows[numbers], buffer.bits, to)
