"""The Triton kernels of :mod:`kvpolicy.kernels.window_attention_paged`.

The rows of a softmax are the queries of a KV head: those of all its query heads, one head after the other (``G * w``
rows), or, where the largest logit of the group counts, those of one head (``w`` rows). A logit here is the bare product
of query and key; ``scale`` turns it into a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.window_attention_paged_tiles import key_tile, logit_tile, query_tile

# Rows and tokens of a tile: 64 rows are what four warps of an H100 or H200 multiply at once.
BLOCK = 64
WIDE = 128  # components of a query or key beyond which tiles are half as long, for shared memory
POOLING_BLOCK = 512  # tokens that a program pools


@triton.jit
def _statistics_kernel(
    p_queries: tl.tensor,
    p_addresses: tl.tensor,
    p_slots: tl.tensor,
    p_starts: tl.tensor,
    p_older: tl.tensor,
    p_largest: tl.tensor,
    p_sum: tl.tensor,
    stride_request: tl.tensor,
    stride_layer: tl.tensor,
    stride_head: tl.tensor,
    stride_window: tl.tensor,
    scale: tl.tensor,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    USE_ALL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Largest logit of each row, and the sum of the powers relative to it: ``[R, L, H_kv, ROWS]`` both.

    One program per (request, layer, KV head) and tile of rows. `GROUP` query heads give the largest logit of a row.
    """
    i_unit, i_tile = tl.program_id(0), tl.program_id(1)
    i_head, i_layer, i_request = i_unit % HEADS, i_unit // HEADS % LAYERS, i_unit // (HEADS * LAYERS)
    start = tl.load(p_starts + i_request)
    tokens = tl.load(p_starts + i_request + 1) - start
    o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if USE_ALL:
        visible = tokens
        b_visible = tokens - WINDOW + 1 + o_row % WINDOW
    else:
        visible = tl.load(p_older + i_request)
        b_visible = tl.full((BLOCK_M,), 0, tl.int64) + visible
    p_queries += i_request.to(tl.int64) * stride_request + i_layer.to(tl.int64) * stride_layer
    i_query_head = i_head * GROUP * (ROWS // WINDOW)
    b_query = query_tile(p_queries, o_row, i_query_head, stride_head, stride_window, WINDOW, ROWS, HEAD_DIM, BLOCK_D)
    b_largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, visible, BLOCK_N):
        o_token = first + tl.arange(0, BLOCK_N)
        b_key = key_tile(
            p_addresses, p_slots + start, o_token, visible, i_layer, i_head,
            p_queries.dtype.element_ty, HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        b_logit = logit_tile(
            p_queries, b_query, b_key, o_row, i_query_head, stride_head, stride_window,
            WINDOW, GROUP, ROWS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        # Every row sees its request's first token, so no largest logit stays infinite.
        b_logit = tl.where(o_token[None, :] < b_visible[:, None], b_logit, float("-inf"))
        b_higher = tl.maximum(b_largest, tl.max(b_logit, axis=1))
        b_sum = b_sum * tl.exp2((b_largest - b_higher) * scale)
        b_sum += tl.sum(tl.exp2((b_logit - b_higher[:, None]) * scale), axis=1)
        b_largest = b_higher
    o_statistic = i_unit.to(tl.int64) * ROWS + o_row
    tl.store(p_largest + o_statistic, b_largest, mask=o_row < ROWS)
    tl.store(p_sum + o_statistic, b_sum, mask=o_row < ROWS)


@triton.jit(do_not_specialize=["total"])  # it varies from call to call
def _mass_kernel(
    p_queries: tl.tensor,
    p_addresses: tl.tensor,
    p_slots: tl.tensor,
    p_starts: tl.tensor,
    p_older: tl.tensor,
    p_largest: tl.tensor,
    p_sum: tl.tensor,
    p_mass: tl.tensor,
    stride_request: tl.tensor,
    stride_layer: tl.tensor,
    stride_head: tl.tensor,
    stride_window: tl.tensor,
    scale: tl.tensor,
    total: tl.tensor,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Mean attention of `ROWS` rows to each token ``[L, H_kv * SHARE, T]``; +inf for recent tokens.

    The rows of a KV head are in `SHARE` parts. One program per (request, layer, part) and block of tokens.
    """
    i_unit, i_block = tl.program_id(0), tl.program_id(1)
    i_part, i_layer = i_unit % (HEADS * SHARE), i_unit // (HEADS * SHARE) % LAYERS
    i_request = i_unit // (HEADS * SHARE * LAYERS)
    start = tl.load(p_starts + i_request)
    tokens = tl.load(p_starts + i_request + 1) - start
    older = tl.load(p_older + i_request)
    o_token = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    b_mass = tl.zeros((BLOCK_N,), tl.float32)
    if i_block * BLOCK_N < older:
        b_key = key_tile(
            p_addresses, p_slots + start, o_token, older, i_layer, i_part // SHARE,
            p_queries.dtype.element_ty, HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        p_queries += i_request.to(tl.int64) * stride_request + i_layer.to(tl.int64) * stride_layer
        i_query_head = i_part * GROUP * (ROWS // WINDOW)
        b_attention = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, ROWS, BLOCK_M):
            o_row = first + tl.arange(0, BLOCK_M)
            b_query = query_tile(
                p_queries, o_row, i_query_head, stride_head, stride_window, WINDOW, ROWS, HEAD_DIM, BLOCK_D
            )
            b_logit = logit_tile(
                p_queries, b_query, b_key, o_row, i_query_head, stride_head, stride_window,
                WINDOW, GROUP, ROWS, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            o_statistic = i_unit.to(tl.int64) * ROWS + o_row
            b_largest = tl.load(p_largest + o_statistic, mask=o_row < ROWS, other=0.0)
            b_sum = tl.load(p_sum + o_statistic, mask=o_row < ROWS, other=float("inf"))
            b_attention += tl.exp2((b_logit - b_largest[:, None]) * scale) * (1 / (b_sum * ROWS))[:, None]
        b_mass = tl.sum(b_attention, axis=0)
    b_mass = tl.where(o_token < older, b_mass, float("inf"))
    o_mass = (i_layer * (HEADS * SHARE) + i_part).to(tl.int64) * total + start
    tl.store(p_mass + o_mass + o_token, b_mass, mask=o_token < tokens)


@triton.jit(do_not_specialize=["total"])  # it varies from call to call
def _pooling_kernel(
    p_mass: tl.tensor,
    p_pooled: tl.tensor,
    p_starts: tl.tensor,
    p_older: tl.tensor,
    total: tl.tensor,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KERNEL: tl.constexpr,
    USE_MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """``[L, H_kv * SHARE, T]``, pooled over each request's older tokens; then the mean of the parts of a KV head."""
    i_unit, i_block = tl.program_id(0), tl.program_id(1)
    i_row, i_request = i_unit % (LAYERS * HEADS), i_unit // (LAYERS * HEADS)
    start = tl.load(p_starts + i_request)
    tokens = tl.load(p_starts + i_request + 1) - start
    older = tl.load(p_older + i_request)
    o_token = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    b_mean = tl.zeros((BLOCK_N,), tl.float32)
    for i_part in range(SHARE):
        p_part = p_mass + (i_row * SHARE + i_part).to(tl.int64) * total + start
        b_pooled = tl.full((BLOCK_N,), float("-inf") if USE_MAX else 0.0, tl.float32)
        for i_shift in range(KERNEL):
            o_neighbour = o_token + i_shift - KERNEL // 2
            mask = (o_neighbour >= 0) & (o_neighbour < older)
            if USE_MAX:
                b_neighbour = tl.load(p_part + o_neighbour, mask=mask, other=float("-inf"))
                b_pooled = tl.maximum(b_pooled, b_neighbour, propagate_nan=tl.PropagateNan.ALL)
            else:
                b_pooled += tl.load(p_part + o_neighbour, mask=mask, other=0.0)
        b_mean += b_pooled
    b_mean = b_mean / (SHARE if USE_MAX else SHARE * KERNEL)
    b_mean = tl.where(o_token < older, b_mean, float("inf"))
    tl.store(p_pooled + i_row.to(tl.int64) * total + start + o_token, b_mean, mask=o_token < tokens)


def launch(
    mass: torch.Tensor,
    queries: torch.Tensor,
    keys: Pool,
    rows: Rows,
    older: torch.Tensor,
    *,
    use_all: bool,
    use_largest_logit: bool,
    pooling: str,
    kernel: int,
    scale: float,
) -> None:
    """Write the scores into `mass`; arguments are those of the wrapper, `older` int64 ``[R]`` on the device."""
    requests, layers, query_heads, window, head_dim = queries.shape
    heads, group_size, total = mass.shape[1], query_heads // mass.shape[1], mass.shape[2]
    # Pooling and the mean over query heads may change places, but for a maximum.
    share = group_size if pooling == "max" and not use_largest_logit else 1
    softmax_rows = window if use_largest_logit else group_size * window
    largest, powers = queries.new_empty((2, requests * layers * heads * softmax_rows), dtype=torch.float32)
    attention = mass if pooling == "none" else mass.new_empty((layers, heads * share, total))
    cache = (queries, keys.addresses, rows.slots, rows.starts, older, largest, powers)
    block_dim = max(16, triton.next_power_of_2(head_dim))
    # Products of fp32 are exact, so without tensor cores, and their operands take registers.
    block = BLOCK if block_dim <= WIDE and queries.element_size() == 2 else BLOCK // 2
    sizes = {
        "LAYERS": layers,
        "HEADS": heads,
        "WINDOW": window,
        "GROUP": group_size if use_largest_logit else 1,
        "HEAD_DIM": head_dim,
        "BLOCK_N": block,
        "BLOCK_D": block_dim,
        "num_warps": 4,
        "num_stages": 3,  # slots are read one tile ahead of their keys
    }
    block_rows = max(16, min(block, triton.next_power_of_2(softmax_rows)))
    _statistics_kernel[requests * layers * heads, triton.cdiv(softmax_rows, block_rows)](
        *cache, *queries.stride()[:4], scale, ROWS=softmax_rows, USE_ALL=use_all, BLOCK_M=block_rows, **sizes
    )
    part_rows = softmax_rows // share
    block_rows = max(16, min(block, triton.next_power_of_2(part_rows)))
    _mass_kernel[requests * layers * heads * share, triton.cdiv(rows.longest, block)](
        *cache, attention, *queries.stride()[:4], scale, total,
        SHARE=share, ROWS=part_rows, BLOCK_M=block_rows, **sizes,
    )  # fmt: skip
    if pooling != "none":
        _pooling_kernel[requests * layers * heads, triton.cdiv(rows.longest, POOLING_BLOCK)](
            attention, mass, rows.starts, older, total, LAYERS=layers, HEADS=heads, SHARE=share,
            KERNEL=kernel, USE_MAX=pooling == "max", BLOCK_N=POOLING_BLOCK,
        )  # fmt: skip
