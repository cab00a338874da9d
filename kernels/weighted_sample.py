"""Weighted sampling without replacement as a top-k over perturbed log weights (Gumbel top-k)."""

from __future__ import annotations

import torch

SMALLEST_WEIGHT = 1e-300  # what a weight of zero counts as: drawn only when all positive ones are


def weighted_sample(weights: torch.Tensor, draws: int, uniform: torch.Tensor) -> torch.Tensor:
    """Indices of `draws` distinct items per row, as if drawn one after the other in proportion to `weights`.

    The `draws` largest of ``log w - log(-log u)`` have the distribution of successive draws without
    replacement (Kool, van Hoof and Welling 2019, arXiv 1903.06059), which is what
    ``torch.multinomial(weights, draws)`` samples, with one top-k and no state.

    Parameters
    ----------
    weights : ``[..., N]`` float, not negative
        Need not add up to 1. Zeros are drawn only once no positive weight is left.
    draws : int
        At most N.
    uniform : ``[..., N]`` fp64 in (0, 1)
        The randomness: equal numbers, equal sample.

    Returns
    -------
    int64 ``[..., draws]``, in order of the draws.
    """
    assert weights.shape == uniform.shape, f"{weights.shape = } must equal {uniform.shape = }"
    assert uniform.dtype == torch.float64, f"{uniform.dtype = } must be float64: fp32 noise repeats among many items"
    assert 0 <= draws <= weights.shape[-1], f"{draws = } of {weights.shape[-1]} items"
    return gumbel_keys(weights, uniform).topk(draws, dim=-1).indices


def gumbel_keys(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """``log w - log(-log u)``, fp64 of the shape of `weights`; the largest are the sample."""
    return weights.double().clamp_min(SMALLEST_WEIGHT).log() - (-uniform.log()).log()
