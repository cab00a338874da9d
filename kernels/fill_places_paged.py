"""Let the kept tokens of several requests stay where they are, in one launch."""

from __future__ import annotations

import torch

from kvpolicy.kernels.fill_places import fill_places_reference
from kvpolicy.kernels.paged import Rows

BLOCK, WARPS = 1024, 4  # places in a program; 8 in each thread


def fill_places_paged_reference(keep: torch.Tensor, destination: Rows) -> torch.Tensor:
    """The same as :func:`fill_places_paged`, request by request and place by place."""
    return torch.cat(
        [fill_places_reference(of_request) for of_request in torch.split(keep, list(destination.lengths), -1)], dim=-1
    )


def fill_places_paged(keep: torch.Tensor, destination: Rows) -> torch.Tensor:
    """What :func:`kvpolicy.kernels.fill_places.fill_places` gives for each request alone; nothing waits for the device.

    Whether a place is kept, and how many before it are, a program finds by bisection, for `keep` ascends.

    Parameters
    ----------
    keep : int64 ``[L, H, K]``
        Places in each request's own row, ascending; K counts the kept tokens of all requests, one after the other.
    destination : as many slots of each request as it keeps tokens
        Only their number is read.

    Returns
    -------
    int64 ``[L, H, K]``
    """
    from kvpolicy.kernels.fill_places_paged_kernel import _fill_places_kernel  # Triton is imported where it is used

    layers, heads, total = keep.shape
    assert keep.dtype == torch.int64, f"{keep.dtype = } must be int64"
    assert total == destination.total, f"{keep.shape = } must have {destination.total = } tokens"
    assert layers * heads < 2**16, f"{layers * heads = } must be below 65536"
    keep = keep if keep.stride(-1) == 1 or total == 1 else keep.contiguous()
    filled = torch.empty(layers, heads, total, dtype=torch.int64, device=keep.device)
    if filled.numel() > 0:
        tiles = -(-destination.longest // BLOCK)
        _fill_places_kernel[len(destination.lengths), layers * heads, tiles](
            keep,
            destination.starts,
            filled,
            heads,
            total,
            *keep.stride()[:2],
            1 << (destination.longest.bit_length() - 1),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return filled
