# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of :mod:`kvpolicy.kernels.value_range_paged`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpolicy.kernels.paged import Pool

# Elements of a tile: 16 KiB of bf16, eight loads of 16 bytes in flight in each thread of 4 warps. A thread needs about
# 64 registers, so that eight programs share a multiprocessor of an H100 or H200.
TILE = 8192
WARPS = 4
ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["T"])  # the number of tokens is never the same twice
def _value_range_kernel(
    p_addresses,  # where the buffer of each layer begins
    p_slots,
    p_ranges,  # [L, H, T]
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_head = tl.program_id(1)
    i_layer = tl.program_id(2).to(tl.int64)
    p_values = tl.load(p_addresses + i_layer).to(tl.pointer_type(ELEMENT))
    p_values = tl.multiple_of(p_values, 16)  # allocators align to more; the host asserts it
    o_token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_channel = tl.arange(0, BLOCK_D)
    m_token = o_token < T
    m_value = m_token[:, None] & (o_channel < D)[None, :]
    b_slot = tl.load(p_slots + o_token, mask=m_token, other=0)
    o_value = (b_slot * H + i_head)[:, None] * D + o_channel[None, :]
    b_value = tl.load(p_values + o_value, mask=m_value, other=0).to(tl.float32)
    m_nan = m_value & (b_value != b_value)  # a maximum on a GPU is that of the other operand
    m_number = m_value & (b_value == b_value)
    b_largest = tl.max(tl.where(m_number, b_value, float("-inf")), axis=1)
    b_smallest = tl.min(tl.where(m_number, b_value, float("inf")), axis=1)
    b_nans = tl.max(m_nan.to(tl.int32), axis=1)
    b_range = tl.where(b_nans > 0, float("nan"), b_largest - b_smallest)
    tl.store(p_ranges + (i_layer * H + i_head) * T + o_token, b_range, mask=m_token)


def launch(values: Pool, slots: torch.Tensor, ranges: torch.Tensor) -> None:
    """Fill `ranges` ``[L, H, T]``, which must not be empty."""
    layers, heads, tokens = ranges.shape
    head_dim = values.shape[-1]
    block_d = triton.next_power_of_2(head_dim)
    block_t = TILE // block_d
    _value_range_kernel[triton.cdiv(tokens, block_t), heads, layers](
        values.addresses,
        slots,
        ranges,
        tokens,
        H=heads,
        D=head_dim,
        ELEMENT=ELEMENTS[values.dtype],
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=WARPS,
    )
