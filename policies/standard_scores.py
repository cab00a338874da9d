"""Scores in standard deviations, so that those of different heads, layers and methods can be compared and added."""

from __future__ import annotations

import torch

SMALLEST_DEVIATION = 1e-6  # TriAttention's; scores that are all equal become 0


def standard_scores(scores: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """``(score - mean) / deviation`` per row, mean and population deviation being those of the tokens `among`.

    A score that is infinite or NaN stays so and counts for neither, so that it does not spoil the others.

    Parameters
    ----------
    scores : float ``[..., N]``
    among : bool, broadcasts to ``[..., N]``
        Where a row has none of them, all of its tokens count.

    Returns
    -------
    ``[..., N]`` in the dtype of `scores`.
    """
    finite = scores.isfinite()
    counted = finite & among
    counted = torch.where(counted.any(dim=-1, keepdim=True), counted, finite)
    count = counted.sum(dim=-1, keepdim=True).clamp_min(1)
    mean = torch.where(counted, scores, 0).sum(dim=-1, keepdim=True) / count
    centred = scores - mean
    variance = torch.where(counted, centred, 0).square().sum(dim=-1, keepdim=True) / count
    return centred / variance.sqrt().clamp_min(SMALLEST_DEVIATION)
