"""Random keys and values whose tokens differ clearly in norm, as in real caches."""

from __future__ import annotations

import torch

from kvpolicy.policies.base import Candidates


def random_candidates(
    layers: int, heads: int, tokens: int, head_dim: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Candidates:
    """Gaussian rows, each token scaled by a log-normal factor, each channel by another."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        x = torch.randn(layers, heads, tokens, head_dim, generator=generator)
        token_scale = torch.randn(layers, heads, tokens, 1, generator=generator).mul(0.5).exp()
        channel_scale = torch.randn(layers, heads, 1, head_dim, generator=generator).mul(0.5).exp()
        return (x * token_scale * channel_scale).to(dtype)

    return Candidates(shape=(layers, heads, tokens), keys=draw(), values=draw())
