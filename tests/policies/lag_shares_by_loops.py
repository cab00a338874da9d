"""LagKV's measure for one head, in Python floats (fp64) and one partition at a time."""

from __future__ import annotations

import itertools
from statistics import stdev

import torch

from tests.kernels.attention_by_loops import softmax


def shares_by_loops(x: torch.Tensor, lag: int) -> list[list[float]]:
    """``[P * lag, D]`` to the shares of the tokens of all partitions but the last."""
    rows = [row.tolist() for row in x.double()]
    partitions = [rows[first : first + lag] for first in range(0, len(rows), lag)]
    shares = []
    for partition, reference in itertools.pairwise(partitions):
        ranges = [(min(channel), max(channel)) for channel in zip(*reference, strict=True)]
        scaled = [[(v - low) / (high - low) for v, (low, high) in zip(row, ranges, strict=True)] for row in partition]
        shares.append(softmax([stdev(row) for row in scaled]))
    return shares
