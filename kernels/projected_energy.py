"""Projected key and value energy: the token score shared by VaSE-DKV and CurDKV."""

from __future__ import annotations

import torch


def projected_energy_reference(keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """``sum_r (k G)_r^2 * sum_r (v G)_r^2`` per token, written as the formula reads.

    Parameters
    ----------
    keys, values : ``[L, H, N, D]``
        Cached keys (after RoPE) and values, any float dtype; computed in fp32.
    projection : ``[L, D, r]``
        One matrix per layer, shared by all KV heads and by keys and values.

    Returns
    -------
    ``[L, H, N]`` fp32.
    """
    projection = projection.float()[:, None]
    return (keys.float() @ projection).square().sum(-1) * (values.float() @ projection).square().sum(-1)


def projected_energy(keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Host wrapper of :func:`projected_energy_reference`; asserts what a kernel would assume."""
    assert keys.shape == values.shape, f"{keys.shape = } must equal {values.shape = }"
    assert keys.dim() == 4, f"{keys.shape = } must be [L, H, N, D]"
    expected = (keys.shape[0], keys.shape[-1])
    assert projection.shape[:2] == expected, f"{projection.shape = } must begin with {expected}"
    return projected_energy_reference(keys, values, projection)
