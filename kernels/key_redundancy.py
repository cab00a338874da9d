"""Redundancy of cached keys: how similar all the others are to each, on average. R-KV evicts by it."""

from __future__ import annotations

import torch

# Similarities of one layer that exist at once: few columns, as most rows find their newest similar key in these.
SIMILARITIES = 2**21
# Fixed point of the sums that leave keys uncounted: whole numbers add up to the same in any order, on a GPU too.
# Cosines are at most 1, so that sums over fewer than 2^22 keys fit into 63 bits.
SCALE = 2.0**40


def key_redundancy_reference(keys: torch.Tensor, *, threshold: float | None = None) -> torch.Tensor:
    """Mean over ``i`` of ``S[i, j]``, the cosine of keys ``i`` and ``j``, 0 for ``i = j``; holds all of ``S``.

    Parameters
    ----------
    keys : ``[L, H, N, D]``
        Any float dtype, oldest first; computed in fp32. Each is divided by its norm + 1e-8.
    threshold : float or None
        At least 0. Row ``i`` does not count its newest similar key: of its entries above the threshold the one with
        the largest ``j`` becomes 0, or the entry of the oldest key, ``j = 0``, where none is above it. None: all count.

    Returns
    -------
    ``[L, H, N]`` fp32, from -1 to 1. The mean is over all ``N`` rows, zeros included.
    """
    unit = _unit(keys)
    similarity = unit @ unit.transpose(-1, -2)
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    if threshold is not None:
        order = torch.arange(keys.shape[2], device=keys.device)
        newest = torch.where(similarity > threshold, order, 0).amax(dim=-1, keepdim=True)
        similarity.scatter_(-1, newest, 0)
    return similarity.mean(dim=-2)


def key_redundancy(keys: torch.Tensor, *, threshold: float | None = None) -> torch.Tensor:
    """The same as :func:`key_redundancy_reference`, one layer at a time and without ``N * N`` numbers.

    The sum of a column is the product of its key and the sum of all keys. Only the entries that a threshold leaves
    uncounted are looked for, from the newest key backwards and in the rows that have not found theirs, so that
    mostly few of the ``N * N`` similarities are computed. A similarity within rounding of the threshold may fall
    on its other side.
    """
    assert keys.dim() == 4, f"{keys.shape = } must be [L, H, N, D]"
    assert threshold is None or threshold >= 0, f"{threshold = } must not be negative: a key is not similar to itself"
    layers, heads, tokens, _ = keys.shape
    redundancy = torch.empty(layers, heads, tokens, dtype=torch.float32, device=keys.device)
    for layer in range(layers):
        unit = _unit(keys[layer])
        sums = (unit @ unit.sum(dim=1)[..., None]).squeeze(-1) - unit.square().sum(dim=-1)
        if threshold is not None:
            sums -= _uncounted(unit, threshold)
        redundancy[layer] = sums / tokens
    return redundancy


def _unit(keys: torch.Tensor) -> torch.Tensor:
    keys = keys.float()
    unit: torch.Tensor = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    return unit


def _uncounted(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    """``[H, N, D]`` to ``[H, N]``: per column, the sum of the entries that become 0."""
    newest = _newest_similar(unit, threshold)
    entries = (unit * unit.gather(1, newest[..., None].expand_as(unit))).sum(dim=-1)
    entries[:, :1].masked_fill_(newest[:, :1] == 0, 0)  # the diagonal is not counted to begin with
    fixed = entries.double().mul(SCALE).round().long()
    return torch.zeros_like(newest).scatter_add_(1, newest, fixed).double().div(SCALE).float()


def _newest_similar(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    """int64 ``[H, N]``: per key, the newest other one that is more similar than the threshold, else 0."""
    heads, tokens, head_dim = unit.shape
    newest = torch.zeros(heads, tokens, dtype=torch.int64, device=unit.device)
    # Keys that have found none, as many for each head: where a head has fewer, some that have are looked at again.
    order = torch.arange(tokens, device=unit.device)
    rows = order.expand(heads, tokens)
    end = tokens
    while end:
        first = max(0, end - max(1, SIMILARITIES // rows.numel()))
        columns = order[first:end].int()
        similarity = unit.gather(1, rows[..., None].expand(-1, -1, head_dim)) @ unit[:, first:end].transpose(1, 2)
        similar = (similarity > threshold) & (rows[..., None] != columns)
        found = torch.maximum(newest.gather(1, rows), torch.where(similar, columns, 0).amax(dim=-1).long())
        newest.scatter_(1, rows, found)
        searching = found == 0
        most = int(searching.sum(dim=-1).max())
        if not most:
            break
        rows = rows.gather(1, searching.byte().argsort(dim=-1, descending=True)[:, :most])
        end = first
    return newest
