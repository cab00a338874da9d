"""Asymmetric low-bit integers: rows of numbers as packed codes, a scale and a minimum per group of channels."""

from __future__ import annotations

from typing import NamedTuple

import torch

BITS = (2, 4, 8)
# Less than fp32's largest number by more than the rounding of a product and a sum.
ROUNDING = 1 - 2.0**-22
FP32_LIMIT = torch.finfo(torch.float32).max * ROUNDING


class PackedRows(NamedTuple):
    """Rows ``[..., D]`` of `bits` each in groups of `group` channels.

    codes : uint8 ``[..., D * bits / 8]``; channel ``d`` is in byte ``d // (8 / bits)``, the first of a byte lowest.
    scale, minimum : ``[..., D / group]``, of the dtype of the rows.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


def check_layout(head_dim: int, bits: int, group: int) -> None:
    """Raise ValueError unless rows of `head_dim` channels can be stored so."""
    if bits not in BITS:
        raise ValueError(f"codes of {bits} bits are not supported; use {', '.join(map(str, BITS))}")
    if group < 1 or head_dim < 1 or head_dim % group != 0:
        raise ValueError(f"a head of {head_dim} channels cannot be divided into groups of {group}; use a divisor of it")
    if group * bits % 8 != 0:
        raise ValueError(f"a group of {group} codes of {bits} bits does not fill whole bytes")


def pack_rows(rows: torch.Tensor, bits: int, group: int) -> PackedRows:
    """The nearest code of each number: ``x ≈ minimum + scale * code``, with codes from 0 to ``2^bits - 1``.

    The minimum of a group is a number of the group, so it is exact in the dtype of the rows, whatever their size; a
    group of equal numbers is therefore exact. The scale is rounded up to that dtype, and codes are of the scale as
    stored, so no error is larger than half of it, but for one case: where the nearest code stands for more than the
    largest number of the dtype the one below it is taken, so that finite rows are finite when unpacked.

    Parameters
    ----------
    rows : ``[..., D]``
        fp32, fp16 or bf16, not changed; computed in fp32. Of a group that holds a NaN or an infinity, or that spans
        more than fp32 can hold, every number is NaN or infinite when unpacked: nothing is clipped. Nothing is checked,
        because that would wait for the device.
    bits, group : see :func:`check_layout`
    """
    *outer, head_dim = rows.shape
    levels = 2**bits - 1
    groups = rows.reshape(*outer, head_dim // group, group).float().contiguous()
    # Two reductions of fp32 take a fifth of the time of one `aminmax` on a CPU.
    minimum, maximum = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = _rounded_up((maximum - minimum) / levels, rows.dtype)
    positive = scale.float()
    room = (torch.finfo(rows.dtype).max * ROUNDING - minimum).clamp_(max=FP32_LIMIT)
    highest = (room / positive).floor_().clamp_(0, levels)
    codes = (groups - minimum).div_(positive).round_()
    # To integers of 32 bits first: a CPU takes longer for the direct way, and says nothing of what NaN becomes.
    codes = torch.minimum(codes, highest, out=codes).to(torch.int32).to(torch.uint8)
    packed = _pack(codes.view(*outer, head_dim), bits)
    return PackedRows(packed, scale.squeeze(-1), minimum.squeeze(-1).to(rows.dtype))


def unpack_rows(packed: PackedRows, bits: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`dtype` ``[..., D]``, computed in fp32: the numbers that :func:`pack_rows` stored."""
    codes, groups = _unpack(packed.codes, bits), packed.scale.shape[-1]
    numbers = codes.view(*codes.shape[:-1], groups, codes.shape[-1] // groups).float()
    numbers = numbers.mul_(packed.scale.float().unsqueeze(-1)).add_(packed.minimum.float().unsqueeze(-1))
    return numbers.flatten(-2).to(dtype)


def _rounded_up(step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A number of `dtype` that is not less than `step`, in fp32, and positive.

    With half a unit in the last place more, the nearest number of `dtype` is none below `step`; among numbers too small
    to be normal that takes one smallest number more. In fp32 the rounding of one operation remains.
    """
    limits = torch.finfo(dtype)
    # And normal in fp32: some devices take what is not for 0.
    smallest = max(limits.tiny * limits.eps, torch.finfo(torch.float32).tiny)
    return (step * (1 + limits.eps / 2) + smallest).to(dtype)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[..., D]``, one code a byte, to ``[..., D * bits / 8]``; integers are little-endian."""
    if bits == 8:
        return codes
    if bits == 4:
        pairs = codes.view(torch.int16)
        return (pairs | pairs >> 4).to(torch.uint8)
    fours = codes.view(torch.int32)
    fours = fours | fours >> 6
    return (fours | fours >> 12).to(torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The opposite of :func:`_pack`: integers of as many bytes as a byte has codes, read as bytes."""
    if bits == 8:
        return packed
    if bits == 4:
        pairs = packed.to(torch.int16, memory_format=torch.contiguous_format)
        return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    fours = packed.to(torch.int32, memory_format=torch.contiguous_format)
    fours = fours | fours << 12
    return (fours | fours << 6).bitwise_and_(0x03030303).view(torch.uint8)
