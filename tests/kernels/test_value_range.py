"""Value range against its definition, bit for bit: extremes are exact, one subtraction in fp32 is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvpolicy.kernels.value_range import value_range, value_range_reference

Range = Callable[[torch.Tensor], torch.Tensor]
implementations = pytest.mark.parametrize("measure", [value_range, value_range_reference])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def loop(values: torch.Tensor) -> torch.Tensor:
    """One token at a time, extremes by comparison of Python numbers."""
    rows = values.reshape(-1, values.shape[-1]).tolist()
    largest, smallest = (torch.tensor([f(row) for row in rows], dtype=torch.float32) for f in (max, min))
    return (largest - smallest).view(values.shape[:-1])


def random_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).mul(3).to(dtype)


@implementations
@dtypes
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 1, 1, 1), id="one token of one channel"),
        pytest.param((2, 3, 63, 1), id="one channel"),
        pytest.param((1, 1, 33, 60), id="60 channels"),
        pytest.param((2, 2, 63, 64), id="64 channels"),
        pytest.param((3, 1, 111, 80), id="80 channels"),
        pytest.param((1, 4, 65, 96), id="96 channels"),
        pytest.param((2, 2, 17, 128), id="128 channels"),
        pytest.param((2, 3, 0, 64), id="no token"),
        pytest.param((5, 64), id="no layer and no head"),
        pytest.param((64,), id="one bare vector"),
    ],
)
def test_every_token_has_its_largest_minus_its_smallest_channel(
    measure: Range, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = random_values(shape, dtype)
    untouched = values.clone()
    ranges = measure(values)
    assert ranges.dtype == torch.float32
    assert ranges.shape == shape[:-1]
    assert torch.equal(ranges, loop(values))
    assert torch.equal(values, untouched)


@implementations
@dtypes
def test_strides_do_not_matter(measure: Range, dtype: torch.dtype) -> None:
    pool = random_values((63, 3, 80), dtype)
    by_head = pool.transpose(0, 1)[:, ::2]
    channels_first = random_values((2, 80, 63), dtype).transpose(1, 2)
    for view in (by_head, channels_first):
        assert not view.is_contiguous()
        assert torch.equal(measure(view), loop(view))


@implementations
@dtypes
def test_equal_channels_have_no_range(measure: Range, dtype: torch.dtype) -> None:
    values = random_values((2, 3, 33, 1), dtype).expand(-1, -1, -1, 96)
    assert torch.equal(measure(values), torch.zeros(2, 3, 33))


@implementations
def test_the_range_may_exceed_the_largest_number_of_the_cache_dtype(measure: Range) -> None:
    assert float(measure(torch.tensor([-65504.0, 0.0, 65504.0], dtype=torch.float16))) == 131008


@implementations
def test_the_difference_is_not_rounded_to_the_cache_dtype(measure: Range) -> None:
    # 256 - 1/256 needs 16 bits, of which bf16 has 8.
    assert float(measure(torch.tensor([2.0**-8, 256.0], dtype=torch.bfloat16))) == 256 - 2.0**-8


@implementations
def test_all_channels_count_whatever_their_sign(measure: Range) -> None:
    values = torch.tensor([[1.0, 2.0, 5.0], [-1.0, -2.0, -5.0], [-1.0, 0.0, 5.0]])
    assert measure(values).tolist() == [4, 4, 6]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_values_that_are_no_floats_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="must be a float dtype"):
        value_range(torch.zeros(2, 3, 4, dtype=dtype))
