"""Let kept tokens stay where they are: those from the end of a row fill the places of the evicted ones."""

from __future__ import annotations

import torch


def fill_places_reference(keep: torch.Tensor) -> torch.Tensor:
    """The same as :func:`fill_places`, one place after the other."""
    n_keep = keep.shape[-1]
    rows = []
    for row in keep.flatten(0, -2).tolist():
        from_the_end = iter([token for token in row if token >= n_keep])
        rows.append([place if place in row else next(from_the_end) for place in range(n_keep)])
    return torch.tensor(rows, dtype=torch.int64, device=keep.device).view(keep.shape)


def fill_places(keep: torch.Tensor) -> torch.Tensor:
    """The same tokens in an order that moves as few of them as can be.

    A request that keeps `K` tokens has its first `K` places left. A kept token among them stays in its place, and
    those from beyond take the places of evicted ones, both in ascending order. An eviction then moves as many rows as
    it evicts, in place of nearly all. Places are not in age order afterwards: only the oldest tokens that no head
    evicts are where they were, and what is appended later comes behind all others. It is for policies that need no
    more than that (:meth:`kvpolicy.policies.base.Policy.reads_order`).

    Parameters
    ----------
    keep : int64 ``[..., K]``
        Distinct places in a row, ascending.

    Returns
    -------
    int64 ``[..., K]``: entry `i` is `i` where that place is kept. Nothing waits for the device.
    """
    n_keep = keep.shape[-1]
    if n_keep == 0:
        return keep
    stays = torch.zeros(*keep.shape[:-1], n_keep + 1, dtype=torch.bool, device=keep.device)
    stays = stays.scatter_(-1, keep.clamp_max(n_keep), True)[..., :n_keep]  # those from beyond share the last entry
    places, staying = torch.arange(n_keep, device=keep.device), stays.cumsum(dim=-1)
    from_the_end = staying[..., -1:] + places - staying  # of an empty place: all that stay, and the empty ones before
    return torch.where(stays, places, keep.gather(-1, from_the_end.clamp_max_(n_keep - 1)))
