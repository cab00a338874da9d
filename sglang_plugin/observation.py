"""Gather what a policy reads of one request: keys, values, queries, positions, hidden changes, statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kvpolicy.kernels.compact import PagedTokens
from kvpolicy.kernels.fill_places import fill_places
from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.sglang_plugin.hidden_taps import HiddenTaps
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.query_taps import QueryTaps
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import Residency, residency_of
from kvpolicy.sglang_plugin.token_state import TokenState

# Keys and values copied out of the pool at a time; a policy whose choice spans no layers sees them in such chunks.
SCRATCH_BYTES = 256 * 2**20


class Observation:
    """Reads one scheduler's pools and taps, and carries what policies observe."""

    def __init__(self, pools: Pools, queries: QueryTaps | None, hidden: HiddenTaps | None, first_head: int) -> None:
        self._pools = pools
        self._queries = queries
        self._hidden = hidden
        self._first_head = first_head

    def unseen(self, req: Any, resident: int, settings: RequestSettings) -> int:
        """How many of the newest queries the policy has not observed yet; 0 for one that observes none."""
        state = residency_of(req)
        if not settings.arm.policy.accumulates:
            return 0
        return resident + state.offset - self._tokens(state, settings).observed

    def observe(self, req: Any, row: torch.Tensor, settings: RequestSettings) -> None:
        """Let an accumulating policy see the newest queries, without an eviction."""
        observed = [candidates.require("statistic") for candidates, _ in self._chunks(req, row, settings)]
        state = residency_of(req)
        self._tokens(state, settings).observe(torch.cat(observed), len(row) + state.offset)

    def select(self, req: Any, row: torch.Tensor, n_keep: int, settings: RequestSettings) -> torch.Tensor:
        """int64 ``[L, H_kv, K]``: what each layer and head keeps of the tokens in `row`, ``K <= n_keep``.

        In age order, or in their places where the policy does without.
        """
        policy, state = settings.arm.policy, residency_of(req)
        kept, observed, bits = [], [], []
        for candidates, noise in self._chunks(req, row, settings):
            kept.append(policy.select(candidates, n_keep, settings.period, noise))
            observed.append(candidates.statistic)
            bits.append(policy.code_bits(candidates, kept[-1]))
        true_len, tokens = len(row) + state.offset, self._tokens(state, settings)
        if policy.accumulates:
            tokens.observe(torch.cat([part for part in observed if part is not None]), true_len)
        keep = torch.cat(kept)
        assert keep.shape[-1] <= n_keep, f"{policy.name} kept {keep.shape[-1]} tokens, {n_keep = }"
        if self._pools.packed is None and not policy.reads_order(settings.period):
            keep = fill_places(keep)  # not where rows are packed: the newest that are protected are the last there
        tokens.evicted(
            keep, true_len, torch.cat([part for part in bits if part is not None]) if policy.widths else None
        )
        return keep

    @staticmethod
    def _tokens(state: Residency, settings: RequestSettings) -> TokenState:
        if state.tokens is None:
            assert state.published is not None, "a request is observed once its prefill is done"
            state.tokens = TokenState(settings.arm.policy, state.published)
        return state.tokens

    def _chunks(self, req: Any, row: torch.Tensor, settings: RequestSettings) -> Iterator[tuple[Candidates, Noise]]:
        """The candidates of adjacent layers, as observed now, and their random numbers."""
        pools, policy, state = self._pools, settings.arm.policy, residency_of(req)
        layers = len(pools.layers)
        bytes_per_layer = pools.full_bytes_per_token / layers * len(row)
        step = layers if policy.spans_layers else max(1, int(SCRATCH_BYTES / bytes_per_layer))
        for first in range(0, layers, step):
            chunk = slice(first, min(first + step, layers))
            candidates = self._candidates(req, row, settings, chunk)
            if policy.accumulates:
                candidates = replace(candidates, statistic=policy.observe(candidates, settings.period))
            yield candidates, Noise(settings.seed, state.evictions, pools.layers[chunk], pools.device, self._first_head)

    def _candidates(self, req: Any, row: torch.Tensor, settings: RequestSettings, chunk: slice) -> Candidates:
        pools, policy, state = self._pools, settings.arm.policy, residency_of(req)
        needs, tokens = policy.needs(settings.period), self._tokens(state, settings)
        shape = (chunk.stop - chunk.start, pools.keys[0].shape[1], len(row))
        true_len, prompt_len, table_row = len(row) + state.offset, len(req.origin_input_ids), req.kv.req_pool_idx
        queries = positions = changes = None
        if needs.queries:
            assert self._queries is not None, f"{settings.arm.name} reads queries, but none are recorded"
            queries = self._queries.newest(table_row, true_len, needs.queries, chunk)
        if needs.positions:
            positions = tokens.positions(true_len, chunk, pools.device).expand(shape)
        if needs.hidden_bands:
            assert self._hidden is not None, f"{settings.arm.name} reads hidden states, but none are tapped"
            changes = self._hidden.changes(table_row, prompt_len, true_len, needs.hidden_bands)
        return Candidates(
            shape=shape,
            keys=PagedTokens(pools.keys[chunk], row) if needs.keys else None,
            values=PagedTokens(pools.values[chunk], row) if needs.values else None,
            queries=queries,
            positions=positions,
            hidden_change=changes,
            statistic=tokens.statistic(shape, chunk, pools.device) if policy.accumulates else None,
            unseen=self.unseen(req, len(row), settings),
            prompt_len=prompt_len,
            true_len=true_len,
            previous_len=tokens.previous_len,
        )
