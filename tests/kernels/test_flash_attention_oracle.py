"""A compacted row is an ordinary paged cache: attention kernels that know nothing of eviction read it exactly.

Each KV head holds its own tokens in the same slots, and no mask and no matrix of attention says which: what an
attention kernel reads from the slots equals plain attention over the kept tokens, gathered before they were moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from kvpolicy.kernels.compact_paged import compact_paged
from kvpolicy.kernels.paged import Pool, Rows
from tests.kernels.tolerance import assert_close

PAGE = 256  # slots of a page: flash-attn reads whole ones of a multiple of 256
LAYERS, HEADS, GROUP = 2, 2, 3
RESIDENT, KEPT = (300, 700, 64), (257, 512, 63)


Attend = Callable[[torch.Tensor, "Cache", int], torch.Tensor]


class Cache(NamedTuple):
    """Requests after their compaction, and what each was to keep, from before it.

    pages : int32 ``[R, most pages]``, of each request's kept tokens; lengths : int32 ``[R]``, how many these are.
    kept : keys and values ``[L, H, n_keep, D]`` of each request.
    """

    keys: Pool
    values: Pool
    pages: torch.Tensor
    lengths: torch.Tensor
    kept: list[tuple[torch.Tensor, torch.Tensor]]


def slots_of(pages: torch.Tensor) -> torch.Tensor:
    return (pages[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()


def compacted(device: torch.device, dtype: torch.dtype, head_dim: int) -> Cache:
    """Rows scattered over a pool, moved into pages that lie anywhere; slots of nobody hold NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    counts = [math.ceil(kept / PAGE) for kept in KEPT]
    pages = torch.randperm(sum(counts) + 1, generator=generator).split([*counts, 1])[:-1]
    destinations = [slots_of(page)[:kept] for page, kept in zip(pages, KEPT, strict=True)]
    first = (sum(counts) + 1) * PAGE
    slots = first + math.ceil(sum(RESIDENT) / PAGE) * PAGE
    rows = (first + torch.randperm(slots - first, generator=generator)[: sum(RESIDENT)]).split(list(RESIDENT))
    keep = [
        torch.rand(LAYERS, HEADS, resident, generator=generator).topk(kept).indices.sort().values
        for resident, kept in zip(RESIDENT, KEPT, strict=True)
    ]
    buffers = [torch.full((slots, HEADS, head_dim), torch.nan) for _ in range(2 * LAYERS)]
    for buffer in buffers:
        buffer[torch.cat(rows)] = torch.randn(sum(RESIDENT), HEADS, head_dim, generator=generator)
    kept = []
    for row, indices in zip(rows, keep, strict=True):
        gathered = torch.stack([buffer.to(dtype)[row].transpose(0, 1) for buffer in buffers])  # [2 L, H, N, D]
        index = indices[..., None].expand(-1, -1, -1, head_dim)
        kept.append(tuple(part.gather(2, index).to(device) for part in gathered.split(LAYERS)))
    keys, values = (
        Pool.of([buffer.to(device, dtype) for buffer in part]) for part in (buffers[:LAYERS], buffers[LAYERS:])
    )
    rows_of, destination = (Rows.of([row.to(device) for row in part]) for part in (rows, destinations))
    compact_paged([keys, values], rows_of, torch.cat(keep, dim=-1).to(device), destination, in_place=False)
    table = torch.zeros(len(pages), max(counts), dtype=torch.int32)
    for line, page in zip(table, pages, strict=True):
        line[: len(page)] = page
    return Cache(keys, values, table.to(device), torch.tensor(KEPT, dtype=torch.int32, device=device), kept)


def by_flash_attention(queries: torch.Tensor, cache: Cache, layer: int) -> torch.Tensor:
    """``[R, H_q, D]`` of one query per request and head, read through the table of pages."""
    flash_attn = pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    attend: Callable[..., Any] | None = getattr(flash_attn, "flash_attn_with_kvcache", None)
    if attend is None:
        pytest.skip("this flash_attn has no flash_attn_with_kvcache; that of flash-attn 2.8 is needed")
    paged = (pool.buffers[layer].unflatten(0, (-1, PAGE)) for pool in (cache.keys, cache.values))
    output: torch.Tensor = attend(
        queries[:, None], *paged, cache_seqlens=cache.lengths, block_table=cache.pages, causal=True
    )
    return output[:, 0]


def by_gathering(queries: torch.Tensor, cache: Cache, layer: int) -> torch.Tensor:
    """The same by PyTorch: the slots of the pages are gathered, one request at a time."""
    outputs = []
    for query, pages, length in zip(queries, cache.pages.long(), KEPT, strict=True):
        slots = slots_of(pages)[:length]
        keys, values = (pool.buffers[layer][slots].transpose(0, 1) for pool in (cache.keys, cache.values))
        output = functional.scaled_dot_product_attention(query[:, None], keys, values, enable_gqa=True)
        outputs.append(output[:, 0])
    return torch.stack(outputs)


def by_definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request over its kept tokens in fp64, and the same over the values' magnitudes.

    ``[H_q, D]`` and twice ``[H, n_keep, D]`` to twice ``[H_q, D]``.
    """
    grouped = query.double().unflatten(0, (HEADS, GROUP))
    weights = (grouped @ keys.double().transpose(1, 2) / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return (weights @ values.double()).flatten(0, 1), (weights @ values.double().abs()).flatten(0, 1)


Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def outcomes(attend: Attend, device: torch.device, dtype: torch.dtype, head_dim: int) -> Iterator[Outcome]:
    """Per layer: what `attend` reads from the slots, and twice what the definition says, ``[R, H_q, D]`` each."""
    cache = compacted(device, dtype, head_dim)
    generator = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        queries = torch.randn(len(KEPT), HEADS * GROUP, head_dim, generator=generator).to(device, dtype)
        kept = [(keys[layer], values[layer]) for keys, values in cache.kept]
        defined = [by_definition(query, *pair) for query, pair in zip(queries, kept, strict=True)]
        exact, magnitude = (torch.stack(part) for part in zip(*defined, strict=True))
        yield attend(queries, cache, layer), exact, magnitude


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_over_the_slots_is_attention_over_the_kept_tokens(device: torch.device, head_dim: int) -> None:
    for actual, exact, _ in outcomes(by_gathering, device, torch.float32, head_dim):
        assert_close(actual, exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_over_the_slots_is_attention_over_the_kept_tokens(dtype: torch.dtype, head_dim: int) -> None:
    """It rounds each weight, and at last the sum, to `dtype`: half a unit in the last place of either."""
    unit = torch.finfo(dtype).eps
    for actual, exact, magnitude in outcomes(by_flash_attention, torch.device("cuda"), dtype, head_dim):
        assert bool(((actual.double() - exact).abs() <= unit * magnitude).all())
