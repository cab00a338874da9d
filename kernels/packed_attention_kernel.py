"""The Triton kernels of :mod:`kvpolicy.kernels.packed_attention`.

A program takes one part of a request's tokens and one KV head, with all query heads of its group, so that a row is
unpacked once. A logit here is the bare product of query and key; ``scale`` turns it into a power of two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kvpolicy.kernels.packed_buffer import Buffer, PackedBuffer
from kvpolicy.kernels.packed_tile import row_tile

BLOCK = 64  # tokens of a tile
WIDE = 128  # channels beyond which tiles are half as long, for registers
# A part has at least so many tokens: then what the passes exchange is a few percent of what is read.
LEAST_PART = 256
MOST_PARTS = 32  # of a request: with 8 KV heads these are two programs for each multiprocessor of an H100 or H200


@triton.jit
def _part_length(length: tl.tensor, PARTS: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Tokens of each part of a request but its last one; it depends on nothing but the request's own length."""
    tiles = tl.cdiv(tl.cdiv(length, PARTS), BLOCK_N)
    return tl.maximum(tiles * BLOCK_N, LEAST)


@triton.jit
def _part_kernel(
    p_queries: tl.tensor,
    p_keys: tl.tensor,
    p_key_scale: tl.tensor,
    p_key_minimum: tl.tensor,
    p_key_index: tl.tensor,
    p_key_rows: tl.tensor,
    p_values: tl.tensor,
    p_value_scale: tl.tensor,
    p_value_minimum: tl.tensor,
    p_value_index: tl.tensor,
    p_value_rows: tl.tensor,
    p_req_to_token: tl.tensor,
    p_req_pool_indices: tl.tensor,
    p_seq_lens: tl.tensor,
    p_sums: tl.tensor,  # [B, H_q, PARTS, D], weighted rows
    p_statistics: tl.tensor,  # [B, H_q, PARTS, 2], largest logit and the sum of the powers relative to it
    stride_request: tl.tensor,  # of the queries
    stride_head: tl.tensor,
    stride_row: tl.tensor,  # of req_to_token
    scale: tl.tensor,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    i_unit, i_part = tl.program_id(0), tl.program_id(1)
    i_request, i_head = i_unit // HEADS, i_unit % HEADS
    length = tl.load(p_seq_lens + i_request).to(tl.int32)
    part_length = _part_length(length, PARTS, LEAST, BLOCK_N)
    begin = i_part * part_length
    if begin < length:
        end = tl.minimum(begin + part_length, length)
        o_head, o_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        m_head = (o_head < GROUP)[:, None] & (o_dim < HEAD_DIM)[None, :]
        i_query_head = i_head * GROUP + o_head
        o_query = i_request.to(tl.int64) * stride_request + i_query_head.to(tl.int64) * stride_head
        b_query = tl.load(p_queries + o_query[:, None] + o_dim[None, :], mask=m_head, other=0.0)
        p_req_to_token += tl.load(p_req_pool_indices + i_request).to(tl.int64) * stride_row
        b_largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BLOCK_M,), tl.float32)
        b_rows = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for first in range(begin, end, BLOCK_N):
            o_token = first + tl.arange(0, BLOCK_N)
            m_token = o_token < end
            b_slot = tl.load(p_req_to_token + o_token, mask=m_token, other=0)
            b_key = row_tile(
                p_keys, p_key_scale, p_key_minimum, p_key_index, p_key_rows, b_slot, m_token, i_head,
                KEY_BITS, KEY_GROUP, HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            b_logit = tl.dot(b_query, tl.trans(b_key), input_precision="ieee")
            # A tile has at least one token, so its largest logit is finite if logits are.
            b_logit = tl.where(m_token[None, :], b_logit, float("-inf"))
            b_higher = tl.maximum(b_largest, tl.max(b_logit, axis=1))
            b_decay = tl.exp2((b_largest - b_higher) * scale)
            b_power = tl.exp2((b_logit - b_higher[:, None]) * scale)
            b_sum = b_sum * b_decay + tl.sum(b_power, axis=1)
            b_value = row_tile(
                p_values, p_value_scale, p_value_minimum, p_value_index, p_value_rows, b_slot, m_token, i_head,
                VALUE_BITS, VALUE_GROUP, HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            b_high = b_power.to(b_value.dtype)
            b_rows = tl.dot(b_high, b_value, b_rows * b_decay[:, None], input_precision="ieee")
            if b_value.dtype != tl.float32:
                # Tensor cores multiply short floats: a power is the sum of two of them to 16 bits or more.
                b_low = (b_power - b_high.to(tl.float32)).to(b_value.dtype)
                b_rows = tl.dot(b_low, b_value, b_rows)
            b_largest = b_higher
        o_part = (i_request.to(tl.int64) * (HEADS * GROUP) + i_query_head) * PARTS + i_part
        tl.store(p_sums + (o_part * HEAD_DIM)[:, None] + o_dim[None, :], b_rows, mask=m_head)
        tl.store(p_statistics + o_part * 2, b_largest, mask=o_head < GROUP)
        tl.store(p_statistics + o_part * 2 + 1, b_sum, mask=o_head < GROUP)


@triton.jit
def _reduce_kernel(
    p_sums: tl.tensor,
    p_statistics: tl.tensor,
    p_seq_lens: tl.tensor,
    p_output: tl.tensor,  # [B, H_q, D]
    scale: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program per request and query head puts its parts together; of parts without tokens it reads nothing."""
    i_unit = tl.program_id(0).to(tl.int64)
    length = tl.load(p_seq_lens + i_unit // QUERY_HEADS).to(tl.int32)
    parts = tl.cdiv(length, _part_length(length, PARTS, LEAST, BLOCK_N))
    o_part, o_dim = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_D)
    m_part, m_dim = o_part < parts, o_dim < HEAD_DIM
    p_part = p_statistics + (i_unit * PARTS + o_part) * 2
    b_largest = tl.load(p_part, mask=m_part, other=float("-inf"))
    b_sum = tl.load(p_part + 1, mask=m_part, other=0.0)
    b_weight = tl.exp2((b_largest - tl.max(b_largest, axis=0)) * scale)
    m_row = m_part[:, None] & m_dim[None, :]
    o_row = ((i_unit * PARTS + o_part) * HEAD_DIM)[:, None] + o_dim[None, :]
    b_rows = tl.load(p_sums + o_row, mask=m_row, other=0.0)
    b_output = tl.sum(b_rows * b_weight[:, None], axis=0) / tl.sum(b_sum * b_weight, axis=0)
    b_output = tl.where(length > 0, b_output, 0.0)
    tl.store(p_output + i_unit * HEAD_DIM + o_dim, b_output.to(p_output.dtype.element_ty), mask=m_dim)


def _operands(buffer: Buffer) -> tuple[Any, ...]:
    """Tensors of rows, or of packed ones; their bits, or 0; channels of a group."""
    if isinstance(buffer, PackedBuffer):
        return (buffer.codes, buffer.scale, buffer.minimum, buffer.index, buffer.rows), buffer.bits, buffer.group
    return (buffer, None, None, None, None), 0, 0


def launch(
    queries: torch.Tensor,
    keys: Buffer,
    values: Buffer,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    output: torch.Tensor,
) -> None:
    """Fill `output`, which must not be empty; arguments are those of the wrapper."""
    requests, query_heads, head_dim = queries.shape
    heads = keys.shape[1]
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Products of fp32 are exact, so without tensor cores, and their operands take registers.
    block = BLOCK if block_d <= WIDE and queries.element_size() == 2 else BLOCK // 2
    parts = min(MOST_PARTS, triton.cdiv(req_to_token.shape[1], LEAST_PART))
    sums = torch.empty(requests, query_heads, parts, head_dim, dtype=torch.float32, device=queries.device)
    statistics = torch.empty(requests, query_heads, parts, 2, dtype=torch.float32, device=queries.device)
    scale = scaling * math.log2(math.e)
    (key_tensors, key_bits, key_group), (value_tensors, value_bits, value_group) = _operands(keys), _operands(values)
    sizes = {"HEAD_DIM": head_dim, "PARTS": parts, "LEAST": LEAST_PART, "BLOCK_N": block, "BLOCK_D": block_d}
    _part_kernel[requests * heads, parts](
        queries,
        *key_tensors,
        *value_tensors,
        req_to_token,
        req_pool_indices,
        seq_lens,
        sums,
        statistics,
        queries.stride(0),
        queries.stride(1),
        req_to_token.stride(0),
        scale,
        KEY_BITS=key_bits,
        KEY_GROUP=key_group,
        VALUE_BITS=value_bits,
        VALUE_GROUP=value_group,
        HEADS=heads,
        GROUP=query_heads // heads,
        BLOCK_M=max(16, triton.next_power_of_2(query_heads // heads)),
        **sizes,
        num_warps=4,
        num_stages=3,  # slots are read a tile ahead of their rows
        enable_fp_fusion=False,  # a row is then the same as where PyTorch unpacks it
    )
    _reduce_kernel[requests * query_heads,](
        sums,
        statistics,
        seq_lens,
        output,
        scale,
        QUERY_HEADS=query_heads,
        BLOCK_PARTS=triton.next_power_of_2(parts),
        **sizes,
        num_warps=4,
    )
