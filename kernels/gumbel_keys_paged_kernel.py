"""Triton kernel of :mod:`kvpolicy.kernels.gumbel_keys_paged`; imported where it is launched."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _absorb(state: tl.tensor, key: tl.tensor) -> tl.tensor:
    """One key into a uint64 hash, as in :func:`kvpolicy.kernels.keyed_noise.hash_keys`."""
    x = (state ^ tl.cast(tl.cast(key, tl.int64), tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["heads", "total", "stride_layer", "stride_head", "first_head", "stream"])
def _gumbel_keys_kernel(
    p_weights: tl.tensor,
    p_starts: tl.tensor,
    p_seeds: tl.tensor,
    p_evictions: tl.tensor,
    p_layers: tl.tensor,
    p_keys: tl.tensor,
    heads: tl.tensor,
    total: tl.tensor,
    stride_layer: tl.tensor,
    stride_head: tl.tensor,
    first_head: tl.tensor,
    stream: tl.tensor,
    SMALLEST: tl.constexpr,
    USE_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per tile of tokens, request, layer and head."""
    i_request = tl.program_id(1).to(tl.int64)
    i_row = tl.program_id(2).to(tl.int64)
    i_layer, i_head = i_row // heads, i_row % heads
    start = tl.load(p_starts + i_request)
    tokens = tl.load(p_starts + i_request + 1) - start
    o_tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_tokens = o_tokens < tokens

    state = _absorb(tl.full((), 0, tl.uint64), tl.load(p_seeds + i_request))
    state = _absorb(state, tl.load(p_evictions + i_request))
    state = _absorb(state, tl.load(p_layers + i_layer))
    state = _absorb(state, i_head + first_head)
    b_hash = _absorb(_absorb(state, o_tokens), stream)
    # The upper 52 bits and a half: exact in fp64, as is the product with a power of two.
    b_key = ((b_hash >> 12).to(tl.float64) + 0.5) * 2.0**-52
    if USE_WEIGHTS:
        p_row = p_weights + i_layer * stride_layer + i_head * stride_head + start
        b_weight = tl.load(p_row + o_tokens, mask=m_tokens, other=1.0).to(tl.float64)
        b_weight = tl.where(b_weight < SMALLEST, SMALLEST, b_weight)
        b_key = tl.log(b_weight) - tl.log(-tl.log(b_key))
    tl.store(p_keys + i_row * total + start + o_tokens, b_key, mask=m_tokens)
