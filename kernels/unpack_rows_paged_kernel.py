# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of :mod:`kvpolicy.kernels.unpack_rows_paged`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpolicy.kernels.packed_buffer import PackedBuffer
from kvpolicy.kernels.packed_tile import packed_tile

TILE = 4096  # numbers that a program unpacks: 32 in each thread of 4 warps
WARPS = 4


@triton.jit(do_not_specialize=["N"])  # it varies from call to call
def _unpack_rows_kernel(
    p_codes,
    p_scale,
    p_minimum,
    p_index,
    p_rows,
    p_slots,
    p_unpacked,  # [N / HEADS, HEADS, HEAD_DIM]
    N,  # rows of single heads
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_unpacked = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row = o_unpacked < N
    b_slot = tl.load(p_slots + o_unpacked // HEADS, mask=m_row, other=0)
    i_head = o_unpacked % HEADS
    b_row = packed_tile(
        p_codes, p_scale, p_minimum, p_index, p_rows, b_slot * HEADS + i_head, m_row, i_head,
        BITS, GROUP, HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    o_dim = tl.arange(0, BLOCK_D)
    m_value = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    tl.store(p_unpacked + (o_unpacked * HEAD_DIM)[:, None] + o_dim[None, :], b_row, mask=m_value)


def launch(buffer: PackedBuffer, slots: torch.Tensor, unpacked: torch.Tensor) -> None:
    """Fill `unpacked` ``[n, H, D]``, which must not be empty."""
    tokens, heads, head_dim = unpacked.shape
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(1, TILE // block_d)
    _unpack_rows_kernel[triton.cdiv(tokens * heads, block_n),](
        buffer.codes,
        buffer.scale,
        buffer.minimum,
        buffer.index,
        buffer.rows,
        slots,
        unpacked,
        tokens * heads,
        BITS=buffer.bits,
        GROUP=buffer.group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=WARPS,
        enable_fp_fusion=False,  # product and sum are rounded one after the other, as in PyTorch
    )
