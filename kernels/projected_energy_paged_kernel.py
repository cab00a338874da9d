# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of :mod:`kvpolicy.kernels.projected_energy_paged`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpolicy.kernels.paged import Pool, Rows

# Tensor cores read the leading 11 bits of an fp32 number. But 24 bits are three times the 8 of bf16, whose products are
# exact in fp32: the projection is three matrices of bf16, and a key or value as many parts as its dtype has bits for.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
# The tile of an instruction of 4 warps on an H100 or H200. Of bf16 with 128 channels, the dtype that these were chosen
# for, the next keys and values are on their way while 88 KiB of shared memory hold the present ones and the projection:
# two programs to a multiprocessor. Of longer dtypes that would be too much.
BLOCK_T = 64
WARPS = 4
STAGES = {torch.bfloat16: 2, torch.float16: 1, torch.float32: 1}
ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _leading(b_x):
    """The leading 8 bits of fp32 numbers, as bf16; towards 0, so that what is left has the same sign."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _energy(p_x, m_x, b_first, b_second, b_third, m_rank, PARTS: tl.constexpr):
    """``sum_r (x G)_r^2`` of a tile ``[BLOCK_T, BLOCK_D]``, ``G = b_first + b_second + b_third``."""
    b_x = tl.load(p_x, mask=m_x, other=0)
    b_part = b_x
    if PARTS > 1:
        b_x = b_x.to(tl.float32)
        b_part = _leading(b_x)
    b_product = tl.dot(b_part, b_third)
    b_product = tl.dot(b_part, b_second, acc=b_product)
    b_product = tl.where(b_product == b_product, b_product, 0.0)  # an infinity times a part of G that is 0
    b_product = tl.dot(b_part, b_first, acc=b_product)
    for _ in tl.static_range(1, PARTS):
        b_x -= b_part.to(tl.float32)
        b_x = tl.where(b_x == b_x, b_x, 0.0)  # nothing is left of an infinity
        b_part = _leading(b_x)
        b_product = tl.dot(b_part, b_third, acc=b_product)
        b_product = tl.dot(b_part, b_second, acc=b_product)
        b_product = tl.dot(b_part, b_first, acc=b_product)
    b_product = tl.where(m_rank, b_product, 0.0)  # an infinity times a column that is not there
    return tl.sum(b_product * b_product, axis=1)


@triton.jit(do_not_specialize=["T"])  # the number of tokens is never the same twice
def _projected_energy_kernel(
    p_key_addresses,  # where the buffer of each layer begins
    p_value_addresses,
    p_slots,
    p_starts,
    p_projection,  # [R, L, D, RANK]
    p_energies,  # [L, H, T]
    T,
    L: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    RANK: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
):
    i_request = tl.program_id(1).to(tl.int64)
    i_layer = tl.program_id(2).to(tl.int64)
    begin = tl.load(p_starts + i_request)
    end = tl.load(p_starts + i_request + 1)
    first = begin + tl.program_id(0).to(tl.int64) * BLOCK_T
    if first >= end:
        return  # this request is shorter than the longest
    o_token = first + tl.arange(0, BLOCK_T)
    o_channel = tl.arange(0, BLOCK_D)
    o_rank = tl.arange(0, BLOCK_R)
    m_token = o_token < end
    m_x = m_token[:, None] & (o_channel < D)[None, :]
    m_rank = (o_rank < RANK)[None, :]
    p_projection += (i_request * L + i_layer) * (D * RANK)
    p_matrix = p_projection + o_channel[:, None] * RANK + o_rank[None, :]
    b_matrix = tl.load(p_matrix, mask=(o_channel < D)[:, None] & m_rank, other=0)
    b_first = _leading(b_matrix)
    b_matrix -= b_first.to(tl.float32)
    b_second = _leading(b_matrix)
    b_third = (b_matrix - b_second.to(tl.float32)).to(tl.bfloat16)
    # Allocators align buffers to more than the 16 bytes of the widest load; the host asserts it.
    p_keys = tl.multiple_of(tl.load(p_key_addresses + i_layer).to(tl.pointer_type(ELEMENT)), 16)
    p_values = tl.multiple_of(tl.load(p_value_addresses + i_layer).to(tl.pointer_type(ELEMENT)), 16)
    b_slot = tl.load(p_slots + o_token, mask=m_token, other=0)
    o_x = (b_slot * (H * D))[:, None] + o_channel[None, :]
    p_energies += i_layer * H * T + o_token
    for i_head in range(H):
        b_key_energy = _energy(p_keys + o_x + i_head * D, m_x, b_first, b_second, b_third, m_rank, PARTS)
        b_value_energy = _energy(p_values + o_x + i_head * D, m_x, b_first, b_second, b_third, m_rank, PARTS)
        tl.store(p_energies, b_key_energy * b_value_energy, mask=m_token)
        p_energies += T


def launch(keys: Pool, values: Pool, rows: Rows, projection: torch.Tensor, energies: torch.Tensor) -> None:
    """Fill `energies` ``[L, H, T]``, which must not be empty."""
    layers, heads, tokens = energies.shape
    requests, _, head_dim, rank = projection.shape
    _projected_energy_kernel[triton.cdiv(rows.longest, BLOCK_T), requests, layers](
        keys.addresses,
        values.addresses,
        rows.slots,
        rows.starts,
        projection,
        energies,
        tokens,
        L=layers,
        H=heads,
        D=head_dim,
        RANK=rank,
        ELEMENT=ELEMENTS[keys.dtype],
        BLOCK_T=BLOCK_T,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        PARTS=PARTS[keys.dtype],
        num_warps=WARPS,
        num_stages=STAGES[keys.dtype],
    )
