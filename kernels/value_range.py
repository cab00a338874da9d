"""Value range per token: how far a token's value vector spreads over its channels."""

from __future__ import annotations

import torch


def value_range_reference(values: torch.Tensor) -> torch.Tensor:
    """``max_d v - min_d v``, written as the formula reads.

    Parameters
    ----------
    values : ``[..., N, D]``
        Cached values, any float dtype; computed in fp32.

    Returns
    -------
    ``[..., N]`` fp32.
    """
    values = values.float()
    return values.max(dim=-1).values - values.min(dim=-1).values


def value_range(values: torch.Tensor) -> torch.Tensor:
    """The same as :func:`value_range_reference`; the difference alone is taken in fp32.

    Extremes are exact in any dtype, so only ``[..., N]`` numbers are converted, not all of `values`.
    """
    assert values.is_floating_point(), f"{values.dtype = } must be a float dtype"
    smallest, largest = values.aminmax(dim=-1)
    return largest.float() - smallest.float()
