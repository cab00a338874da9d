"""Requests in pools that are plain tensors, and the hook that evicts from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvpolicy.sglang_plugin.eviction import Evictor
from kvpolicy.sglang_plugin.observation import Observation
from kvpolicy.sglang_plugin.paged_round import PagedRounds
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import residency_of

LAYERS, HEADS, HEAD_DIM, LENGTH, ROWS = 3, 2, 4, 20, 6
FIRST_HEAD = 8


class Pools:
    """A row of slots per request, all its own; the kept tokens go into the first of them."""

    device = torch.device("cpu")
    layers = tuple(range(5, 5 + LAYERS))
    full_bytes_per_token = float(LAYERS * HEADS * HEAD_DIM * 4 * 2)
    packed = None

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (ROWS * LENGTH, HEADS, HEAD_DIM)
        self.keys, self.values = ([torch.randn(shape, generator=generator) for _ in range(LAYERS)] for _ in "kv")
        self.movable = [self.keys, self.values]
        self.given_back: dict[int, int] = {}
        self.full = False

    def row(self, req: Any, length: int) -> torch.Tensor:
        return torch.arange(length) + LENGTH * req.kv.req_pool_idx

    def take_slots(self, req: Any, row: torch.Tensor, n_keep: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.full else (row[:n_keep], row[n_keep:])

    def set_row(self, req: Any, slots: torch.Tensor, left_over: torch.Tensor, *, evicted: int) -> None:
        self.given_back[req.kv.req_pool_idx] = len(left_over)
        assert evicted == len(left_over)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(slots)


def request(row: int, length: int, settings: RequestSettings, prefill: int = 2, offset: int = 0) -> Any:
    kv = SimpleNamespace(req_pool_idx=row, kv_committed_len=length, kv_allocated_len=length)
    req = SimpleNamespace(kv=kv, extend_end=prefill, skip_radix_cache_insert=False, settings=settings)
    req.origin_input_ids = list(range(prefill))
    residency_of(req).prefilled(prefill)
    residency_of(req).offset = offset
    return req


def hooked(*reqs: Any, pools: Pools, taps: Any = None, hidden: Any = None) -> Any:
    """The batch of these requests, after the hook ran."""
    lengths = torch.tensor([req.kv.kv_committed_len for req in reqs])
    batch = SimpleNamespace(
        reqs=list(reqs),
        is_empty=lambda: not reqs,
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=1,
        batch_is_full=True,
    )
    evictor(pools, taps, hidden).before_decode(batch)
    return batch


def evictor(pools: Pools, taps: Any = None, hidden: Any = None) -> Evictor:
    given: Any = pools
    observation, rounds = Observation(given, taps, hidden, FIRST_HEAD), PagedRounds(given, taps, FIRST_HEAD)
    return Evictor(None, given, observation, rounds, lambda req: req.settings, None)
