"""What both passes of :mod:`kvpolicy.kernels.window_attention_paged_kernel` load and multiply."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_tile(
    p_queries: tl.tensor,
    o_row: tl.tensor,
    i_query_head: tl.tensor,
    stride_head: tl.tensor,
    stride_window: tl.tensor,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """``[BLOCK_M, BLOCK_D]``: queries of rows, the first of which is a query head's first; zero beyond the last."""
    o_dim = tl.arange(0, BLOCK_D)
    o_head, o_window = i_query_head + o_row // WINDOW, o_row % WINDOW
    o_query = o_head.to(tl.int64) * stride_head + o_window.to(tl.int64) * stride_window
    mask = (o_row < ROWS)[:, None] & (o_dim < HEAD_DIM)[None, :]
    return tl.load(p_queries + o_query[:, None] + o_dim[None, :], mask=mask, other=0.0)


@triton.jit
def key_tile(
    p_addresses: tl.tensor,
    p_slots: tl.tensor,
    o_token: tl.tensor,
    tokens: tl.tensor,
    i_layer: tl.tensor,
    i_head: tl.tensor,
    ELEMENT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """``[BLOCK_D, BLOCK_N]``: keys of tokens, transposed; zero beyond the last."""
    # Without the hint a pointer from a table is loaded through element by element.
    p_keys = tl.multiple_of(tl.load(p_addresses + i_layer).to(tl.pointer_type(ELEMENT)), 16)
    o_dim = tl.arange(0, BLOCK_D)
    b_slot = tl.load(p_slots + o_token, mask=o_token < tokens, other=0)
    o_key = (b_slot * HEADS + i_head) * HEAD_DIM
    mask = (o_dim < HEAD_DIM)[:, None] & (o_token < tokens)[None, :]
    return tl.load(p_keys + o_key[None, :] + o_dim[:, None], mask=mask, other=0.0)


@triton.jit
def logit_tile(
    p_queries: tl.tensor,
    b_query: tl.tensor,  # of the first of GROUP query heads
    b_key: tl.tensor,
    o_row: tl.tensor,
    i_query_head: tl.tensor,
    stride_head: tl.tensor,
    stride_window: tl.tensor,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """``[BLOCK_M, BLOCK_N]``: the largest logit of `GROUP` query heads."""
    b_logit = tl.dot(b_query, b_key, input_precision="ieee")
    for i_other in range(1, GROUP):
        b_other = query_tile(
            p_queries, o_row, i_query_head + i_other, stride_head, stride_window, WINDOW, ROWS, HEAD_DIM, BLOCK_D
        )
        b_product = tl.dot(b_other, b_key, input_precision="ieee")
        b_logit = tl.maximum(b_logit, b_product, propagate_nan=tl.PropagateNan.ALL)
    return b_logit
