"""Triton kernel of :mod:`kvpolicy.kernels.fill_places_paged`; imported where it is launched."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _count_below(p_row: tl.tensor, b_wanted: tl.tensor, length: tl.tensor, step: tl.tensor) -> tl.tensor:
    """How many numbers of an ascending row are below each wanted one; `step` is a power of two, and
    `length` less than twice as much."""
    b_count = tl.zeros_like(b_wanted)
    while step > 0:
        b_next = b_count + step
        b_last = tl.load(p_row + b_next - 1, mask=b_next <= length, other=0)
        b_count = tl.where((b_next <= length) & (b_last < b_wanted), b_next, b_count)
        step >>= 1
    return b_count


@triton.jit(do_not_specialize=["heads", "total", "stride_layer", "stride_head", "step"])
def _fill_places_kernel(
    p_keep: tl.tensor,
    p_starts: tl.tensor,
    p_filled: tl.tensor,
    heads: tl.tensor,
    total: tl.tensor,  # kept tokens of all requests
    stride_layer: tl.tensor,  # of p_keep
    stride_head: tl.tensor,
    step: tl.tensor,  # the largest power of two that is no more than the longest row
    BLOCK: tl.constexpr,
) -> None:
    """One program per request, layer and head, and BLOCK places."""
    i_request = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    start = tl.load(p_starts + i_request)
    n_keep = tl.load(p_starts + i_request + 1) - start
    first = tl.program_id(2).to(tl.int64) * BLOCK
    if first < n_keep:
        p_row = p_keep + (i_row // heads) * stride_layer + (i_row % heads) * stride_head + start
        o_place = first + tl.arange(0, BLOCK)
        m_place = o_place < n_keep
        staying = tl.max(_count_below(p_row, tl.full((1,), 0, tl.int64) + n_keep, n_keep, step), 0)
        b_before = _count_below(p_row, o_place, n_keep, step)
        b_found = tl.load(p_row + b_before, mask=m_place & (b_before < n_keep), other=-1)
        b_stays = b_found == o_place
        # An empty place takes, of the tokens from beyond, the one that as many precede as empty places precede it.
        o_from_the_end = staying + o_place - b_before
        b_mover = tl.load(p_row + o_from_the_end, mask=m_place & ~b_stays, other=0)
        tl.store(p_filled + i_row * total + start + o_place, tl.where(b_stays, o_place, b_mover), mask=m_place)
