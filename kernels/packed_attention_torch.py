"""The CPU's side of :mod:`kvpolicy.kernels.packed_attention`: one request after the other, and only its own rows."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpolicy.kernels.packed_buffer import Buffer


def attend_by_request(
    queries: torch.Tensor,
    keys: Buffer,
    values: Buffer,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """As :func:`kvpolicy.kernels.packed_attention.packed_attention`; waits for the device, so meant for CPUs."""
    requests, query_heads, head_dim = queries.shape
    heads = keys.shape[1]
    # The query heads of a KV head are rows of one product.
    grouped = queries.view(requests, 1, heads, query_heads // heads, head_dim)
    output = queries.new_zeros(grouped.shape)
    for query, row, length, attended in zip(grouped, req_pool_indices.tolist(), seq_lens.tolist(), output, strict=True):
        if length:
            slots = req_to_token[row, :length].long()
            attended[:] = scaled_dot_product_attention(query, _rows(keys, slots), _rows(values, slots), scale=scaling)
    return output.view(queries.shape)


def _rows(buffer: Buffer, slots: torch.Tensor) -> torch.Tensor:
    """``[1, H, n, D]``."""
    if isinstance(buffer, torch.Tensor):
        # On a CPU `buffer[slots]` takes several times as long.
        rows = buffer.flatten(1).index_select(0, slots).view(len(slots), *buffer.shape[1:])
    else:
        rows = buffer.read(slots)
    return rows.transpose(0, 1).unsqueeze(0)
