"""The hooks of the scheduler process, installed when a policy was asked for."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvpolicy import __version__
from kvpolicy.policies.reading import ReadingPolicy
from kvpolicy.sglang_plugin import support, targets
from kvpolicy.sglang_plugin.admission import Admission
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.eviction import Evictor
from kvpolicy.sglang_plugin.hidden_taps import HiddenTaps
from kvpolicy.sglang_plugin.metrics import Metrics
from kvpolicy.sglang_plugin.observation import Observation
from kvpolicy.sglang_plugin.packed_cache import PackedCache
from kvpolicy.sglang_plugin.paged_round import PagedRounds
from kvpolicy.sglang_plugin.partial_attention import PartialAttention
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.query_taps import QueryTaps
from kvpolicy.sglang_plugin.reads import reads_of
from kvpolicy.sglang_plugin.report import META_KEY, response_report
from kvpolicy.sglang_plugin.request_settings import RequestSettings, request_settings
from kvpolicy.sglang_plugin.residency import residency_of
from kvpolicy.sglang_plugin.token_sampling import TokenSampling

logger = logging.getLogger(__name__)

_SETTINGS = "_kvpolicy_settings"


class Runtime:
    """One scheduler's policies at work: hooks are its methods, state is in the pools and on the requests."""

    def __init__(self, config: KVPolicyConfig) -> None:
        self.config = config
        self.pools: Pools | None = None
        self.queries: QueryTaps | None = None
        self.hidden: HiddenTaps | None = None
        self.partial: PartialAttention | None = None
        self.packed: PackedCache | None = None
        self.metrics: Metrics | None = None
        self._evictor: Evictor | None = None
        self._sampling = TokenSampling(lambda req: self.settings_of(req).sampling_seed)
        self._admission = Admission(self.settings_of)
        self._ranks, self._rank, self._model = 1, 0, ""
        if config.cache_format is not None:
            self.packed = PackedCache(config.cache_format, config.period, self.settings_of)

    def hooks(self) -> targets.Hooks:
        """Hook of each target; installing them changes nothing until :meth:`attach`."""
        hooks: targets.Hooks = {
            targets.INIT_INFO: self.add_handshake,
            targets.UPDATE_BATCH: self.before_update_running_batch,
            targets.CHECKPOINT: self.after_checkpoint,
            targets.RELEASE: self.before_release,
            targets.RETRACT: self.after_reset_for_retract,
            targets.ALLOC_ROWS: self.after_alloc_rows,
            targets.INIT_FORWARD: self.after_init_forward,
            targets.OUTPUT_INFO: self.after_output_info,
            targets.SAMPLING_INFO: self._sampling.after_from_schedule_batch,
            targets.SAMPLE: self._sampling.around_sample_from_probs,
            **self._admission.hooks(),
            targets.ALLOC_POOLS: self.after_alloc_memory_pool,
            targets.MAX_PREFIX: self.after_max_prefix_len,
            targets.ATTENTION: self.around_attention,
            **({} if self.packed is None else self.packed.hooks()),
        }
        return {target: hooks[target] for target in needed(self.config)}

    def attach(self, scheduler: Any) -> None:
        """Bind to a scheduler whose pools exist."""
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
        from sglang.srt.runtime_context import get_parallel

        self.pools = Pools(scheduler)
        assert (self.queries is not None) == bool(self.config.query_window), "SGLang allocated its pools unseen"
        assert (self.hidden is not None) == bool(self.config.hidden_bands), "SGLang allocated its pools unseen"
        if targets.ATTENTION in needed(self.config):
            support.check_attention(scheduler.tp_worker.model_runner.attn_backend)
        self._admission.attach(scheduler)
        self._ranks, self._rank = get_parallel().tp_size, get_parallel().tp_rank
        self._model = scheduler.server_args.model_path
        first_head = self._rank * scheduler.model_config.get_total_num_kv_heads() // self._ranks
        if self.config.reads_a_part:
            policies, model = [arm.policy for arm in self.config.arms.values()], scheduler.tp_worker.model_runner.model
            self.partial = PartialAttention.of_model(policies, self.settings_of, self.pools, model, first_head)
        observation = Observation(self.pools, self.queries, self.hidden, first_head)
        rounds, protection = PagedRounds(self.pools, self.queries, first_head), None
        if self.packed is not None:
            self.packed.attach(self.pools)
            protection = self.packed.protection
        self._evictor = Evictor(
            scheduler, self.pools, observation, rounds, self.settings_of, self.config.trace, protection
        )
        per_token = self.pools.bytes_per_token * self._ranks, self.pools.full_bytes_per_token * self._ranks
        self.metrics = Metrics.of_scheduler(scheduler, self.config.arms, self.settings_of, *per_token)
        # Set on a class that does not read it, this would lose every report without a word.
        assert hasattr(SchedulerOutputStreamer, "has_additional_customized_info"), "SGLang renamed the opt-in"
        SchedulerOutputStreamer.has_additional_customized_info = True

    def settings_of(self, req: Any) -> RequestSettings:
        """The settings of SGLang's `Req`, made at first use; its parameters were validated before it got here."""
        settings: RequestSettings | None = getattr(req, _SETTINGS, None)
        if settings is None:
            parameters = req.sampling_params
            settings = request_settings(self.config, parameters.custom_params, parameters.sampling_seed)
            setattr(req, _SETTINGS, settings)
        return settings

    def add_handshake(self, info: dict[str, Any], _scheduler: Any) -> dict[str, Any]:
        """Tell the launching process which policy is active and through which hooks."""
        targets.verify(self.hooks())
        assert self.pools is not None, "the handshake was asked for before the pools existed"
        return {**info, META_KEY: handshake(self.config)}

    def before_update_running_batch(self, _scheduler: Any, batch: Any) -> None:
        if self._evictor is not None:
            self._evictor.before_decode(batch)
            if self.packed is not None:
                self.packed.before_update_running_batch(batch, self._evictor.wait_for_forward)
        if self.metrics is not None:
            self.metrics.decoding(batch)

    def after_checkpoint(self, _result: None, req: Any, tree_cache: Any) -> None:
        residency_of(req).prefilled(req.extend_end)

    def before_release(self, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
        if not req.kv.holds_kv:
            return
        state = residency_of(req)
        state.advance(_computed(req) - state.offset)
        if self.packed is not None and self._evictor is not None:
            self.packed.before_release(req, self._evictor.wait_for_forward)
        if self.partial is not None:
            reads_of(req).forget_pages()
        if self.metrics is not None:
            self.metrics.released(req)
        if state.trace is not None and req.finished():
            assert self.config.trace is not None
            settings = self.settings_of(req)
            state.trace.write(
                self.config.trace,
                req.rid if self._ranks == 1 else f"{req.rid}.tp{self._rank}",
                token_ids=[*req.origin_input_ids, *req.output_ids],
                prompt_len=len(req.origin_input_ids),
                policy=settings.arm.policy_name,
                options=settings.arm.options,
                budget=settings.budget,
                period=settings.period,
                model=self._model,
            )

    def after_reset_for_retract(self, _result: None, req: Any) -> None:
        state = residency_of(req)
        if state.barred_before is not None:
            req.skip_radix_cache_insert = state.barred_before  # its row will be whole again
        state.retracted()

    def after_alloc_rows(self, rows: list[int] | None, pool: Any, need_size: int) -> None:
        if rows and self.pools is not None and pool is self.pools.rows:
            offsets = self.pools.offsets
            offsets.index_fill_(0, torch.tensor(rows).to(offsets.device, non_blocking=True), 0)

    def after_init_forward(self, forward_batch: Any, _cls: type, batch: Any, model_runner: Any, **_: Any) -> None:
        """Rotate each new token by its true position, not by its place in the shortened row."""
        if self.pools is None:
            return
        if self.packed is not None:
            self.packed.before_forward(forward_batch, batch.reqs)
        if forward_batch.forward_mode.is_extend():
            for taps in (self.queries, self.hidden):
                if taps is not None:
                    taps.plan_prefill(forward_batch)
        if forward_batch.forward_mode.is_decode():
            shift = self.pools.offsets[forward_batch.req_pool_indices]
            forward_batch.positions = forward_batch.positions + shift.to(forward_batch.positions.dtype)
            if self.partial is not None:
                self.partial.plan(forward_batch, batch.reqs)

    def after_output_info(self, info: dict[str, list[Any]], _streamer: Any, reqs: list[Any]) -> dict[str, list[Any]]:
        """Attach the report to finished responses; others get None, and a step that finishes none adds nothing."""
        if not any(req.finished() for req in reqs):
            return info
        return {**info, META_KEY: [self._report(req) if req.finished() else None for req in reqs]}

    def _report(self, req: Any) -> dict[str, Any]:
        assert self.pools is not None
        per_token = self.pools.bytes_per_token * self._ranks
        full_per_token = self.pools.full_bytes_per_token * self._ranks
        beside = {
            name: taps.bytes_per_request * self._ranks
            for name, taps in (("query_window_bytes", self.queries), ("hidden_change_bytes", self.hidden))
            if taps is not None
        }
        settings = self.settings_of(req)
        report = response_report(residency_of(req), settings, per_token, full_per_token, beside, req.retraction_count)
        if self.packed is not None:
            report |= self.packed.report(req)
        if isinstance(settings.arm.policy, ReadingPolicy):
            report |= reads_of(req).statistics(_computed(req))
        return report

    def after_alloc_memory_pool(self, _result: None, runner: Any, *_: Any, **__: Any) -> None:
        """Allocate what the taps write to, before SGLang captures graphs that will write to it."""
        if self.packed is not None:
            self.packed.allocated(runner)
        if self.config.query_window:
            self.queries = QueryTaps.of_model(self.config.query_window, runner)
            _announce(f"the newest {self.queries.window} queries of each request", self.queries)
        if self.config.hidden_bands:
            self.hidden = HiddenTaps.of_model(self.config.hidden_bands, runner)
            _announce(f"the hidden states and their changes in {len(self.hidden.layers)} layers", self.hidden)

    def around_attention(
        self,
        attention: Any,
        backend: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if self.queries is not None:
            self.queries.record(q, layer.layer_id, forward_batch)
        if self.packed is not None:
            assert self.packed.attention is not None, "a forward pass ran before the pools existed"
            attention = self.packed.attention.forward
        if self.partial is not None:
            return self.partial.around(attention, backend, q, k, v, layer, forward_batch, *args, **kw)
        return attention(backend, q, k, v, layer, forward_batch, *args, **kw)

    def after_max_prefix_len(self, length: int, req: Any, input_len: int) -> int:
        """Compute anew what a policy reads of the forward pass, even where the radix tree has all of the prompt.

        Else a warm prompt would be scored by one query where a cold one is scored by a window of them, and the
        hidden states of tokens decoded before a retraction would not be known.
        """
        needs = self.settings_of(req).needs
        if needs.hidden_bands:
            length = min(length, len(req.origin_input_ids) - 1)
        return max(0, min(length, input_len - needs.queries))


def _computed(req: Any) -> int:
    """How many tokens of a finished request have keys and values: the last of the output has none."""
    return len(req.origin_input_ids) + max(0, len(req.output_ids) - 1)


def _announce(what: str, taps: QueryTaps | HiddenTaps) -> None:
    logger.info(
        "kvpolicy: %s take %.2f MiB a request, %.3f GiB in all; max_running_requests sets how many requests that is.",
        what,
        taps.bytes_per_request / 2**20,
        taps.total_bytes / 2**30,
    )


def needed(config: KVPolicyConfig) -> tuple[targets.Target, ...]:
    """The functions of SGLang that a scheduler hooks for these policies."""
    chosen: tuple[targets.Target, ...] = targets.SCHEDULER
    if config.bounds_requests:
        chosen += targets.ADMISSION
    if config.taps or config.cache_format is not None:
        chosen += (targets.ALLOC_POOLS,)
    if config.taps:
        chosen += (targets.MAX_PREFIX,)
    if config.query_window or config.reads_a_part or config.cache_format is not None:
        chosen += (targets.ATTENTION,)
    if config.cache_format is not None:
        chosen += targets.PACKED
    return chosen


def handshake(config: KVPolicyConfig) -> dict[str, Any]:
    """What a scheduler must report for the launching process to serve."""
    return {
        "version": __version__,
        "config": config,
        "hooks": [target.path for target in needed(config)],
    }
