# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of :mod:`kvpolicy.kernels.pack_rows_paged`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpolicy.kernels.pack_rows import FP32_LIMIT, ROUNDING
from kvpolicy.kernels.packed_buffer import PackedBuffer

TILE = 2048  # numbers that a program packs: 16 in each thread, so that a decode step has more than a few programs
WARPS = 4


@triton.jit
def _rounded(b_number):
    """To the nearest integer, of two the even one, as PyTorch does; for numbers from 0 to 2^22."""
    return (b_number + 12582912.0) - 12582912.0  # 1.5 * 2^23, where fp32 has no fractions


@triton.jit(do_not_specialize=["N"])  # it varies from call to call
def _pack_rows_kernel(
    p_new,
    p_slots,
    p_codes,
    p_scale,
    p_minimum,
    p_index,  # None: no row is protected
    p_rows,
    stride_token,  # of p_new
    stride_head,
    N,  # rows of single heads
    LARGEST,  # number of the dtype of the model, but for rounding
    LARGEST_FP32,
    RELATIVE,  # by how much more than needed the scale is, so that it is not less when it is rounded
    SMALLEST,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2**BITS - 1
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    BLOCK_BYTES: tl.constexpr = BLOCK_GROUPS * BLOCK_GROUP // PER_BYTE
    o_new = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_token, i_head = o_new // HEADS, o_new % HEADS
    b_slot = tl.load(p_slots + i_token, mask=o_new < N, other=-1)
    m_row = b_slot >= 0
    o_row = b_slot * HEADS + i_head
    o_group = tl.arange(0, BLOCK_GROUPS)
    o_channel = o_group[:, None] * GROUP + tl.arange(0, BLOCK_GROUP)[None, :]
    m_channel = (o_group < GROUPS)[:, None] & (tl.arange(0, BLOCK_GROUP) < GROUP)[None, :]
    m_new = m_row[:, None, None] & m_channel[None, :, :]
    p_number = p_new + (i_token * stride_token + i_head * stride_head)[:, None, None] + o_channel[None, :, :]
    b_new = tl.load(p_number, mask=m_new, other=0.0)
    b_number = b_new.to(tl.float32)
    m_number = m_new & (b_number == b_number)  # an extreme on a GPU is that of the other operand
    b_minimum = tl.min(tl.where(m_number, b_number, float("inf")), axis=2)
    b_maximum = tl.max(tl.where(m_number, b_number, float("-inf")), axis=2)
    b_nans = tl.max((m_new & (b_number != b_number)).to(tl.int32), axis=2)
    b_minimum = tl.where(b_nans > 0, float("nan"), b_minimum)
    b_step = tl.div_rn(b_maximum - b_minimum, tl.full((BLOCK_N, BLOCK_GROUPS), LEVELS, tl.float32))
    b_scale = (b_step * RELATIVE + SMALLEST).to(p_scale.dtype.element_ty)
    b_positive = b_scale.to(tl.float32)
    b_highest = tl.floor(tl.div_rn(tl.minimum(LARGEST - b_minimum, LARGEST_FP32), b_positive))
    b_highest = tl.minimum(tl.maximum(b_highest, 0.0), LEVELS)
    b_offset = b_number - b_minimum[:, :, None]
    b_code = _rounded(tl.div_rn(b_offset, tl.broadcast_to(b_positive[:, :, None], b_offset.shape)))
    # What is no number has the code 0, which leaves the work to scale and minimum.
    b_code = tl.where(m_new & (b_code == b_code), tl.minimum(b_code, b_highest[:, :, None]), 0.0).to(tl.int32)
    b_parts = tl.reshape(b_code, (BLOCK_N, BLOCK_BYTES, PER_BYTE))
    b_byte = tl.sum(b_parts << (tl.arange(0, PER_BYTE) * BITS)[None, None, :], axis=2)
    o_byte = tl.arange(0, BLOCK_BYTES)
    m_byte = m_row[:, None] & (o_byte < HEAD_DIM // PER_BYTE)[None, :]
    tl.store(p_codes + (o_row * (HEAD_DIM // PER_BYTE))[:, None] + o_byte[None, :], b_byte.to(tl.uint8), mask=m_byte)
    p_group = (o_row * GROUPS)[:, None] + o_group[None, :]
    m_group = m_row[:, None] & (o_group < GROUPS)[None, :]
    tl.store(p_scale + p_group, b_scale, mask=m_group)
    tl.store(p_minimum + p_group, b_minimum.to(p_minimum.dtype.element_ty), mask=m_group)
    if p_index is not None:
        b_index = tl.load(p_index + o_row, mask=m_row, other=-1)
        o_exact = ((b_index.to(tl.int64) * HEADS + i_head) * HEAD_DIM)[:, None, None] + o_channel[None, :, :]
        tl.store(p_rows + o_exact, b_new, mask=m_new & (b_index >= 0)[:, None, None])


def launch(buffer: PackedBuffer, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Pack `rows` ``[n, H, D]``, which must not be empty; channels lie next to each other."""
    tokens, heads, head_dim = rows.shape
    groups = head_dim // buffer.group
    block_group = triton.next_power_of_2(buffer.group)
    block_groups = triton.next_power_of_2(groups)
    block_n = max(1, TILE // (block_group * block_groups))
    limits = torch.finfo(buffer.dtype)
    _pack_rows_kernel[triton.cdiv(tokens * heads, block_n),](
        rows,
        slots,
        buffer.codes,
        buffer.scale,
        buffer.minimum,
        buffer.index,
        buffer.rows,
        rows.stride(0),
        rows.stride(1),
        tokens * heads,
        limits.max * ROUNDING,
        FP32_LIMIT,
        1 + limits.eps / 2,
        max(limits.tiny * limits.eps, torch.finfo(torch.float32).tiny),
        BITS=buffer.bits,
        GROUP=buffer.group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_N=block_n,
        BLOCK_GROUPS=block_groups,
        BLOCK_GROUP=block_group,
        num_warps=WARPS,
        enable_fp_fusion=False,  # products and sums are rounded one after the other, as in PyTorch
    )
