"""Move the kept rows of one layer's key or value buffer into their destination slots."""

from __future__ import annotations

import torch


def gather_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read whole tokens: ``buffer [S, H, D]``, ``slots [N]`` -> ``[H, N, D]``, every head the same tokens."""
    return buffer[slots].transpose(0, 1)


def compact_reference(buffer: torch.Tensor, row: torch.Tensor, keep: torch.Tensor, destination: torch.Tensor) -> None:
    """The same move, one element at a time, from a copy of the buffer."""
    before = buffer.clone()
    for head in range(keep.shape[0]):
        for i in range(keep.shape[1]):
            buffer[destination[i], head] = before[row[keep[head, i]], head]


def compact(buffer: torch.Tensor, row: torch.Tensor, keep: torch.Tensor, destination: torch.Tensor) -> None:
    """Write the token that head ``h`` keeps at rank ``i`` into slot ``destination[i]``, in place.

    After the call slot ``destination[i]`` holds, for each head, that head's own ``i``-th kept token:
    a slot stops belonging to one token. Source and destination slots may overlap: all rows are read
    before the first is written.

    Parameters
    ----------
    buffer : ``[S, H, D]``
        One layer's key or value pool, written in place.
    row : ``[N]`` int64
        The request's slots, oldest token first.
    keep : ``[H, K]`` int64
        Per KV head, indices into ``row``.
    destination : ``[K]`` int64
        Distinct slots.
    """
    heads, kept = keep.shape
    assert buffer.shape[1] == heads, f"{buffer.shape = } must have {heads = } heads"
    assert destination.shape == (kept,), f"{destination.shape = } must be ({kept},)"
    head_ids = torch.arange(heads, device=buffer.device)[:, None]
    buffer[destination] = buffer[row[keep], head_ids].transpose(0, 1)
