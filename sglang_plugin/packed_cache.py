"""Low-bit storage in SGLang: the pool, how many tokens fit into it, attention over it, protected rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.quant.cache_format import SINKS, CacheFormat
from kvpolicy.sglang_plugin import targets
from kvpolicy.sglang_plugin.packed_attention import PackedAttention
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.protection import Protection
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import residency_of

logger = logging.getLogger(__name__)


class PackedCache:
    """The packed cache of one scheduler process.

    Parameters
    ----------
    cache_format : as the launch asks for it, not yet fitted to the model
    recent : tokens of a request that are protected as its newest, at most
    settings_of : the settings of a `Req`
    """

    def __init__(self, cache_format: CacheFormat, recent: int, settings_of: Callable[[Any], RequestSettings]) -> None:
        self._format, self._recent, self._settings_of = cache_format, recent, settings_of
        self._pools: Pools | None = None
        self.protection: Protection | None = None
        self.attention: PackedAttention | None = None
        self._warned = False

    def hooks(self) -> targets.Hooks:
        """Hook of each target in `targets.PACKED`."""
        return {
            targets.POOL_CLASS: self.after_resolve_kv_pool_class,
            targets.CELL_SIZE: self.after_compute_cell_size,
            targets.POOL_SIZES: self.before_calculate_pool_sizes,
            targets.FREE_SLOTS: self.before_free,
            targets.CLEAR_SLOTS: self.after_clear,
        }

    def allocated(self, runner: Any) -> None:
        """SGLang's `ModelRunner` has its pools: attention is ready before graphs that will contain it are captured."""
        pool = runner.token_to_kv_pool
        if pool.protected is not None:
            self.protection = Protection(pool.protected, pool.format)
        self.attention = PackedAttention(pool, runner.req_to_token_pool.req_to_token, self.protection)

    def attach(self, pools: Pools) -> None:
        """Bind to the pools of a scheduler."""
        assert pools.packed is not None, "SGLang built its own pool"
        self._pools = pools

    def after_resolve_kv_pool_class(self, stock: Any, configurator: Any, *, kind: str, **_: Any) -> Any:
        """The packed pool in place of SGLang's."""
        from kvpolicy.sglang_plugin.packed_pool import PackedKVPool  # imports SGLang

        if kind != "mha":
            return stock
        fitted = self._format.fitted(configurator.model_config.head_dim)
        requests = configurator.server_args.max_running_requests or 0
        return functools.partial(PackedKVPool, cache_format=fitted, requests=requests, recent=self._recent)

    def after_compute_cell_size(self, _size: int, configurator: Any, kvc: Any, num_layers: int) -> int:
        """Bytes of one more slot, the protected rows that come with it included."""
        slot, row, fixed_rows = self._bytes(kvc, num_layers)
        # `calculate_pool_sizes` of this configurator comes next.
        configurator._kvpolicy_fixed_bytes = fixed_rows * row
        share = self._format.protect if self._format.protects else 0
        return -int(-(slot + share * row) // 1)

    @staticmethod
    def before_calculate_pool_sizes(
        configurator: Any, available_bytes: int, page_size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Set the protected rows of running requests aside."""
        return (configurator, max(0, available_bytes - configurator._kvpolicy_fixed_bytes), page_size), {}

    def _bytes(self, kvc: Any, layers: int) -> tuple[int, int, int]:
        """Bytes of a slot and of a protected row over `layers`, and protected rows whatever the number of slots."""
        from sglang.srt.runtime_context import get_parallel

        model = kvc.model_config
        heads = model.get_num_kv_heads(get_parallel().attn_tp_size, get_parallel().attn_dcp_size)
        shape = (heads, model.head_dim, kvc.kv_cache_dtype.itemsize)
        fitted = self._format.fitted(model.head_dim)
        slot, row = layers * fitted.slot_bytes(*shape), layers * fitted.protected_row_bytes(*shape)
        requests = kvc.server_args.max_running_requests or 0
        return slot, row, fitted.rows_of_requests(requests, self._recent) if fitted.protects else 0

    def before_free(self, allocator: Any, free_index: Any) -> None:
        """Slots are given back; in a group of them SGLang calls again when it is complete."""
        if self._is_ours(allocator) and allocator.free_group is None and free_index.numel():
            assert self.protection is not None
            self.protection.released(free_index)

    def after_clear(self, _result: None, allocator: Any) -> None:
        if self._is_ours(allocator):
            assert self.protection is not None
            self.protection.cleared()

    def _is_ours(self, allocator: Any) -> bool:
        return self.protection is not None and self._pools is not None and allocator is self._pools.allocator

    def before_forward(self, forward_batch: Any, reqs: Sequence[Any]) -> None:
        """SGLang has made the `ForwardBatch` of its next step."""
        if self.protection is None:
            return
        if forward_batch.forward_mode.is_decode():
            self.protection.before_decode(forward_batch.out_cache_loc)
        elif forward_batch.forward_mode.is_extend():
            chunks = []
            lengths = zip(reqs, forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
            for req, before, length in lengths:
                end, whole = before + length, len(req.origin_input_ids) + len(req.output_ids)
                recent = self._settings_of(req).period
                chunks.append((before, end, whole, recent))
                residency_of(req).settled = max(0, min(end, whole - recent))
            self.protection.before_prefill(chunks, forward_batch.out_cache_loc.device)

    def before_update_running_batch(self, batch: Any, wait: Callable[[], None]) -> None:
        """Decide on the tokens that are recent no longer. `wait` orders what follows after the step in flight."""
        if self.protection is None or batch.is_empty():
            return
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            state, recent = residency_of(req), self._settings_of(req).period
            if state.published == req.extend_end and length - state.settled >= 2 * recent:
                wait()
                self._settle(req, length - recent)

    def before_release(self, req: Any, wait: Callable[[], None]) -> None:
        """The request ends or is retracted; what stays in the radix tree keeps rows for its range alone.

        Its share of protected tokens is read back, so the host waits for the device here, once a request.
        """
        if self.protection is None:
            return
        wait()
        state, length = residency_of(req), req.kv.kv_committed_len
        assert self._pools is not None
        self.protection.settle_released()
        held = self.protection.rows.holds(self._pools.row(req, length))
        state.protected_end = float(held.float().mean()) if length else 0.0
        if not state.evictions:
            self._settle(req, length)
        self._warn_of_denied()

    def _settle(self, req: Any, end: int) -> None:
        assert self._pools is not None
        assert self.protection is not None
        state = residency_of(req)
        first = max(SINKS, state.settled)
        if first < end:
            self.protection.settle(self._pools.row(req, end)[first:], first)
        state.settled = max(state.settled, end)

    def report(self, req: Any) -> dict[str, Any]:
        """What a response says of how its tokens were stored."""
        assert self._pools is not None
        assert self._pools.packed is not None
        found = self._pools.packed.format
        bits = 8 * self._pools.bytes_per_token / (self._pools.full_bytes_per_token / self._pools.keys[0].dtype.itemsize)
        record = {
            "kv_quant": found.name,
            "kv_quant_group": found.group,
            "kv_quant_keys": found.keys,
            "bits_per_element": bits,
            "kv_bytes_per_token_full": self._pools.full_bytes_per_token,
        }
        if self.protection is not None:
            record |= {
                "kv_protect": found.protect,
                "protected_end": residency_of(req).protected_end,
                "protected_rows_denied": int(self.protection.rows.denied),
            }
        return record

    def _warn_of_denied(self) -> None:
        assert self.protection is not None
        if not self._warned and int(self.protection.rows.denied):
            self._warned = True
            logger.warning(
                "kvpolicy: the rows for protected tokens ran out, and some tokens have only their low-bit codes "
                "(protected_rows_denied in meta_info). A larger max_running_requests sets more of them aside."
            )
