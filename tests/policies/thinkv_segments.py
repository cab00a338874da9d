"""Candidates of complete segments with a sparsity that is given."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvpolicy.policies.base import Candidates
from tests.policies.candidates import random_candidates


def synthetic(sparsity: list[float], newest: int, *, previous_len: int = 0, layers: int = 2) -> Candidates:
    """Complete segments of 16 tokens of that `sparsity`, and `newest` tokens of the next; three heads."""
    tokens = 16 * len(sparsity) + newest
    values = torch.tensor([*sparsity, 0.5]).repeat_interleave(16)[:tokens]
    return replace(
        random_candidates(layers, 3, tokens, 60),
        positions=torch.arange(tokens).expand(layers, 3, tokens),
        statistic=values.expand(layers, 3, tokens),
        true_len=tokens,
        previous_len=previous_len,
    )
