"""Projected key and value energy: the token score shared by VaSE-DKV and CurDKV."""

from __future__ import annotations

import math

import torch

from kvpolicy.kernels.compact import PagedTokens

BLOCK_ROWS = 512  # at most, in the matrix products of a CPU's threads


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


def projected_energy(
    keys: torch.Tensor | PagedTokens, values: torch.Tensor | PagedTokens, projection: torch.Tensor
) -> torch.Tensor:
    """The same as :func:`projected_energy_reference`, layer by layer: what is copied stays in the caches of a CPU."""
    assert keys.shape == values.shape, f"{keys.shape = } must equal {values.shape = }"
    assert len(keys.shape) == 4, f"{keys.shape = } must be [L, H, N, D]"
    expected = (keys.shape[0], keys.shape[-1])
    assert projection.shape[:2] == expected, f"{projection.shape = } must begin with {expected}"
    layers, heads, tokens, head_dim = keys.shape
    # All heads share the projection: a layer is one matrix of rows, one per token and head, cut into equal blocks that
    # are multiplied side by side. Products lie as [r, rows], for the sum over r is fast then.
    count, threads = tokens * heads, torch.get_num_threads()
    blocks = threads * max(1, math.ceil(count / (BLOCK_ROWS * threads)))
    size = math.ceil(count / blocks)
    rows = torch.zeros(blocks * size, head_dim, device=keys.device)  # the last few belong to no token
    by_token, columns = rows[:count].view(tokens, heads, head_dim), rows.view(blocks, size, head_dim).mT
    products = torch.empty(2, blocks, projection.shape[-1], size, device=keys.device)
    energies = torch.empty(layers, 2, blocks, size, device=keys.device)
    matrices = projection.float().mT[:, None].expand(-1, blocks, -1, -1)
    for *both, matrix, energy in zip(keys, values, matrices, energies, strict=True):
        for tokens_of_layer, product in zip(both, products, strict=True):
            by_token.copy_(tokens_of_layer.transpose(0, 1))
            torch.bmm(matrix, columns, out=product)
        torch.sum(products.square_(), dim=2, out=energy)
    of_keys, of_values = energies.view(layers, 2, -1)[:, :, :count].unbind(dim=1)
    return (of_keys * of_values).view(layers, tokens, heads).transpose(1, 2).contiguous()
