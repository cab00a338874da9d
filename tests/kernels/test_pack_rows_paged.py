"""Rows that the kernel packs into their slots against those that PyTorch does, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvpolicy.kernels.pack_rows_paged import pack_rows_paged
from kvpolicy.kernels.packed_buffer import PackedBuffer
from tests.kernels.bf16_rounding import bf16_is_rounded  # noqa: F401
from tests.kernels.compiling import machine_code
from tests.kernels.far_slots import far_buffer
from tests.kernels.interpreting import interpreted
from tests.kernels.packed_cases import DTYPES, LAYOUTS, empty_buffer, on, random_buffer

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "D={} bits={} group={}".format(*layout))


def buffer_with_index(
    slots: int, heads: int, layout: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
) -> PackedBuffer:
    """Nothing written yet; a third of the slots and heads have a protected row."""
    buffer = empty_buffer(slots, heads, layout, dtype, rows=slots)
    assert buffer.index is not None
    generator = torch.Generator().manual_seed(seed)
    for head in range(heads):
        those, numbers = (torch.randperm(slots, generator=generator)[: slots // 3] for _ in range(2))
        buffer.index[those, head] = numbers.int()
    return buffer


def assert_writes_the_same(buffer: PackedBuffer, slots: torch.Tensor, rows: torch.Tensor, device: torch.device) -> None:
    """As :meth:`PackedBuffer.write` but for the spare row, which the kernel has no use for."""
    expected, found = on(buffer, torch.device("cpu")), on(buffer, device)
    pack_rows_paged(found, slots.to(device), rows.to(device))
    kept = slots >= 0
    expected.write(slots[kept], rows[kept])
    if expected.rows is not None and buffer.rows is not None:
        expected.rows[-1] = buffer.rows[-1]
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


@dtypes
@layouts
@pytest.mark.parametrize("protects", [False, True])
def test_one_launch_writes_the_slots(
    layout: tuple[int, int, int], dtype: torch.dtype, protects: bool, device: torch.device, launches: Counter[str]
) -> None:
    generator = torch.Generator().manual_seed(layout[0])
    slots = torch.randperm(60, generator=generator)[:37]
    sizes = torch.tensor([1e-30, 1e-3, 1, 100, 30000])[torch.randint(5, (37, 3, 1), generator=generator)]
    rows = (torch.randn(37, 3, layout[0], generator=generator).clamp(-2, 2) * sizes).to(dtype)
    new = buffer_with_index if protects else empty_buffer
    assert_writes_the_same(new(60, 3, layout, dtype), slots, rows, device)
    assert launches == {"_pack_rows_kernel": 1}


@dtypes
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_groups_that_are_all_alike_huge_tiny_or_no_numbers(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    limits, inf, nan = torch.finfo(dtype), torch.inf, torch.nan
    odd = [
        *[[3.0, 3.0], [0.0, 0.0], [-0.0, 0.0], [limits.max, limits.max], [limits.max, -limits.max], [limits.max, 0.0]],
        *[[limits.tiny, 0.0], [limits.tiny * limits.eps, 0.0], [-limits.tiny, limits.tiny], [limits.max, limits.tiny]],
        *[[inf, 0.0], [-inf, 0.0], [inf, -inf], [inf, inf], [nan, 0.0], [nan, nan], [nan, inf], [-inf, limits.max]],
    ]
    rows = torch.randn(len(odd), 1, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row, (first, second) in zip(rows[:, 0], odd, strict=True):
        row[16:32] = torch.tensor([first, second] * 8)
        row[70] = first
    assert_writes_the_same(empty_buffer(30, 1, (80, bits, 16), dtype), torch.arange(len(odd)), rows, device)


@dtypes
def test_halves_between_two_codes_go_to_the_even_one(dtype: torch.dtype, device: torch.device) -> None:
    # A scale of 1, but for its last place: 0 to 255 in steps of half a code.
    rows = torch.arange(0, 256, 0.5).view(4, 1, 128).to(dtype)
    rows[..., 0], rows[..., -1] = 0, 255
    assert_writes_the_same(empty_buffer(4, 1, (128, 8, 128), dtype), torch.arange(4), rows, device)


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize(("head_dim", "group"), [(1, 1), (60, 60), (256, 64), (256, 256), (6, 2)])
def test_ugly_sizes(head_dim: int, group: int, tokens: int, device: torch.device) -> None:
    rows = torch.randn(tokens, 1, head_dim, generator=torch.Generator().manual_seed(0)).half()
    buffer = buffer_with_index(tokens + 2, 1, (head_dim, 8, group), torch.float16)
    assert_writes_the_same(buffer, torch.arange(tokens).flip(0), rows, device)


def test_negative_slots_are_skipped(device: torch.device) -> None:
    rows = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([3, -1, 0, -1, -7, 8])
    assert_writes_the_same(buffer_with_index(9, 2, LAYOUTS[0], torch.float32), slots, rows, device)


@pytest.mark.parametrize("order", ["of tokens", "of channels"])
def test_rows_may_lie_apart(order: str, device: torch.device) -> None:
    qkv = torch.randn(7, 5 * 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = qkv[:, 2 * 64 : 4 * 64].view(7, 2, 64)
    if order == "of channels":
        rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    buffer = buffer_with_index(9, 2, LAYOUTS[0], torch.bfloat16)
    found = on(buffer, device)
    view = rows.to(device)
    assert not view.is_contiguous()
    pack_rows_paged(found, torch.arange(7, device=device), view)
    expected = on(buffer, device)
    pack_rows_paged(expected, torch.arange(7, device=device), view.contiguous())
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert_writes_the_same(buffer, torch.arange(7), rows, device)


def test_slots_beyond_two_to_the_31_bytes(device: torch.device) -> None:
    codes = far_buffer(8, 128, device).view(torch.uint8).flatten()[: 2**31 + 2**16].view(-1, 8, 128)
    scale, minimum = torch.zeros(2, len(codes), 8, 1, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([len(codes) - 1, 5, len(codes) - 2], device=device)
    rows = torch.randn(3, 8, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    near = empty_buffer(3, 8, (128, 8, 128), torch.bfloat16)
    near.write(torch.arange(3), rows)
    pack_rows_paged(PackedBuffer(codes, scale, minimum, 8, 128), slots, rows.to(device))
    for one, other in zip((codes, scale, minimum), near.tensors, strict=True):
        assert torch.equal(one[slots].cpu(), other)


def test_protected_rows_beyond_two_to_the_31_elements(device: torch.device) -> None:
    far = far_buffer(8, 128, device)
    empty = on(empty_buffer(3, 8, (128, 8, 128), torch.bfloat16, rows=1), device)
    buffer = PackedBuffer(*empty.tensors[:3], 8, 128, torch.full_like(empty.tensors[3], len(far) - 2), far)
    rows = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    pack_rows_paged(buffer, torch.tensor([2], device=device), rows.to(device))
    assert torch.equal(far[-2].cpu(), rows[0])


def test_no_row_needs_no_launch(device: torch.device, launches: Counter[str]) -> None:
    buffer = on(random_buffer(torch.arange(4), 4, 2, LAYOUTS[0], torch.bfloat16), device)
    rows = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=device)
    pack_rows_paged(buffer, torch.empty(0, dtype=torch.int64, device=device), rows)
    assert launches == {}


def test_what_the_kernel_assumes_is_asserted() -> None:
    slots, rows = torch.arange(3), torch.zeros(3, 2, 96)
    buffer = empty_buffer(4, 2, (96, 4, 32), torch.float32)
    with pytest.raises(AssertionError, match="must be int64"):
        pack_rows_paged(buffer, slots.int(), rows)
    with pytest.raises(AssertionError, match="must be 1"):
        pack_rows_paged(buffer, torch.arange(6)[::2], rows)
    with pytest.raises(AssertionError, match=r"must be \(3, 2, 96\)"):
        pack_rows_paged(buffer, slots, rows.transpose(0, 1))
    with pytest.raises(AssertionError, match="as the buffer"):
        pack_rows_paged(buffer, slots, rows.half())
    with pytest.raises(AssertionError, match="a power of two, or all"):
        pack_rows_paged(empty_buffer(4, 2, (96, 4, 48), torch.float32), slots, rows)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_are_loaded_and_stored_many_numbers_at_a_time(bits: int) -> None:
    pytest.importorskip("triton")
    buffer = buffer_with_index(4, 8, (128, bits, 64), torch.bfloat16)
    with interpreted() as launched:
        pack_rows_paged(buffer, torch.arange(4), torch.ones(4, 8, 128, dtype=torch.bfloat16))
    code = machine_code(launched[0])
    assert "ld.global.v4.b32" in code.ptx  # sixteen bytes
    assert "st.global.v4.b32" in code.ptx  # protected rows
    assert "div.full" not in code.ptx  # which is not what PyTorch computes
    assert "fma.rn" not in code.ptx
    assert code.spilled == 0
