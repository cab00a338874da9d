"""The Triton kernel of :mod:`kvpolicy.kernels.compact_paged`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpolicy.kernels.paged import Rows

# What a program moves at a time: 32 KiB in words of 8 bytes, 8 loads of 16 bytes in flight in each thread, so that the
# few programs of one request of a small model (180) keep the memory of an H100 or H200 busy.
TILE_WORDS = 4096
WARPS = 8
WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8}


@triton.jit(do_not_specialize=["FIRST", "T", "STRIDE_LAYER", "STRIDE_HEAD"])  # they vary from call to call
def _compact_kernel(
    p_table: tl.tensor,  # where each buffer begins
    p_slots: tl.tensor,
    p_row_starts: tl.tensor,
    p_keep: tl.tensor,
    p_destination: tl.tensor,
    p_destination_starts: tl.tensor,
    p_stage: tl.tensor,  # [buffers of this launch, H, T, W]
    FIRST: tl.tensor,  # first buffer of this launch
    STRIDE_LAYER: tl.tensor,  # of p_keep
    STRIDE_HEAD: tl.tensor,
    L: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,  # kept tokens of all requests
    W: tl.constexpr,  # words in a row of a head
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes that divide where each buffer begins
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    USE_POOL_READ: tl.constexpr,  # else rows come from the stage
    USE_POOL_WRITE: tl.constexpr,  # else rows go to the stage
) -> None:
    i_buffer, i_head = tl.program_id(0) // H, tl.program_id(0) % H
    i_request = tl.program_id(1)
    i_layer = ((FIRST + i_buffer) % L).to(tl.int64)
    p_pool = tl.load(p_table + FIRST + i_buffer).to(tl.pointer_type(WORD))
    p_pool = tl.multiple_of(p_pool, ALIGNMENT)
    begin = tl.load(p_destination_starts + i_request)
    n_keep = tl.load(p_destination_starts + i_request + 1) - begin
    p_slots += tl.load(p_row_starts + i_request)
    p_destination += begin
    p_keep += i_layer * STRIDE_LAYER + i_head.to(tl.int64) * STRIDE_HEAD + begin
    p_stage += ((i_buffer.to(tl.int64) * H + i_head) * T + begin) * W
    o_word = tl.arange(0, BLOCK_W)[None, :]
    for first in range(0, n_keep, BLOCK_T):
        o_rank = first + tl.arange(0, BLOCK_T)
        m_rank = o_rank < n_keep
        m_word = m_rank[:, None] & (o_word < W)
        p_staged = p_stage + (o_rank.to(tl.int64) * W)[:, None] + o_word
        if USE_POOL_READ:
            b_token = tl.load(p_keep + o_rank, mask=m_rank, other=0)
            if USE_POOL_WRITE:  # in place: a row that is where it belongs is not moved
                m_word = m_word & (b_token != o_rank)[:, None]
            b_slot = tl.load(p_slots + b_token, mask=m_rank, other=0)
            b_words = tl.load(p_pool + ((b_slot * H + i_head) * W)[:, None] + o_word, mask=m_word)
        else:
            b_words = tl.load(p_staged, mask=m_word)
        if USE_POOL_WRITE:
            b_slot = tl.load(p_destination + o_rank, mask=m_rank, other=0)
            if USE_POOL_READ:
                # A row that one warp writes may be the source of another's. Rows of later tiles are none of them.
                tl.debug_barrier()
            tl.store(p_pool + ((b_slot * H + i_head) * W)[:, None] + o_word, b_words, mask=m_word)
        else:
            tl.store(p_staged, b_words, mask=m_word)


def launch(
    table: torch.Tensor,
    first: int,
    rows: Rows,
    keep: torch.Tensor,
    destination: Rows,
    stage: torch.Tensor,
    width: int,
    alignment: int,
    *,
    read: bool,
    write: bool,
) -> None:
    """Move rows of `width` words between the buffers of `table` and `stage`, or within the buffers.

    table : int64 addresses of buffers, those of all layers of a pool one after the other, starting with layer 0.
    stage : ``[buffers, H, T, width]`` for those from the `first` on; its dtype is a word; empty if none is staged.
    alignment : bytes, of all addresses.
    """
    layers, heads, tokens = keep.shape
    buffers = len(table) if read and write else len(stage)
    block_words = triton.next_power_of_2(width)
    _compact_kernel[buffers * heads, len(rows.lengths)](
        table,
        rows.slots,
        rows.starts,
        keep,
        destination.slots,
        destination.starts,
        stage,
        first,
        keep.stride(0),
        keep.stride(1),
        layers,
        heads,
        tokens,
        W=width,
        WORD=WORDS[stage.dtype],
        ALIGNMENT=alignment,
        BLOCK_T=max(1, TILE_WORDS // block_words),
        BLOCK_W=block_words,
        USE_POOL_READ=read,
        USE_POOL_WRITE=write,
        num_warps=WARPS,
        num_stages=1,
    )
