"""Window attention of several requests in the paged cache, all layers and heads at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.window_attention import Domain, Group, Pooling, window_attention_reference


def window_attention_paged_reference(
    queries: torch.Tensor,
    keys: Pool,
    rows: Rows,
    older: Sequence[int],
    *,
    domain: Domain,
    group: Group,
    pooling: Pooling,
    kernel: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """:func:`window_attention_reference` request by request, and +inf for the tokens that are not scored.

    Parameters
    ----------
    queries : ``[R, L, H_q, w, D]``
        The newest ``w`` queries of each request, after RoPE, oldest first; in the dtype of `keys`.
    keys : ``L`` buffers ``[S, H_kv, D]``
        After RoPE; ``H_q`` is a multiple of ``H_kv``.
    rows : slots of the ``R`` requests, ``T`` in all
    older : tokens of each request that are scored, its first
        At most its length less ``w``; 0 for a request without tokens.
    domain, group, pooling, kernel, temperature
        See :func:`window_attention_reference`. Neighbours are those of the same request.

    Returns
    -------
    ``[L, H_kv, T]`` fp32: what each scored token gets in the mean over the queries, +inf for the newer ones.
    """
    layers, _, heads, _ = keys.shape
    mass = torch.full((layers, heads, rows.total), torch.inf, device=keys.device)
    end = 0
    for of_request, length, scored in zip(queries, rows.lengths, older, strict=True):
        start, end = end, end + length
        if length == 0:
            continue
        gathered = torch.stack([buffer[rows.slots[start:end]].transpose(0, 1) for buffer in keys.buffers])
        mass[..., start : start + scored] = window_attention_reference(
            of_request,
            gathered,
            scored,
            domain=domain,
            group=group,
            pooling=pooling,
            kernel=kernel,
            temperature=temperature,
        )
    return mass


def window_attention_paged(
    queries: torch.Tensor,
    keys: Pool,
    rows: Rows,
    older: Sequence[int],
    *,
    domain: Domain,
    group: Group,
    pooling: Pooling,
    kernel: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The same as :func:`window_attention_paged_reference` in two launches, or three if scores are pooled.

    No ``queries x tokens`` matrix exists: a first pass over the keys leaves two numbers per query (the largest logit,
    and the sum of the powers relative to it), a second one adds up the attention of each token. Beside them and the
    result, pooling takes another ``[L, H_kv, T]`` fp32, or ``[L, H_q, T]`` for ``group="mean"`` with ``pooling="max"``,
    the only case in which pooling and the mean over query heads cannot change places.
    A request's scores do not depend on what else is in the batch. Nothing waits for the device.
    """
    requests, layers, query_heads, window, head_dim = queries.shape
    pool_layers, _, heads, pool_dim = keys.shape
    assert (pool_layers, pool_dim) == (layers, head_dim), f"{keys.shape = } does not fit {queries.shape = }"
    found, wanted = (queries.dtype, queries.device), (keys.dtype, keys.device)
    assert found == wanted, f"queries are {found}, must be {wanted} as the keys"
    assert keys.dtype in (torch.bfloat16, torch.float16, torch.float32), f"{keys.dtype = } must be bf16, fp16 or fp32"
    assert all(buffer.data_ptr() % 16 == 0 for buffer in keys.buffers), "buffers must begin at multiples of 16 bytes"
    assert query_heads % heads == 0, f"{query_heads = } must be a multiple of {heads = }"
    assert rows.slots.dtype == torch.int64, f"{rows.slots.dtype = } must be int64"
    assert rows.slots.is_contiguous(), f"{rows.slots.stride() = } must be 1"
    assert rows.slots.shape == (rows.total,), f"{rows.slots.shape = } must be {rows.total = }"
    assert len(rows.lengths) == len(older) == requests, f"{rows.lengths = }, {older = } must be of {requests = }"
    assert window > 0, f"{window = } must be at least 1"
    for scored, tokens in zip(older, rows.lengths, strict=True):
        reaches = f"{scored = } tokens must not reach into the {window = } of {tokens = }"
        assert 0 <= scored <= max(0, tokens - window), reaches
        assert tokens == 0 or tokens >= window, f"{tokens = } must not be fewer than {window = }"
    assert kernel % 2 == 1, f"{kernel = } must be odd, or pooling would shift the scores"
    assert temperature > 0, f"{temperature = } must be positive"
    mass = torch.empty(layers, heads, rows.total, dtype=torch.float32, device=keys.device)
    if mass.numel() == 0:
        return mass
    from kvpolicy.kernels import window_attention_paged_kernel  # needs Triton, which importing this file does not

    window_attention_paged_kernel.launch(
        mass,
        queries if queries.stride(-1) == 1 else queries.contiguous(),
        keys,
        rows,
        torch.tensor(older, dtype=torch.int64).to(keys.device, non_blocking=True),
        use_all=domain == "all",
        use_largest_logit=group == "max",
        pooling=pooling,
        kernel=kernel,
        scale=math.log2(math.e) / (math.sqrt(head_dim) * temperature),
    )
    return mass
