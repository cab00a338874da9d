"""Indices of the highest scores of every request, layer and head, in one launch and without sorting rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpolicy.kernels.paged import Rows, starts_of

# Keys of a tile: 8 in each thread of 8 warps. A row of 4K tokens is three tiles, which stay in an SM's L1 cache.
BLOCK, WARPS = 2048, 8
# The kernel adds three counts of at most 21 bits in one 64-bit number.
MOST_TOKENS = 2**21 - 1


class Kept(NamedTuple):
    """indices : int64 ``[L, H, K]``, of all requests one after the other; starts : int64 ``[R + 1]``."""

    indices: torch.Tensor
    starts: torch.Tensor


def keep_highest_paged_reference(
    scores: torch.Tensor, rows: Rows, n_keep: Sequence[int], *, sinks: int, recent: Sequence[int]
) -> Kept:
    """The same as :func:`keep_highest_paged`, by a stable sort of each request's scores."""
    indices, start = [], 0
    for tokens, wanted, newest in zip(rows.lengths, n_keep, recent, strict=True):
        highest = torch.finfo(scores.dtype).max
        row = scores[..., start : start + tokens].nan_to_num(nan=highest, posinf=torch.inf, neginf=-torch.inf)
        row[..., :sinks] = torch.inf
        row[..., tokens - newest :] = torch.inf
        order = row.sort(dim=-1, descending=True, stable=True).indices
        indices.append(order[..., :wanted].sort(dim=-1).values)
        start += tokens
    return Kept(torch.cat(indices, dim=-1), starts_of(n_keep, scores.device))


def keep_highest_paged(
    scores: torch.Tensor, rows: Rows, n_keep: Sequence[int], *, sinks: int, recent: Sequence[int]
) -> Kept:
    """Per request, layer and head the `n_keep` highest scores of its row, sinks and recent tokens always among them.

    What ``policies.selecting.keep_highest`` gives for each request alone, index by index: of equal scores the first
    stay, -0.0 equals 0.0, NaN counts as the largest finite number, and a score of infinity as high as a sink.
    Each row is read once per two bits that tell its scores apart, and once more to write; only whole numbers are
    added, so nothing depends on an order of execution. Nothing waits for the device.

    Parameters
    ----------
    scores : fp32 or fp64 ``[L, H, T]``, oldest token of each request first
        Any strides of layers and heads, 0 included; tokens adjacent.
    rows : T tokens in all; fewer than 2**21 in each row
        Its slots are not read.
    n_keep : per request, tokens to keep; ``sinks + recent <= n_keep <= N``
    sinks : int
        Oldest tokens that are kept whatever their score; all, of a row that has fewer.
    recent : per request, newest tokens that are kept whatever their score

    Returns
    -------
    :class:`Kept`; indices count from the beginning of each request's own row and ascend.
    """
    from kvpolicy.kernels.keep_highest_paged_kernel import _keep_highest_kernel  # Triton is imported where it is used

    layers, heads, total = scores.shape
    assert scores.dtype in (torch.float32, torch.float64), f"{scores.dtype = } must be float32 or float64"
    assert total == rows.total, f"{scores.shape = } must have {rows.total = } tokens"
    assert scores.stride(-1) == 1 or total <= 1, f"{scores.stride() = }: tokens must be adjacent"
    assert rows.longest <= MOST_TOKENS, f"{rows.longest = } must be at most {MOST_TOKENS = }"
    assert layers * heads < 2**16, f"{layers * heads = } must be below 65536"
    assert sinks >= 0, f"{sinks = } must not be negative"
    for tokens, wanted, newest in zip(rows.lengths, n_keep, recent, strict=True):
        fits = newest >= 0 and min(sinks, tokens) + newest <= wanted <= tokens
        assert fits, f"{sinks = } + recent = {newest} <= n_keep = {wanted} <= N = {tokens} must hold"
    starts = starts_of(n_keep, scores.device)
    indices = torch.empty(layers, heads, sum(n_keep), dtype=torch.int64, device=scores.device)
    if indices.numel() > 0:
        newest_of = torch.tensor(recent, dtype=torch.int64).to(scores.device, non_blocking=True)
        _keep_highest_kernel[len(rows.lengths), layers * heads](
            scores,
            rows.starts,
            newest_of,
            starts,
            indices,
            heads,
            indices.shape[-1],
            sinks,
            *scores.stride()[:2],
            USE_FP64=scores.dtype == torch.float64,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return Kept(indices, starts)
