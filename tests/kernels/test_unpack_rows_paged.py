"""Rows that the kernel unpacks against those that PyTorch does, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvpolicy.kernels.packed_buffer import PackedBuffer
from kvpolicy.kernels.unpack_rows_paged import unpack_rows_paged
from tests.kernels.bf16_rounding import bf16_is_rounded  # noqa: F401
from tests.kernels.compiling import machine_code
from tests.kernels.far_slots import far_buffer
from tests.kernels.interpreting import interpreted
from tests.kernels.packed_cases import DTYPES, LAYOUTS, empty_buffer, on, random_buffer

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "D={} bits={} group={}".format(*layout))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@dtypes
@layouts
@pytest.mark.parametrize("protected", [0.0, 0.3])
def test_one_launch_reads_the_rows_of_any_slots(
    layout: tuple[int, int, int], dtype: torch.dtype, protected: float, device: torch.device, launches: Counter[str]
) -> None:
    used = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:37]
    buffer = random_buffer(used, 60, 3, layout, dtype, protected)
    slots = torch.cat([used.flip(0), used[:2]])
    rows = unpack_rows_paged(on(buffer, device), slots.to(device))
    assert launches == {"_unpack_rows_kernel": 1}
    assert rows.dtype == dtype
    assert not rows.isnan().any()
    assert_same(rows, buffer.read(slots))


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize(("head_dim", "group"), [(1, 1), (60, 60), (256, 64), (256, 256), (6, 2)])
def test_ugly_sizes(head_dim: int, group: int, tokens: int, device: torch.device) -> None:
    buffer = random_buffer(torch.arange(tokens), tokens, 1, (head_dim, 8, group), torch.float16, protected=0.5)
    slots = torch.arange(tokens).flip(0)
    assert_same(unpack_rows_paged(on(buffer, device), slots.to(device)), buffer.read(slots))


@dtypes
def test_infinities_and_nans_are_those_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    buffer = random_buffer(torch.arange(4), 4, 1, (80, 4, 16), dtype, protected=0.25)
    buffer.scale[1, 0, 2] = torch.inf
    buffer.minimum[2, 0, 1], buffer.minimum[3, 0, 4] = torch.nan, -torch.inf
    assert_same(unpack_rows_paged(on(buffer, device), torch.arange(4, device=device)), buffer.read(torch.arange(4)))


def test_slots_beyond_two_to_the_31_bytes(device: torch.device) -> None:
    codes = far_buffer(8, 128, device).view(torch.uint8).flatten()[: 2**31 + 2**16].view(-1, 8, 128)
    scale, minimum = torch.ones(2, len(codes), 8, 1, dtype=torch.bfloat16, device=device)
    buffer = PackedBuffer(codes, scale, minimum, 8, 128)
    slots = torch.tensor([len(codes) - 1, 5, len(codes) - 2], device=device)
    for slot in slots.tolist():
        codes[slot] = torch.arange(1024).view(8, 128) % 251 + slot % 4
    rows = unpack_rows_paged(buffer, slots)
    assert (rows > 1).any(dim=-1).all()
    assert_same(rows, buffer.read(slots).cpu())


def test_protected_rows_beyond_two_to_the_31_elements(device: torch.device) -> None:
    rows = far_buffer(8, 128, device)
    buffer = on(empty_buffer(3, 8, (128, 8, 128), torch.bfloat16, rows=1), device)
    buffer = PackedBuffer(*buffer.tensors[:3], 8, 128, torch.full_like(buffer.tensors[3], len(rows) - 2), rows)
    rows[-2] = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([2], device=device)
    assert_same(unpack_rows_paged(buffer, slots)[0], rows[-2].cpu())


def test_no_slot_needs_no_launch(device: torch.device, launches: Counter[str]) -> None:
    buffer = on(random_buffer(torch.arange(4), 4, 2, LAYOUTS[0], torch.bfloat16), device)
    assert unpack_rows_paged(buffer, torch.empty(0, dtype=torch.int64, device=device)).shape == (0, 2, 64)
    assert launches == {}


def test_what_the_kernel_assumes_is_asserted() -> None:
    slots = torch.arange(3)
    buffer = empty_buffer(4, 2, (96, 4, 32), torch.float32)
    with pytest.raises(AssertionError, match="must be int64"):
        unpack_rows_paged(buffer, slots.int())
    with pytest.raises(AssertionError, match="must be 1"):
        unpack_rows_paged(buffer, torch.arange(6)[::2])
    with pytest.raises(AssertionError, match="a power of two, or all"):
        unpack_rows_paged(empty_buffer(4, 2, (96, 4, 48), torch.float32), slots)
    with pytest.raises(AssertionError, match="at most 1024"):
        unpack_rows_paged(empty_buffer(4, 2, (2048, 4, 64), torch.float32), slots)
    with pytest.raises(AssertionError, match="must be one of"):
        unpack_rows_paged(empty_buffer(4, 2, (96, 4, 32), torch.float64), slots)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_loaded_many_at_a_time(bits: int) -> None:
    pytest.importorskip("triton")
    buffer = random_buffer(torch.arange(4), 4, 8, (128, bits, 64), torch.bfloat16, protected=0.5)
    with interpreted() as launched:
        unpack_rows_paged(buffer, torch.arange(4))
    code = machine_code(launched[0])
    assert "ld.global.b8" not in code.ptx  # no byte alone
    assert "fma.rn" not in code.ptx  # PyTorch rounds the product, then the sum
    assert "st.global.v4.b32" in code.ptx  # sixteen bytes at a time
    assert code.spilled == 0
