"""The eviction hook: before each decode step, cut every due request back to its budget."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvpolicy.kernels.compact import compact, gather_rows
from kvpolicy.policies.base import Candidates, Granularity, Noise, Policy
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.residency import Residency, residency_of
from kvpolicy.sglang_plugin.trace import Trace

logger = logging.getLogger(__name__)

# Keys and values copied out of the pool at a time; per-head policies see the layers in chunks of this size.
SCRATCH_BYTES = 256 * 2**20


class Evictor:
    """Compacts requests in SGLang's pools; one per scheduler process."""

    def __init__(self, scheduler: Any, config: KVPolicyConfig, policy: Policy, pools: Pools) -> None:
        self._scheduler = scheduler
        self._config = config
        self._policy = policy
        self._pools = pools
        self._warned = False

    def before_decode(self, batch: Any) -> None:
        """Compact all due requests of a running batch, before SGLang checks its decode memory.

        Lengths are replaced by new tensors, never written: a forward step in flight may still read
        the old ones.
        """
        if batch.is_empty():
            return
        config, policy = self._config, self._policy
        lengths: list[int] = batch.seq_lens_cpu.tolist()
        cut: dict[int, int] = {}
        for i, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            if policy.due(length, config.budget, config.period) and self._is_ready(req):
                if not cut:
                    self._wait_for_forward()
                kept = self._compact(req, length)
                if kept is not None:
                    cut[i] = kept
        if cut:
            seq_lens, seq_lens_cpu = batch.seq_lens.clone(), batch.seq_lens_cpu.clone()
            for i, kept in cut.items():
                seq_lens[i].fill_(kept)
                seq_lens_cpu[i] = kept
            batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = seq_lens, seq_lens_cpu, None

    @staticmethod
    def _is_ready(req: Any) -> bool:
        """Whether all of the request's prefill is in the radix tree.

        Under overlap scheduling the first decode step is prepared before the prefill's result is
        processed; a compaction in that gap would keep the prompt out of the tree.
        """
        published = residency_of(req).published
        return published is not None and published == req.extend_end

    def _wait_for_forward(self) -> None:
        """Order what follows after the forward step in flight, on the device, without waiting here."""
        if self._pools.device.type != "cpu":
            self._scheduler.schedule_stream.wait_stream(self._scheduler.forward_stream)

    def _compact(self, req: Any, length: int) -> int | None:
        """Cut one request to its budget in one transaction; None when no slots could be had."""
        pools, state = self._pools, residency_of(req)
        assert req.kv.kv_committed_len == req.kv.kv_allocated_len == length, f"{req.kv = } against {length = }"
        n_keep = self._policy.n_keep(length, self._config.budget)
        row = pools.row(req, length)
        slots = pools.take_slots(req, row, n_keep)
        if slots is None:
            self._defer(state)
            return None
        destination, left_over = slots
        keep = self._select(row, n_keep, state)
        for layer, (keys, values) in enumerate(zip(pools.keys, pools.values, strict=True)):
            compact(keys, row, keep[layer], destination)
            compact(values, row, keep[layer], destination)
        pools.set_row(req, destination, left_over, evicted=length - n_keep)
        if state.barred_before is None:
            state.barred_before = req.skip_radix_cache_insert
            req.skip_radix_cache_insert = True  # a compacted row is the prefix of no text
        if self._config.trace is not None:
            if state.trace is None:
                assert state.published is not None
                state.trace = Trace(state.published, *keep.shape[:2])
            state.trace.evicted(keep, length + state.offset)
        state.evicted(length, n_keep)
        return n_keep

    def _select(self, row: torch.Tensor, n_keep: int, state: Residency) -> torch.Tensor:
        """int64 ``[L, H_kv, n_keep]``: what each layer and head keeps of the tokens in `row`."""
        pools, policy = self._pools, self._policy
        heads, layers = pools.keys[0].shape[1], len(pools.layers)
        bytes_per_layer = pools.bytes_per_token / layers * len(row)
        separate = policy.granularity in (Granularity.PER_HEAD, Granularity.PER_LAYER)
        step = max(1, int(SCRATCH_BYTES / bytes_per_layer)) if separate else layers
        kept = []
        for first in range(0, layers, step):
            chunk = slice(first, min(first + step, layers))

            def gather(needed: bool, buffers: list[torch.Tensor], chunk: slice = chunk) -> torch.Tensor | None:
                return torch.stack([gather_rows(buffer, row) for buffer in buffers[chunk]]) if needed else None

            candidates = Candidates(
                shape=(chunk.stop - chunk.start, heads, len(row)),
                keys=gather(policy.needs.keys, pools.keys),
                values=gather(policy.needs.values, pools.values),
            )
            noise = Noise(self._config.seed, state.evictions, pools.layers[chunk], pools.device)
            kept.append(policy.select(candidates, n_keep, self._config.period, noise))
        return torch.cat(kept)

    def _defer(self, state: Residency) -> None:
        state.deferred += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvpolicy: the KV pool has no free slots to compact a request into; it is tried again at later "
                "steps (counted as evictions_deferred in meta_info). A larger pool avoids this."
            )
