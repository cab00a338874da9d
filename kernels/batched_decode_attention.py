"""Decode attention of a batch on a CPU, in PyTorch: few calls for all requests, planned once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

# Gathered keys and values of one call: what stays in the cache of a core between being written and being read.
BYTES_PER_THREAD = 2**21
# A request joins a group of longer ones if at most this share of its rows, or as many as these, would be padding.
PADDED_SHARE, PADDED_ROWS = 1 / 8, 64


@dataclass(frozen=True, eq=False)
class Group:
    """Requests of about the same length, padded to the longest.

    slots : int64 ``[b * n]``
        Padding repeats the request's own first slot, so that a row that belongs to nobody is never read.
    mask : ``[b, 1, 1, n]`` in the dtype of the computation, 0 and -inf for padding; None if nothing is padded
    """

    requests: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """What all layers of a decode step have in common.

    requests : of the batch
    order : int64, the requests in the groups, one group after the other; one without tokens is in none.
    """

    requests: int
    order: torch.Tensor
    groups: tuple[Group, ...]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Products of fp16 are several times slower on CPUs than those of fp32, which hold them exactly."""
    return torch.float32 if dtype == torch.float16 else dtype


def plan_decode(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: Sequence[int],
    row_bytes: int,
    dtype: torch.dtype,
) -> DecodePlan:
    """Group the requests of a decode step.

    Parameters
    ----------
    req_to_token : int32 ``[R, N]``, slots of each row's tokens, in any order; what is beyond a row's length is not used
    req_pool_indices : int ``[B]``, the row of each request
    seq_lens : tokens of each request, its new one included
    row_bytes : of a token's keys and values in one layer
    dtype : of queries, keys and values
    """
    limit = BYTES_PER_THREAD * torch.get_num_threads() // row_bytes
    order = sorted((i for i, length in enumerate(seq_lens) if length), key=lambda i: -seq_lens[i])
    members: list[list[int]] = []
    for request in order:
        if members:
            longest, count = seq_lens[members[-1][0]], len(members[-1])
            padding = longest - seq_lens[request]
            if padding <= max(PADDED_ROWS, longest * PADDED_SHARE) and longest * (count + 1) <= limit:
                members[-1].append(request)
                continue
        members.append([request])
    groups = (_group(req_to_token, req_pool_indices[own], [seq_lens[i] for i in own], dtype) for own in members)
    return DecodePlan(len(seq_lens), torch.tensor(order, dtype=torch.int64), tuple(groups))


def _group(req_to_token: torch.Tensor, rows: torch.Tensor, lengths: list[int], dtype: torch.dtype) -> Group:
    longest = max(lengths)
    slots = req_to_token[rows, :longest].long()
    if min(lengths) == longest:
        return Group(len(rows), slots.flatten(), None)
    beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(slots.shape, dtype=computed_in(dtype)).masked_fill(beyond, float("-inf"))
    return Group(len(rows), torch.where(beyond, slots[:, :1], slots).flatten(), mask[:, None, None])


def batched_decode_attention_reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: Sequence[torch.Tensor], scaling: float
) -> torch.Tensor:
    """fp32 ``[B, H_q, D_v]``: the definition, one query head after the other; `slots` are those of each request."""
    output = torch.zeros(*queries.shape[:2], values.shape[2])
    group = queries.shape[1] // keys.shape[1]
    for request, own in enumerate(slots):
        for head, query in enumerate(queries[request].float()):
            weights = (keys[own, head // group].float() @ query * scaling).softmax(dim=0)
            output[request, head] = weights @ values[own, head // group].float()
    return output


def batched_decode_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: DecodePlan, scaling: float
) -> torch.Tensor:
    """Attention of one new token of each request over all its tokens.

    Each group's rows are gathered once, and the query heads of a KV head are rows of one product.

    Parameters
    ----------
    queries : ``[B, H_q, D]``
        After RoPE; query head ``h`` reads KV head ``h // G``, ``G = H_q / H_kv``.
    keys, values : ``[S, H_kv, D]`` and ``[S, H_kv, D_v]``, contiguous, in the dtype of the queries; keys after RoPE
    plan : of this batch
    scaling : factor of q·k

    Returns
    -------
    ``[B, H_q, D_v]`` in the dtype of the queries; 0 for a request without tokens.
    """
    requests, query_heads, head_dim = queries.shape
    heads, dtype = keys.shape[1], computed_in(queries.dtype)
    assert keys.shape[:2] == values.shape[:2], f"{keys.shape = } does not fit {values.shape = }"
    assert keys.shape[2] == head_dim, f"{keys.shape = } does not fit {queries.shape = }"
    assert query_heads % heads == 0, f"{query_heads = } must be a multiple of {heads = }"
    assert keys.dtype == values.dtype == queries.dtype, f"{keys.dtype = }, {values.dtype = }, {queries.dtype = }"
    assert plan.requests == requests, f"the plan is for {plan.requests} requests, not {requests}"
    group_size = query_heads // heads
    rows = queries.index_select(0, plan.order).view(-1, heads, group_size, head_dim).to(dtype)
    # Products of an odd number of rows are slower than those of one row more; in bf16 one row takes thrice as long.
    if group_size % 2 and (group_size > 1 or dtype == torch.bfloat16):
        rows = pad(rows, (0, 0, 0, 1))
    output, first = queries.new_zeros(requests, heads, group_size, values.shape[2]), 0
    for group in plan.groups:
        own_keys, own_values = (
            buffer.view(len(buffer), -1)
            .index_select(0, group.slots)
            .view(group.requests, -1, heads, buffer.shape[2])
            .transpose(1, 2)
            .to(dtype)
            for buffer in (keys, values)
        )
        own = slice(first, first + group.requests)
        attended = scaled_dot_product_attention(rows[own], own_keys, own_values, attn_mask=group.mask, scale=scaling)
        output.index_copy_(0, plan.order[own], attended[:, :, :group_size].to(queries.dtype))
        first += group.requests
    return output.flatten(1, 2)
