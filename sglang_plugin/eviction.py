"""The eviction hook: before each decode step, cut every due request back to its budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from kvpolicy.kernels.compact import compact, compact_layers
from kvpolicy.sglang_plugin.observation import Observation
from kvpolicy.sglang_plugin.paged_round import Due, PagedRounds, Wanted, groups
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.protection import Protection
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import Residency, residency_of
from kvpolicy.sglang_plugin.trace import Trace, resident_value_range

logger = logging.getLogger(__name__)


class Evictor:
    """Compacts requests in SGLang's pools; one per scheduler process."""

    def __init__(
        self,
        scheduler: Any,
        pools: Pools,
        observation: Observation,
        rounds: PagedRounds,
        settings_of: Callable[[Any], RequestSettings],
        trace_folder: str | None,
        protection: Protection | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._pools = pools
        self._observation = observation
        self._rounds = rounds
        self._protection = protection
        self._settings_of = settings_of
        self._trace_folder = trace_folder
        self._warned = False

    def before_decode(self, batch: Any) -> None:
        """Compact all due requests of a running batch, before SGLang checks its decode memory.

        Lengths are replaced by new tensors, never written: a forward step in flight may still read
        the old ones.
        """
        if batch.is_empty():
            return
        lengths: list[int] = batch.seq_lens_cpu.tolist()
        cut: dict[int, int] = {}
        together: list[Wanted] = []
        for i, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            if not self._is_ready(req, length):
                continue
            settings, state = self._settings_of(req), residency_of(req)
            due = settings.arm.policy.due(length, settings.budget, settings.period, evicted=state.offset)
            unseen = self._observation.unseen(req, length, settings)
            if due and self._trace_folder is None and self._rounds.takes(req, length, settings):
                together.append(Wanted(i, req, length, settings))
            elif due or unseen >= settings.period:
                self.wait_for_forward()
                start = time.perf_counter()
                if due and (kept := self._compact(Wanted(i, req, length, settings))) is not None:
                    cut[i] = kept
                elif unseen >= settings.period:
                    self._observation.observe(req, self._pools.row(req, length), settings)
                state.seconds += time.perf_counter() - start
        for group in groups(together):
            self.wait_for_forward()
            cut |= self._compact_together(group)
        if cut:
            seq_lens, seq_lens_cpu = batch.seq_lens.clone(), batch.seq_lens_cpu.clone()
            places, kept_lengths = torch.tensor([*cut.items()]).T
            seq_lens_cpu[places] = kept_lengths.to(seq_lens_cpu.dtype)
            on_device = [each.to(seq_lens.device, non_blocking=True) for each in (places, kept_lengths)]
            seq_lens[on_device[0]] = on_device[1].to(seq_lens.dtype)
            batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = seq_lens, seq_lens_cpu, None
            if any(residency_of(batch.reqs[i]).offset == lengths[i] - kept for i, kept in cut.items()):
                batch.batch_is_full = False  # the first eviction since a prefill lets go of the prompt: ask again

    @staticmethod
    def _is_ready(req: Any, length: int) -> bool:
        """Whether all of the request's prefill is in the radix tree and a token was decoded since.

        Under overlap scheduling the first decode step is prepared before the prefill's result is
        processed, unless other requests came between; a compaction in that gap would keep the prompt out
        of the tree. Waiting for the second step always makes the rounds of a request independent of them.
        """
        state = residency_of(req)
        return state.published is not None and state.published == req.extend_end < length + state.offset

    def wait_for_forward(self) -> None:
        """Order what follows after the forward step in flight, on the device, without waiting here."""
        if self._pools.device.type != "cpu":
            self._scheduler.schedule_stream.wait_stream(self._scheduler.forward_stream)

    def _take(self, wanted: Wanted) -> Due | None:
        """Slots for what the request will keep; None when none could be had."""
        req, length, settings = wanted.req, wanted.length, wanted.settings
        assert req.kv.kv_committed_len == req.kv.kv_allocated_len == length, f"{req.kv = } against {length = }"
        n_keep = settings.arm.policy.n_keep(length, settings.budget, evicted=residency_of(req).offset)
        row = self._pools.row(req, length)
        slots = self._pools.take_slots(req, row, n_keep)
        if slots is None:
            self._defer(residency_of(req))
            return None
        return Due(wanted, row, n_keep, *slots)

    def _compact(self, wanted: Wanted) -> int | None:
        """Cut one request to its budget in one transaction; None when no slots could be had."""
        pools, state = self._pools, residency_of(wanted.req)
        if (due := self._take(wanted)) is None:
            return None
        keep = self._observation.select(wanted.req, due.row, due.n_keep, wanted.settings)
        due = due.keeping(keep.shape[-1])
        if self._trace_folder is not None:  # before its rows are written to
            if state.trace is None:
                assert state.published is not None
                state.trace = Trace(state.published, *keep.shape[:2])
            state.trace.evicted(keep, wanted.length + state.offset, resident_value_range(pools.values, due.row))
        period = wanted.settings.period
        carried = None if self._protection is None else self._protection.carry(due.row, keep, period)
        if self._rounds.on:
            self._rounds.move(due.row, keep, due.destination)
        elif pools.device.type == "cpu":
            compact_layers(pools.movable, due.row, keep, due.destination)
        else:  # layer by layer, but without a wait for the device
            for kind in pools.movable:
                for buffer, of_layer in zip(kind, keep, strict=True):
                    compact(buffer, due.row, of_layer, due.destination)
        if state.tokens is not None and state.tokens.code_bits is not None:
            pools.coarsen(due.destination, state.tokens.code_bits)
        if self._protection is not None and carried is not None:
            own = due.row[wanted.req.kv.cache_protected_len :]
            self._protection.place(own, carried, due.destination)
            state.settled = max(0, due.n_keep - period)
        self._finish(due)
        return due.n_keep

    def _compact_together(self, group: list[Wanted]) -> dict[int, int]:
        """Cut requests of one arm and period to their budgets: the kept length by place in the batch."""
        start = time.perf_counter()
        members = [due for wanted in group if (due := self._take(wanted)) is not None]
        if members:
            self._rounds.compact(members)
            self._pools.allocator.free_group_begin()  # slots are given back in one piece
            for due in members:
                self._finish(due)
            self._pools.allocator.free_group_end()
        share = (time.perf_counter() - start) / len(group)
        for wanted in group:
            residency_of(wanted.req).seconds += share
        return {due.wanted.place: due.n_keep for due in members}

    def _finish(self, due: Due) -> None:
        """The kept rows are in place: make them the request's, and give back what it no longer needs."""
        req, state, length = due.wanted.req, residency_of(due.wanted.req), due.wanted.length
        self._pools.set_row(req, due.destination, due.left_over, evicted=length - due.n_keep)
        if state.barred_before is None:
            state.barred_before = req.skip_radix_cache_insert
            req.skip_radix_cache_insert = True  # a compacted row is the prefix of no text
        state.evicted(length, due.n_keep)

    def _defer(self, state: Residency) -> None:
        state.deferred += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvpolicy: the KV pool has no free slots to compact a request into; it is tried again at later "
                "steps (counted as evictions_deferred in meta_info). A larger pool avoids this."
            )
