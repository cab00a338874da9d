"""The hooks of the scheduler process, installed when a policy was asked for."""

from __future__ import annotations

from typing import Any

from kvpolicy import __version__
from kvpolicy.sglang_plugin import targets
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.eviction import Evictor
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.report import META_KEY, response_report
from kvpolicy.sglang_plugin.residency import residency_of


class Runtime:
    """One scheduler's policy at work: hooks are its methods, state is in the pools and on the requests."""

    def __init__(self, config: KVPolicyConfig) -> None:
        self.config = config
        self.policy = config.build_policy()
        self.pools: Pools | None = None
        self._evictor: Evictor | None = None
        self._ranks, self._rank = 1, 0

    def hooks(self) -> targets.Hooks:
        """Hook of each target; installing them changes nothing until :meth:`attach`."""
        return {
            targets.INIT_INFO: self.add_handshake,
            targets.UPDATE_BATCH: self.before_update_running_batch,
            targets.CHECKPOINT: self.after_checkpoint,
            targets.RELEASE: self.before_release,
            targets.RETRACT: self.after_reset_for_retract,
            targets.ALLOC_ROWS: self.after_alloc_rows,
            targets.INIT_FORWARD: self.after_init_forward,
            targets.OUTPUT_INFO: self.after_output_info,
        }

    def attach(self, scheduler: Any) -> None:
        """Bind to a scheduler whose pools exist."""
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
        from sglang.srt.runtime_context import get_parallel

        self.pools = Pools(scheduler)
        self._evictor = Evictor(scheduler, self.config, self.policy, self.pools)
        self._ranks, self._rank = get_parallel().tp_size, get_parallel().tp_rank
        # Set on a class that does not read it, this would lose every report without a word.
        assert hasattr(SchedulerOutputStreamer, "has_additional_customized_info"), "SGLang renamed the opt-in"
        SchedulerOutputStreamer.has_additional_customized_info = True

    def add_handshake(self, info: dict[str, Any], _scheduler: Any) -> dict[str, Any]:
        """Tell the launching process which policy is active and through which hooks."""
        targets.verify(self.hooks())
        assert self.pools is not None, "the handshake was asked for before the pools existed"
        return {**info, META_KEY: handshake(self.config)}

    def before_update_running_batch(self, _scheduler: Any, batch: Any) -> None:
        if self._evictor is not None:
            self._evictor.before_decode(batch)

    def after_checkpoint(self, _result: None, req: Any, tree_cache: Any) -> None:
        residency_of(req).prefilled(req.extend_end)

    def before_release(self, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
        if not req.kv.holds_kv:
            return
        state = residency_of(req)
        computed = len(req.origin_input_ids) + max(0, len(req.output_ids) - 1)
        state.advance(computed - state.offset)
        if state.trace is not None and req.finished():
            assert self.config.trace is not None
            state.trace.write(self.config.trace, req.rid if self._ranks == 1 else f"{req.rid}.tp{self._rank}")

    def after_reset_for_retract(self, _result: None, req: Any) -> None:
        state = residency_of(req)
        if state.barred_before is not None:
            req.skip_radix_cache_insert = state.barred_before  # its row will be whole again
        state.retracted()

    def after_alloc_rows(self, rows: list[int] | None, pool: Any, need_size: int) -> None:
        if rows and self.pools is not None and pool is self.pools.rows:
            self.pools.offsets[rows] = 0

    def after_init_forward(self, forward_batch: Any, _cls: type, batch: Any, model_runner: Any, **_: Any) -> None:
        """Rotate each new token by its true position, not by its place in the shortened row."""
        if self.pools is not None and forward_batch.forward_mode.is_decode():
            shift = self.pools.offsets[forward_batch.req_pool_indices]
            forward_batch.positions = forward_batch.positions + shift.to(forward_batch.positions.dtype)

    def after_output_info(self, info: dict[str, list[Any]], _streamer: Any, reqs: list[Any]) -> dict[str, list[Any]]:
        """Attach the report to finished responses; others get None, and a step that finishes none adds nothing."""
        assert self.pools is not None
        if not any(req.finished() for req in reqs):
            return info
        per_token = self.pools.bytes_per_token * self._ranks
        reports = [
            response_report(residency_of(req), self.config, per_token, req.retraction_count) if req.finished() else None
            for req in reqs
        ]
        return {**info, META_KEY: reports}


def handshake(config: KVPolicyConfig) -> dict[str, Any]:
    """What a scheduler must report for the launching process to serve."""
    return {
        "version": __version__,
        "config": config,
        "hooks": [target.path for target in targets.SCHEDULER],
    }
