"""LagKV's measure: how unevenly a token's channels lie in the ranges of the partition after its own."""

from __future__ import annotations

import math

import torch

# Least range of a channel. The published code has none: a channel that is constant in a partition makes it divide by 0.
LEAST_RANGE = 1e-6


def lag_relative_share(x: torch.Tensor, lag: int) -> torch.Tensor:
    """A token's share of its partition, by the standard deviation of its channels.

    Partitions are `lag` tokens in a row. Each channel is shifted and scaled so that the next partition's tokens lie
    between 0 and 1; of these numbers the standard deviation over a token's channels is taken (``D - 1``), and the
    softmax of that over the partition.

    Parameters
    ----------
    x : ``[..., P * lag, D]``
        Keys or values, any float dtype, oldest first; computed in fp32.

    Returns
    -------
    fp32 ``[..., P - 1, lag]``: the last partition has none after it.
    """
    if x.dim() > 2:  # head by head: what one needs stays in the caches, which is several times as fast
        return torch.stack([lag_relative_share(each, lag) for each in x])
    partitions = x.float().reshape(-1, lag, x.shape[-1])
    smallest, largest = partitions[1:].amin(dim=-2, keepdim=True), partitions[1:].amax(dim=-2, keepdim=True)
    scaled = (partitions[:-1] - smallest) / (largest - smallest).clamp_min(LEAST_RANGE)
    centred = scaled.sub_(scaled.mean(dim=-1, keepdim=True))
    deviation = torch.linalg.vector_norm(centred, dim=-1) / math.sqrt(x.shape[-1] - 1)
    share: torch.Tensor = deviation.softmax(dim=-1)
    return share
