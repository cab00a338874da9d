"""Redundancy of the keys of one head as its docstring says it: all N * N cosines in fp64, and the rule row by row."""

from __future__ import annotations

import math

import torch

# No cosine of the test's keys is nearer to a threshold, so that rounding does not decide.
CLEAR = 1e-6


def redundancy_by_loops(keys: torch.Tensor, threshold: float | None) -> list[float]:
    """``[N, D]`` to N means."""
    units = keys.double() / (keys.double().norm(dim=-1, keepdim=True) + 1e-8)
    similarity: list[list[float]] = (units @ units.T).fill_diagonal_(0).tolist()
    if threshold is not None:
        assert all(abs(entry - threshold) > CLEAR for row in similarity for entry in row)
        for row in similarity:
            row[max((j for j, entry in enumerate(row) if entry > threshold), default=0)] = 0.0
    return [math.fsum(column) / len(similarity) for column in zip(*similarity, strict=True)]
