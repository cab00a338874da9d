"""Packed rows against their definition: the nearest of all codes, in the byte where it belongs, read back by loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy.kernels.pack_rows import PackedRows, check_layout, pack_rows, unpack_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
every_bits = pytest.mark.parametrize("bits", [2, 4, 8])
LAYOUTS = [(d, g) for d in (64, 80, 96, 128) for g in sorted({16, 32, 64, d}) if d % g == 0]
layouts = pytest.mark.parametrize(("head_dim", "group"), LAYOUTS)
LARGEST = {dtype: torch.finfo(dtype).max for dtype in DTYPES}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}  # of what a scale can be
FP32 = 2.0**-23  # relative; rounding of a few operations


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, size: float = 3.0) -> torch.Tensor:
    """Gaussian around another mean in each row, so that few groups have 0 in their middle."""
    generator = torch.Generator().manual_seed(shape[-1])
    rows = torch.randn(shape, generator=generator) + torch.randn((*shape[:-1], 1), generator=generator)
    return (rows * size).to(dtype)


def codes_by_loops(packed: PackedRows, bits: int) -> list[list[int]]:
    """Per row its codes, taken out of the bytes one by one, lowest first."""
    rows = packed.codes.flatten(0, -2).tolist()
    return [[byte >> shift & (2**bits - 1) for byte in row for shift in range(0, 8, bits)] for row in rows]


def assert_packed(rows: torch.Tensor, packed: PackedRows, bits: int, group: int, *, half: float = 0.5) -> None:
    """By the definition, in Python's numbers: exact minimum, least scale that reaches, and no code that is nearer.

    half : the largest error that is allowed, in scales
    """
    head_dim, dtype = rows.shape[-1], rows.dtype
    assert packed.codes.dtype == torch.uint8
    assert packed.codes.shape == (*rows.shape[:-1], head_dim * bits // 8)
    assert packed.scale.shape == packed.minimum.shape == (*rows.shape[:-1], head_dim // group)
    assert packed.scale.dtype == packed.minimum.dtype == dtype
    scales, minima = (x.flatten(0, -2).double().tolist() for x in (packed.scale, packed.minimum))
    levels, ulp = 2**bits - 1, torch.finfo(dtype).eps
    numbers = rows.flatten(0, -2).double().tolist()
    restored = unpack_rows(packed, bits).flatten(0, -2).double().tolist()
    for row, codes, scale_of, minimum_of, seen in zip(
        numbers, codes_by_loops(packed, bits), scales, minima, restored, strict=True
    ):
        for i in range(0, head_dim, group):
            members = row[i : i + group]
            scale, minimum = scale_of[i // group], minimum_of[i // group]
            assert minimum == min(members)
            step = (max(members) - min(members)) / levels
            assert step * (1 - 2 * FP32) <= scale <= step * (1 + 2 * ulp) + 2 * SMALLEST[dtype]
            for x, code, y in zip(members, codes[i : i + group], seen[i : i + group], strict=True):
                value = minimum + scale * code
                rounding = 4 * FP32 * (abs(minimum) + max(members) - minimum)
                assert abs(value - x) <= half * scale + rounding
                if half == 0.5:
                    assert abs(value - x) <= min(abs(minimum + scale * k - x) for k in range(levels + 1)) + rounding
                assert abs(y - value) <= rounding


@dtypes
@every_bits
@layouts
def test_every_number_has_its_nearest_code(head_dim: int, group: int, bits: int, dtype: torch.dtype) -> None:
    rows = random_rows((2, 2, head_dim), dtype)
    untouched = rows.clone()
    assert_packed(rows, pack_rows(rows, bits, group), bits, group)
    assert torch.equal(rows, untouched)


@pytest.mark.parametrize(
    ("bits", "row", "expected"),
    [
        pytest.param(2, [0, 1, 2, 3, 3, 0, 0, 1], [0b11100100, 0b01000011], id="four in a byte"),
        pytest.param(4, [0, 15, 2, 7], [0xF0, 0x72], id="two in a byte"),
        pytest.param(8, [0, 255, 3], [0, 255, 3], id="one in a byte"),
    ],
)
@dtypes
def test_the_first_channel_of_a_byte_is_lowest(
    bits: int, row: list[int], expected: list[int], dtype: torch.dtype
) -> None:
    rows = torch.tensor(row, dtype=dtype) - 1
    packed = pack_rows(rows, bits, len(row))
    assert packed.codes.tolist() == expected
    assert packed.minimum.tolist() == [-1]
    assert packed.scale.tolist() == [1]
    assert torch.equal(unpack_rows(packed, bits), rows.float())


@dtypes
@every_bits
@pytest.mark.parametrize("size", [1e-3, 1e-5, 6e-8, 1e-30, 1e-39, 1e4, 3e37])
def test_an_error_is_at_most_half_a_scale_at_any_size(size: float, bits: int, dtype: torch.dtype) -> None:
    """Scales of fp16 rows as small as these are no normal numbers, and the nearest may be far below."""
    rows = random_rows((1, 3, 64), torch.float32, size).clamp(-LARGEST[dtype] / 4, LARGEST[dtype] / 4).to(dtype)
    assert_packed(rows, pack_rows(rows, bits, 32), bits, 32)


@dtypes
@every_bits
def test_a_number_far_from_the_others_costs_its_own_group_only(bits: int, dtype: torch.dtype) -> None:
    rows = random_rows((5, 96), dtype)
    plain = unpack_rows(pack_rows(rows, bits, 32), bits)
    rows[:, 40] = 3000
    packed = pack_rows(rows, bits, 32)
    assert_packed(rows, packed, bits, 32)
    outlying = unpack_rows(packed, bits)
    assert torch.equal(outlying[:, :32], plain[:, :32])
    assert torch.equal(outlying[:, 64:], plain[:, 64:])
    assert (packed.scale[:, 1] > 50 * packed.scale[:, [0, 2]].amax(dim=1)).all()


@dtypes
@every_bits
def test_equal_numbers_are_exact(bits: int, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    of_group = torch.tensor(
        [0.0, -0.0, 1 / 3, -7.1, limits.max, limits.min, limits.tiny, limits.smallest_normal * limits.eps], dtype=dtype
    )
    rows = of_group.repeat_interleave(16).view(2, 64)
    packed = pack_rows(rows, bits, 16)
    assert int(packed.codes.max()) == 0
    assert torch.equal(unpack_rows(packed, bits, dtype), rows)


@every_bits
@pytest.mark.parametrize("group", [16, 64])
def test_both_ends_of_fp16_in_one_group(bits: int, group: int) -> None:
    rows = random_rows((3, 64), torch.float16, 1e4).clamp(-60000, 60000)
    rows[:, 3], rows[:, 7] = 65504, -65504
    packed = pack_rows(rows, bits, group)
    # Some code may lead beyond the largest number by itself: then the one below is taken.
    assert_packed(rows, packed, bits, group, half=1)
    assert unpack_rows(packed, bits, torch.float16).isfinite().all()


@dtypes
@every_bits
@pytest.mark.parametrize("lowest", [0.0, 0.1, 0.9, 0.999, 1 - 2.0**-23, 1.0, -0.01, -0.4, -0.9, -1.0])
def test_numbers_next_to_the_largest_stay_finite(lowest: float, bits: int, dtype: torch.dtype) -> None:
    """Scales are rounded up, so the highest code may stand for more than the dtype holds."""
    largest = LARGEST[dtype]
    if lowest < 0 and dtype != torch.float16:  # more than fp32 holds is another test
        largest /= 1 - lowest
    share = torch.linspace(lowest, 1, 64, dtype=torch.float64)
    rows = (share * largest).to(dtype).expand(2, 64)
    packed = pack_rows(rows, bits, 64)
    assert_packed(rows, packed, bits, 64, half=1)
    for seen in (unpack_rows(packed, bits), unpack_rows(packed, bits, dtype)):
        assert seen.isfinite().all()


@every_bits
def test_a_minimum_within_rounding_of_the_largest_number_stands_for_its_group(bits: int) -> None:
    rows = torch.full((1, 32), LARGEST[torch.float32])
    rows[0, ::2] *= 1 - 2.0**-23
    packed = pack_rows(rows, bits, 32)
    assert not packed.codes.any()
    assert torch.equal(unpack_rows(packed, bits), rows[:, :1].expand(1, 32))


@dtypes
@every_bits
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([math.nan], id="a NaN"),
        pytest.param([math.inf], id="an infinity"),
        pytest.param([-math.inf], id="a negative infinity"),
        pytest.param([math.inf, -math.inf], id="both infinities"),
        pytest.param([math.inf] * 32, id="nothing else"),
        pytest.param([-math.inf] * 32, id="nothing but the negative one"),
        pytest.param([math.inf, math.nan], id="both"),
    ],
)
def test_what_is_no_number_spoils_its_whole_group_and_no_other(bad: list[float], bits: int, dtype: torch.dtype) -> None:
    rows = random_rows((2, 3, 96), dtype)
    good = unpack_rows(pack_rows(rows, bits, 32), bits)
    rows[1, 2, 32 : 32 + len(bad)] = torch.tensor(bad, dtype=dtype)
    expected = torch.ones(2, 3, 96, dtype=torch.bool)
    expected[1, 2, 32:64] = False
    for read in (torch.float32, dtype):
        seen = unpack_rows(pack_rows(rows, bits, 32), bits, read)
        assert torch.equal(seen.isfinite(), expected)
        assert torch.equal(seen[expected], good.to(read)[expected])


@every_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_group_that_spans_more_than_fp32_holds_is_spoilt(bits: int, dtype: torch.dtype) -> None:
    rows = torch.zeros(2, 64, dtype=dtype)
    rows[0, :2] = torch.tensor([-3e38, 3e38])
    seen = unpack_rows(pack_rows(rows, bits, 32), bits)
    assert not seen[0, :32].isfinite().any()
    assert torch.equal(seen[0, 32:], torch.zeros(32))
    assert torch.equal(seen[1], torch.zeros(64))


@dtypes
@every_bits
def test_strides_do_not_matter(bits: int, dtype: torch.dtype) -> None:
    pool = random_rows((21, 3, 80), dtype)
    by_head = pool.transpose(0, 1)[:, ::2]
    channels_first = random_rows((2, 80, 9), dtype).transpose(1, 2)
    for view in (by_head, channels_first):
        assert not view.is_contiguous()
        for mine, expected in zip(pack_rows(view, bits, 16), pack_rows(view.contiguous(), bits, 16), strict=True):
            assert torch.equal(mine, expected)
    packed = pack_rows(pool, bits, 16)
    spread = [torch.stack([x, x], dim=-1)[..., 0] for x in packed]
    channels_first = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in packed]
    for moved in (spread, channels_first):
        assert not any(x.is_contiguous() for x in moved)
        assert torch.equal(unpack_rows(PackedRows(*moved), bits), unpack_rows(packed, bits))


@dtypes
@every_bits
def test_a_shorter_dtype_is_what_fp32_is_rounded_to(bits: int, dtype: torch.dtype) -> None:
    packed = pack_rows(random_rows((4, 2, 64), dtype), bits, 32)
    assert unpack_rows(packed, bits).dtype == torch.float32
    assert torch.equal(unpack_rows(packed, bits, dtype), unpack_rows(packed, bits).to(dtype))


@every_bits
@pytest.mark.parametrize("shape", [(64,), (0, 3, 64), (1, 1, 1, 64)], ids=["one bare row", "none", "leading ones"])
def test_any_number_of_rows(shape: tuple[int, ...], bits: int) -> None:
    rows = random_rows((*shape[:-1], 64), torch.float32)
    seen = unpack_rows(pack_rows(rows, bits, 32), bits)
    assert seen.shape == shape
    by_row = [unpack_rows(pack_rows(row, bits, 32), bits) for row in rows.view(-1, 64)]
    assert torch.equal(seen.view(-1, 64), torch.stack(by_row) if by_row else torch.empty(0, 64))


@every_bits
@layouts
def test_layouts_that_fit(head_dim: int, group: int, bits: int) -> None:
    check_layout(head_dim, bits, group)


@pytest.mark.parametrize(
    ("head_dim", "bits", "group", "message"),
    [
        pytest.param(64, 3, 32, "3 bits are not supported; use 2, 4, 8", id="3 bits"),
        pytest.param(64, 16, 32, "16 bits are not supported", id="16 bits"),
        pytest.param(80, 4, 64, "a head of 80 channels cannot be divided into groups of 64", id="no divisor"),
        pytest.param(64, 4, 128, "cannot be divided into groups of 128", id="larger than the head"),
        pytest.param(64, 4, 0, "cannot be divided into groups of 0", id="no group"),
        pytest.param(64, 4, -16, "cannot be divided into groups of -16", id="negative"),
        pytest.param(0, 4, 1, "a head of 0 channels", id="no channel"),
        pytest.param(64, 2, 2, "a group of 2 codes of 2 bits does not fill whole bytes", id="half a byte"),
        pytest.param(63, 4, 21, "a group of 21 codes of 4 bits does not fill", id="an odd group"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(head_dim: int, bits: int, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(head_dim, bits, group)
