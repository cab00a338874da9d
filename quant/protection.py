"""Which tokens' values lose most to low-bit storage, and should keep 16 bits: those whose values spread most."""

from __future__ import annotations

import torch

from kvpolicy.kernels.value_range import value_range


def widest(ranges: torch.Tensor, count: int) -> torch.Tensor:
    """int64 ``[..., count]``: where the `count` largest of ``ranges [..., N]`` are, ascending; the older of equals."""
    tokens = ranges.shape[-1]
    assert 0 <= count <= tokens, f"{count = } of {tokens} tokens"
    order = ranges.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def protected_tokens(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` tokens of largest value range, per layer and KV head.

    The error of an asymmetric low-bit code grows with the range that a token's channels span: the same measure by which
    VaSE (arXiv 2606.03928) decides what must not be evicted, and the same operation.

    Parameters
    ----------
    values : ``[..., N, D]``
        Any float dtype. Sinks and recent tokens, which keep 16 bits anyway, are not among them.
    count : int
        At most N.

    Returns
    -------
    int64 ``[..., count]``, ascending; of equal ranges the older token.
    """
    return widest(value_range(values), count)
