"""Codes of fewer levels against their definition, one code at a time, and against the codec of fewer bits."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.coarser_codes import coarsen_rows, coarser_codes
from kvpolicy.kernels.pack_rows import pack_rows, unpack_rows
from kvpolicy.kernels.packed_buffer import PackedBuffer

every_pair = pytest.mark.parametrize(("bits", "to"), [(8, 4), (8, 2), (4, 2)])


def nearest(byte: int, bits: int, to: int) -> int:
    """Each code of a byte to the nearest of 2^to numbers that are evenly spaced from none to all of 2^bits - 1."""
    levels = [i * (2**bits - 1) / (2**to - 1) for i in range(2**to)]
    result = 0
    for shift in range(0, 8, bits):
        code = byte >> shift & (2**bits - 1)
        level = min(levels, key=lambda level: abs(level - code))
        assert level == int(level)
        result |= int(level) << shift
    return result


@every_pair
def test_every_byte_has_the_nearest_levels(bits: int, to: int) -> None:
    found = coarser_codes(torch.arange(256).to(torch.uint8).view(2, 128), bits, to)
    assert found.dtype == torch.uint8
    assert found.flatten().tolist() == [nearest(byte, bits, to) for byte in range(256)]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_fewer_levels_change_nothing_and_a_second_time_neither(bits: int) -> None:
    codes = torch.arange(256).to(torch.uint8)
    for to in (2, 4, 8):
        once = coarser_codes(codes, bits, to)
        assert torch.equal(once, codes) == (to >= bits)
        assert torch.equal(coarser_codes(once, bits, to), once)


@every_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_what_the_codec_of_fewer_bits_makes(bits: int, to: int, dtype: torch.dtype) -> None:
    """Of rows that were unpacked, up to the scale, which each codec rounds up to the dtype for itself."""
    generator = torch.Generator().manual_seed(bits * to)
    packed = pack_rows(torch.randn(500, 64, generator=generator).to(dtype), bits, 16)
    coarse = packed._replace(codes=coarser_codes(packed.codes, bits, to))
    again = pack_rows(unpack_rows(packed, bits, dtype), to, 16)
    found, wanted = unpack_rows(coarse, bits), unpack_rows(again, to)
    span = (packed.scale.float() * (2**bits - 1)).repeat_interleave(16, dim=-1)
    rounding = torch.finfo(dtype).eps * span
    same = (found - wanted).abs() <= 2 * rounding
    # A number halfway between two levels may fall either way: then both are as near to it.
    numbers = unpack_rows(packed, bits)
    tie = ((found - numbers).abs() - (wanted - numbers).abs()).abs() <= 4 * rounding
    assert bool((same | tie).all())
    assert float(same.float().mean()) > 0.97


def test_rows_of_a_buffer_per_head_and_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, heads, head_dim = 11, 3, 32
    packed = pack_rows(torch.randn(slots, heads, head_dim, generator=generator), 8, 16)
    buffer = PackedBuffer(packed.codes.clone(), packed.scale, packed.minimum, 8, 16)
    places = torch.tensor([7, 2, 10, 0])
    bits = torch.tensor([[8, 4, 2, 2], [2, 2, 8, 4], [8, 8, 8, 8]]).to(torch.uint8)
    coarsen_rows(buffer, places, bits)
    wanted = packed.codes.clone()
    for head in range(heads):
        for place, slot in enumerate(places.tolist()):
            to = int(bits[head, place])
            if to < 8:
                row = [nearest(byte, 8, to) for byte in packed.codes[slot, head].tolist()]
                wanted[slot, head] = torch.tensor(row, dtype=torch.uint8)
    assert torch.equal(buffer.codes, wanted)
    assert not torch.equal(wanted, packed.codes)


def test_the_shape_of_the_bits_is_checked() -> None:
    packed = pack_rows(torch.zeros(4, 2, 16), 4, 16)
    with pytest.raises(AssertionError, match="shape"):
        coarsen_rows(PackedBuffer(*packed, 4, 16), torch.tensor([1, 2]), torch.full((2, 3), 2, dtype=torch.uint8))
