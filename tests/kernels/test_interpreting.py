"""What tests of kernels rely on: the interpreter stands in for the compiler, notices more, and is gone afterwards."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.kernels.compiling import machine_code, translate
from tests.kernels.interpreting import interpreted

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
HERE = sys.modules[__name__]
HIDDEN = 2.0  # a global that is no constant of Triton's


@triton.jit
def widen_kernel(p_from, p_to, N, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(p_to + offsets, tl.load(p_from + offsets, mask=offsets < N).to(tl.float32))


@triton.jit
def largest_kernel(p_from, p_to, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_to, tl.max(tl.load(p_from + offsets), axis=0))


@triton.jit
def square_kernel(p_matrix, p_square, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    matrix = tl.load(p_matrix + offsets)
    tl.store(p_square + offsets, tl.dot(matrix, matrix))


@triton.jit
def refused_kernel(p_to):
    tl.store(p_to, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64], ids=str)
def test_what_a_load_masks_out_is_poison(dtype: torch.dtype) -> None:
    with interpreted(HERE):
        widened = torch.zeros(8)
        widen_kernel[1,](torch.ones(8, dtype=dtype), widened, 3, BLOCK=8)
    assert widened[:3].tolist() == [1, 1, 1]
    if dtype.is_floating_point:
        assert widened[3:].isnan().all()
    else:
        assert (widened[3:] == float(torch.iinfo(dtype).max)).all()


def test_programs_that_store_to_one_address_race() -> None:
    with interpreted(HERE):
        largest = torch.zeros(1)
        largest_kernel[1,](torch.arange(8.0), largest, BLOCK=8)
        assert largest.item() == 7
        with pytest.raises(AssertionError, match="largest_kernel store to the same address"):
            largest_kernel[2,](torch.arange(8.0), largest, BLOCK=4)


def test_matrices_of_bf16_are_multiplied_as_numbers() -> None:
    matrix = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    square = torch.zeros(16, 16)
    with interpreted(HERE):
        square_kernel[1,](matrix, square, BLOCK=16)
    torch.testing.assert_close(square, matrix.float() @ matrix.float())


def test_the_compiler_refuses_what_the_interpreter_runs() -> None:
    result = torch.zeros(1)
    with interpreted(HERE) as launched:
        refused_kernel[1,](result)
    assert result.item() == HIDDEN
    with pytest.raises(triton.CompilationError, match="HIDDEN"):
        translate(launched[0])


def test_kernels_are_compiled_ones_before_and_after() -> None:
    before = [HERE.largest_kernel, tl.max, tl.core.reduce, tl.load, tl.tensor.sum, tl.tensor.__add__]
    with interpreted(HERE) as launched:
        assert HERE.largest_kernel is not before[0]
        HERE.largest_kernel[1,](torch.arange(8.0), torch.zeros(1), BLOCK=8)
    after = [HERE.largest_kernel, tl.max, tl.core.reduce, tl.load, tl.tensor.sum, tl.tensor.__add__]
    assert all(x is y for x, y in zip(before, after, strict=True))
    assert "TRITON_INTERPRET" not in os.environ
    assert "ld.global" in machine_code(launched[0]).ptx


def test_memory_that_nobody_wrote_is_poison(poisoned: None) -> None:
    assert torch.empty(5, dtype=torch.bfloat16).isnan().all()
    assert torch.ones(5).new_empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2, dtype=torch.int64)).tolist() == [torch.iinfo(torch.int64).max] * 2
