"""Decode attention of a batch over keys and values of which either, or both, are stored as low-bit codes."""

from __future__ import annotations

import torch

from kvpolicy.kernels.packed_attention_torch import attend_by_request
from kvpolicy.kernels.packed_buffer import Buffer, PackedBuffer, assert_for_kernels


def packed_attention_reference(
    queries: torch.Tensor,
    keys: Buffer,
    values: Buffer,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """fp32 ``[B, H_q, D]``: the definition, one query head after the other, over rows as :meth:`PackedBuffer.read`."""
    output = torch.zeros(queries.shape, device=queries.device)
    group = queries.shape[1] // keys.shape[1]
    for request, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        own_keys, own_values = keys[slots].float(), values[slots].float()
        for head, query in enumerate(queries[request].float()):
            weights = (own_keys[:, head // group] @ query * scaling).softmax(dim=0)
            output[request, head] = weights @ own_values[:, head // group]
    return output


def packed_attention(
    queries: torch.Tensor,
    keys: Buffer,
    values: Buffer,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    *,
    use_triton: bool | None = None,
) -> torch.Tensor:
    """Attention of one new token of each request over all its tokens; packed rows are unpacked as they are read.

    On a GPU in two launches, whatever the data, so that a CUDA graph can hold them: first over parts of each request's
    tokens, then over the parts (flash-decoding). What a request gets does not depend on what else is in the batch.
    Elsewhere PyTorch's attention takes one request after the other. Rows are those of :meth:`PackedBuffer.read`.

    Parameters
    ----------
    queries : ``[B, H_q, D]``
        After RoPE; query head ``h`` reads KV head ``h // G``, ``G = H_q / H_kv``.
    keys, values : ``[S, H_kv, D]`` in the dtype of the queries, tensors or :class:`PackedBuffer`; keys after RoPE
    req_to_token : int32 ``[R, N]``, slots of each row's tokens
    req_pool_indices : int64 or int32 ``[B]``, the row of each request
    seq_lens : int64 or int32 ``[B]``, tokens of each, its new one included
        A request without tokens gets 0.
    scaling : factor of q·k, positive
    use_triton : kernels, which on a CPU only Triton's interpreter can run; if None, kernels on a CUDA device alone.

    Returns
    -------
    ``[B, H_q, D]`` in the dtype of the queries, computed in fp32.
    """
    requests, query_heads, head_dim = queries.shape
    heads = keys.shape[1]
    assert keys.shape == values.shape, f"{keys.shape = } must be {values.shape = }"
    assert keys.shape[2] == head_dim, f"{keys.shape = } does not fit {queries.shape = }"
    assert query_heads % heads == 0, f"{query_heads = } must be a multiple of {heads = }"
    for name, buffer in (("keys", keys), ("values", values)):
        found, wanted = (buffer.dtype, buffer.device), (queries.dtype, queries.device)
        assert found == wanted, f"{name} are {found}, must be {wanted} as the queries"
    assert req_to_token.dtype == torch.int32, f"{req_to_token.dtype = } must be int32"
    for index in (req_pool_indices, seq_lens):
        assert index.shape == (requests,), f"{index.shape = } must be {requests = }"
        assert index.dtype in (torch.int32, torch.int64), f"{index.dtype = } must be int32 or int64"
    assert scaling > 0, f"{scaling = } must be positive"
    arguments = (queries, keys, values, req_to_token, req_pool_indices, seq_lens, scaling)
    if not (queries.is_cuda if use_triton is None else use_triton):
        return attend_by_request(*arguments)
    for buffer in (keys, values):
        if isinstance(buffer, PackedBuffer):
            assert_for_kernels(buffer)
        else:
            assert buffer.is_contiguous(), f"{buffer.stride() = } must be those of a contiguous buffer"
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if output.numel():
        from kvpolicy.kernels import packed_attention_kernel  # needs Triton, which importing this file does not

        packed_attention_kernel.launch(*arguments, output)
    return output
