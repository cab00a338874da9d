"""Triton kernel of :mod:`kvpolicy.kernels.keep_highest_paged`; imported where it is launched."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _ordered_keys(
    p_row: tl.tensor,
    o_tokens: tl.tensor,
    tokens: tl.tensor,
    sinks: tl.tensor,
    recent: tl.tensor,
    KEY: tl.constexpr,
    SIGN: tl.constexpr,
    INFINITY: tl.constexpr,
) -> tl.tensor:
    """Unsigned integers in the order of the scores; 0, which is no score's, past the end of the row."""
    b_keys = tl.load(p_row + o_tokens, mask=o_tokens < tokens, other=0.0).to(KEY, bitcast=True)
    b_keys = tl.where(b_keys == SIGN, 0, b_keys)  # -0.0 equals 0.0
    b_keys = tl.where((b_keys & (SIGN - 1)) > INFINITY, INFINITY - 1, b_keys)  # NaN: the largest finite number
    b_keys = tl.where((o_tokens < sinks) | (o_tokens >= tokens - recent), INFINITY, b_keys)
    b_keys = tl.where(b_keys >= SIGN, b_keys ^ (2 * SIGN - 1), b_keys | SIGN)
    return tl.where(o_tokens < tokens, b_keys, 0)


@triton.jit(do_not_specialize=["heads", "kept", "sinks", "stride_layer", "stride_head"])
def _keep_highest_kernel(
    p_scores: tl.tensor,
    p_starts: tl.tensor,
    p_recent: tl.tensor,
    p_kept_starts: tl.tensor,
    p_kept: tl.tensor,
    heads: tl.tensor,
    kept: tl.tensor,
    sinks: tl.tensor,
    stride_layer: tl.tensor,
    stride_head: tl.tensor,
    USE_FP64: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per request, layer and head finds its n-th highest key, two bits at a time, then writes."""
    KEY: tl.constexpr = tl.uint64 if USE_FP64 else tl.uint32
    BITS: tl.constexpr = 64 if USE_FP64 else 32
    INFINITY: tl.constexpr = 0x7FF0000000000000 if USE_FP64 else 0x7F800000
    SIGN: tl.constexpr = 1 << (BITS - 1)
    COUNT_BITS: tl.constexpr = 21  # three counts of tokens share one 64-bit sum
    COUNT: tl.constexpr = (1 << COUNT_BITS) - 1
    i_request = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(1).to(tl.int64)
    start = tl.load(p_starts + i_request)
    tokens = tl.load(p_starts + i_request + 1) - start
    kept_start = tl.load(p_kept_starts + i_request)
    n_keep = tl.load(p_kept_starts + i_request + 1) - kept_start
    recent = tl.load(p_recent + i_request)
    p_row = p_scores + (i_row // heads) * stride_layer + (i_row % heads) * stride_head + start
    p_out = p_kept + i_row * kept + kept_start

    # The highest threshold that n_keep keys reach. `above` keys exceed all that share its bits so far; if just n_keep
    # reach it, its other bits do not matter.
    threshold = tl.full((), 0, KEY)
    step = tl.full((), 1 << (BITS - 2), KEY)
    above = tl.full((), 0, tl.int64)
    reached = tokens
    while (step > 0) & (reached != n_keep):
        b_counts = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, tokens, BLOCK):
            o_tokens = first + tl.arange(0, BLOCK)
            b_keys = _ordered_keys(p_row, o_tokens, tokens, sinks, recent, KEY, SIGN, INFINITY)
            b_counts += (b_keys >= threshold + step).to(tl.int64)
            b_counts += (b_keys >= threshold + 2 * step).to(tl.int64) << COUNT_BITS
            b_counts += (b_keys >= threshold + 3 * step).to(tl.int64) << (2 * COUNT_BITS)
        counts = tl.sum(b_counts, 0)
        one, two, three = counts & COUNT, (counts >> COUNT_BITS) & COUNT, counts >> (2 * COUNT_BITS)
        # They fall: the digit is how many of them are at least n_keep.
        above = tl.where(one < n_keep, one, tl.where(two < n_keep, two, tl.where(three < n_keep, three, above)))
        reached = tl.where(three >= n_keep, three, tl.where(two >= n_keep, two, tl.where(one >= n_keep, one, reached)))
        digit = (one >= n_keep).to(KEY) + (two >= n_keep).to(KEY) + (three >= n_keep).to(KEY)
        threshold += digit * step
        step >>= 2

    # Of keys equal to the threshold the first stay. One prefix sum counts them and, 32 bits up, the higher ones.
    room = n_keep - above
    seen = tl.full((), 0, tl.int64)
    for first in range(0, tokens, BLOCK):
        o_tokens = first + tl.arange(0, BLOCK)
        b_keys = _ordered_keys(p_row, o_tokens, tokens, sinks, recent, KEY, SIGN, INFINITY)
        b_above, b_equal = b_keys > threshold, (b_keys == threshold) & (o_tokens < tokens)
        b_pair = (b_above.to(tl.int64) << 32) + b_equal.to(tl.int64)
        b_seen = seen + tl.cumsum(b_pair, 0)
        b_ties = b_seen & 0xFFFFFFFF
        o_kept = (b_seen >> 32) + tl.minimum(b_ties, room) - 1
        tl.store(p_out + o_kept, o_tokens, mask=b_above | (b_equal & (b_ties <= room)))
        seen += tl.sum(b_pair, 0)
