"""How a kernel loads rows of a :class:`kvpolicy.kernels.packed_buffer.PackedBuffer`, or of a plain buffer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_tile(
    p_codes: tl.tensor,
    p_scale: tl.tensor,
    p_minimum: tl.tensor,
    p_index: tl.tensor,  # None: no row is protected
    p_rows: tl.tensor,
    o_row: tl.tensor,  # int64 [BLOCK_N], slot * HEADS + head
    m_row: tl.tensor,
    i_head: tl.tensor,  # of each row, or of all
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # a power of two, or HEAD_DIM
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """``[BLOCK_N, BLOCK_D]``: the rows in the dtype of the model; zero where `m_row` is not set and beyond the head."""
    PER_BYTE: tl.constexpr = 8 // BITS
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    BLOCK_GROUPS: tl.constexpr = 1 if GROUPS == 1 else BLOCK_D // GROUP
    o_byte = tl.arange(0, BLOCK_D // PER_BYTE)
    m_byte = m_row[:, None] & (o_byte < HEAD_DIM // PER_BYTE)[None, :]
    b_byte = tl.load(p_codes + (o_row * (HEAD_DIM // PER_BYTE))[:, None] + o_byte[None, :], mask=m_byte, other=0)
    if BITS == 8:
        b_code = b_byte
    elif BITS == 4:
        b_code = tl.join(b_byte & 15, b_byte >> 4)
    else:
        # A join adds the fastest axis, so the outer one says whether a code is even, the inner one which of the two.
        b_even = tl.join(b_byte & 3, (b_byte >> 4) & 3)
        b_code = tl.join(b_even, tl.join((b_byte >> 2) & 3, b_byte >> 6))
    o_group = tl.arange(0, BLOCK_GROUPS)
    p_group = (o_row * GROUPS)[:, None] + o_group[None, :]
    m_group = m_row[:, None] & (o_group < GROUPS)[None, :]
    b_scale = tl.load(p_scale + p_group, mask=m_group, other=0.0).to(tl.float32)
    b_minimum = tl.load(p_minimum + p_group, mask=m_group, other=0.0).to(tl.float32)
    b_grouped = tl.reshape(b_code.to(tl.float32), (BLOCK_N, BLOCK_GROUPS, BLOCK_D // BLOCK_GROUPS))
    b_grouped = b_grouped * b_scale[:, :, None] + b_minimum[:, :, None]
    o_dim = tl.arange(0, BLOCK_D)
    m_value = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    b_value = tl.where(m_value, tl.reshape(b_grouped, (BLOCK_N, BLOCK_D)), 0.0).to(p_scale.dtype.element_ty)
    if p_index is not None:
        b_index = tl.load(p_index + o_row, mask=m_row, other=-1)
        m_exact = (b_index >= 0)[:, None] & (o_dim < HEAD_DIM)[None, :]
        o_exact = (b_index.to(tl.int64) * HEADS + i_head) * HEAD_DIM
        b_exact = tl.load(p_rows + o_exact[:, None] + o_dim[None, :], mask=m_exact, other=0.0)
        b_value = tl.where(m_exact, b_exact, b_value)
    return b_value


@triton.jit
def row_tile(
    p_buffer: tl.tensor,  # the rows themselves, or their codes
    p_scale: tl.tensor,
    p_minimum: tl.tensor,
    p_index: tl.tensor,
    p_rows: tl.tensor,
    b_slot: tl.tensor,
    m_token: tl.tensor,
    i_head: tl.tensor,
    BITS: tl.constexpr,  # 0: not packed
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """``[BLOCK_N, BLOCK_D]`` in the dtype of the model, zero where there is no token and beyond the head."""
    o_row = b_slot.to(tl.int64) * HEADS + i_head
    if BITS == 0:
        o_dim = tl.arange(0, BLOCK_D)
        m_value = m_token[:, None] & (o_dim < HEAD_DIM)[None, :]
        b_rows = tl.load(p_buffer + (o_row * HEAD_DIM)[:, None] + o_dim[None, :], mask=m_value, other=0.0)
    else:
        b_rows = packed_tile(
            p_buffer, p_scale, p_minimum, p_index, p_rows, o_row, m_token, i_head,
            BITS, GROUP, HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    return b_rows
