"""Value ranges from paged buffers against those of gathered values, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.value_range_paged import value_range_paged, value_range_paged_reference
from tests.kernels.compiling import machine_code
from tests.kernels.far_slots import far_buffer
from tests.kernels.interpreting import interpreted
from tests.kernels.paged_cases import DTYPES, random_pool, shuffled_rows

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@dtypes
@pytest.mark.parametrize("head_dim", [1, 60, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("lengths", [(1,), (63,), (111,), (63, 0, 111, 1)], ids=str)
def test_one_launch_gives_every_request_its_ranges(
    lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device, launches: Counter[str]
) -> None:
    rows = shuffled_rows(lengths, 200, device, seed=head_dim)
    values = random_pool((2, 200, 3, head_dim), dtype, rows)
    untouched = [buffer.clone() for buffer in values.buffers]
    ranges = value_range_paged(values, rows)
    assert launches == {"_value_range_kernel": 1}
    assert ranges.dtype == torch.float32
    assert not ranges.isnan().any()
    assert_same(ranges, value_range_paged_reference(values, rows))
    for buffer, before in zip(values.buffers, untouched, strict=True):
        assert_same(buffer, before)


def test_a_worked_example(device: torch.device) -> None:
    layers = [torch.zeros(4, 2, 3, device=device), torch.zeros(4, 2, 3, device=device)]
    layers[0][3, 0] = torch.tensor([1.0, -2.0, 5.0])
    layers[0][1, 1] = torch.tensor([-1.0, -2.0, -5.0])
    layers[1][1, 0] = torch.tensor([1.0, 2.0, 5.0])
    rows = Rows.of([torch.tensor([3], device=device), torch.tensor([0, 1], device=device)])
    expected = [[[7, 0, 0], [0, 0, 4]], [[0, 0, 4], [0, 0, 0]]]
    assert value_range_paged(Pool.of(layers), rows).tolist() == expected


@dtypes
def test_infinities_and_nans_are_those_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    rows = shuffled_rows([6], 9, device)
    values = random_pool((1, 9, 1, 80), dtype, rows)
    odd = [[inf, 0], [-inf, 0], [inf, -inf], [nan, 0], [nan, inf], [nan, nan]]
    for slot, channels in zip(rows.slots.tolist(), odd, strict=True):
        values.buffers[0][slot, 0, 3], values.buffers[0][slot, 0, 79] = channels
    ranges = value_range_paged(values, rows)
    assert_same(ranges.flatten().cpu(), torch.tensor([inf, inf, inf, nan, nan, nan]))
    assert_same(ranges, value_range_paged_reference(values, rows))


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3.0])
def test_tokens_of_one_value_only(value: float, device: torch.device) -> None:
    values = Pool.of([torch.full((1, 1, 60), value, device=device)])
    expected = torch.tensor([[[0.0 if value == 3 else torch.nan]]])
    assert_same(value_range_paged(values, shuffled_rows([1], 1, device)).cpu(), expected)


def test_the_range_may_exceed_the_largest_number_of_the_cache_dtype(device: torch.device) -> None:
    values = Pool.of([torch.tensor([[[-65504.0, 65504.0]]], dtype=torch.float16, device=device)])
    assert value_range_paged(values, shuffled_rows([1], 1, device)).tolist() == [[[131008]]]


def test_requests_may_share_slots(device: torch.device) -> None:
    prompt, first, second = torch.arange(3, 3 + 40 + 5 + 70, device=device).flip(0).split([40, 5, 70])
    rows = Rows.of([torch.cat([prompt, first]), torch.cat([prompt, second])])
    values = random_pool((2, 130, 2, 64), torch.bfloat16, rows)
    ranges = value_range_paged(values, rows)
    assert_same(ranges, value_range_paged_reference(values, rows))
    assert_same(ranges[..., :40], ranges[..., 45:85])


def test_slots_beyond_two_to_the_31_elements(device: torch.device) -> None:
    values = Pool.of([far_buffer(8, 128, device)])
    last = values.shape[1] - 1
    rows = Rows.of([torch.tensor([last, 5, last - 1], device=device)])
    for slot in rows.slots.tolist():
        values.buffers[0][slot] = torch.randn(8, 128, generator=torch.Generator().manual_seed(slot))
    ranges = value_range_paged(values, rows)
    assert (ranges > 1).all()
    assert_same(ranges, value_range_paged_reference(values, rows))


@pytest.mark.parametrize("lengths", [(0,), (0, 0)], ids=str)
def test_no_token_needs_no_launch(lengths: tuple[int, ...], device: torch.device, launches: Counter[str]) -> None:
    rows = shuffled_rows(lengths, 4, device)
    assert value_range_paged(random_pool((2, 4, 3, 64), torch.bfloat16, rows), rows).shape == (2, 3, 0)
    assert launches == {}


def test_what_the_kernel_assumes_is_asserted() -> None:
    rows = shuffled_rows([3], 5, torch.device("cpu"))
    with pytest.raises(AssertionError, match="dtype"):
        value_range_paged(Pool.of([torch.zeros(5, 2, 8, dtype=torch.int32)]), rows)
    with pytest.raises(AssertionError, match="16 bytes"):
        value_range_paged(Pool.of([torch.zeros(1 + 5 * 2 * 8)[1:].view(5, 2, 8)]), rows)
    with pytest.raises(AssertionError, match="int64"):
        value_range_paged(Pool.of([torch.zeros(5, 2, 8)]), Rows(rows.slots.int(), rows.lengths, rows.starts))
    with pytest.raises(AssertionError, match="1024"):
        value_range_paged(Pool.of([torch.zeros(5, 1, 1025)]), rows)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_loads_are_as_wide_as_a_gpu_has_them(head_dim: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    rows = shuffled_rows([5], 9, torch.device("cpu"))
    with interpreted() as launched:
        value_range_paged(random_pool((1, 9, 8, head_dim), dtype, rows), rows)
    code = machine_code(launched[0])
    assert code.ptx.count("ld.global.v4.b32") == 8192 * dtype.itemsize // 16 // 128  # the tile, by 16 bytes and threads
    assert code.spilled <= 16
