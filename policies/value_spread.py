"""How far a token's value vector spreads: the measures that VaSE protects tokens by, or could."""

from __future__ import annotations

from typing import Literal

import torch

from kvpolicy.kernels.value_range import value_range

Measure = Literal["range", "variance", "l2"]


def value_spread(values: torch.Tensor, measure: Measure) -> torch.Tensor:
    """``[..., N, D]`` to ``[..., N]`` fp32, per token and KV head.

    range : largest minus smallest channel, VaSE's measure.
    variance, l2 : its ablations, variance over the channels (``1 / D``) and Euclidean norm.
    """
    if measure == "range":
        return value_range(values)
    values = values.float()
    return values.var(dim=-1, correction=0) if measure == "variance" else values.square().sum(dim=-1).sqrt()
