"""Attention on a CPU: one call for requests of about the same length, where SGLang's own loops over all of them.

What it does not do itself is left to its parent, SGLang's `torch_native`, one layer at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from kvpolicy.kernels.batched_decode_attention import DecodePlan, batched_decode_attention, plan_decode
from kvpolicy.kernels.prefill_attention import causal_mask, prefill_attention
from kvpolicy.sglang_plugin.platform import ATTENTION_BACKEND


class PrefillPlan(NamedTuple):
    """What all layers of a prefill have in common.

    requests : how many new tokens each has, and int64 slots of all its tokens, the new ones last
    """

    requests: list[tuple[int, torch.Tensor]]
    mask: torch.Tensor


class CPUAttentionBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang ships no types
    """Plans a forward pass once, at its first layer; metadata of a batch is only used for that batch."""

    _batch: Any = None
    forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._batch, self.forward_metadata = forward_batch, None

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """``[B, H_q * D_v]``; `q` is ``[B, H_q * D]`` after RoPE, `k` and `v` are of the new tokens."""
        keys, values = self._buffers(layer)
        if not self._serves(layer, forward_batch) or keys.dtype != q.dtype:
            output: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return output
        self._write(k, v, layer, forward_batch, save_kv_cache)
        plan = self._plan(forward_batch)
        if plan is None:
            row_bytes = (keys[0].numel() + values[0].numel()) * keys.element_size()
            lengths = forward_batch.seq_lens.tolist()
            table, rows = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
            plan = self.forward_metadata = plan_decode(table, rows, lengths, row_bytes, q.dtype)
        assert isinstance(plan, DecodePlan), f"{plan = } is of another kind of forward pass"
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return batched_decode_attention(queries, keys, values, plan, layer.scaling).flatten(1)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """``[n, H_q * D_v]``; `q` is ``[n, H_q * D]`` after RoPE, `k` and `v` are of the new tokens."""
        keys, values = self._buffers(layer)
        known = forward_batch.extend_prefix_lens_cpu is not None and forward_batch.extend_seq_lens_cpu is not None
        if not known or not self._serves(layer, forward_batch) or keys.dtype != q.dtype:
            output: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return output
        self._write(k, v, layer, forward_batch, save_kv_cache)
        plan = self._plan(forward_batch)
        if plan is None:
            plan = self.forward_metadata = self._plan_prefill(forward_batch, q.dtype)
        assert isinstance(plan, PrefillPlan), f"{plan = } is of another kind of forward pass"
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        parts = torch.split(queries, [new for new, _ in plan.requests])
        return torch.cat(
            [
                prefill_attention(part, _rows(keys, slots), _rows(values, slots), plan.mask, layer.scaling)
                for part, (_, slots) in zip(parts, plan.requests, strict=True)
            ]
        ).flatten(1)

    def _serves(self, layer: Any, forward_batch: Any) -> bool:
        """Whether this layer is plain causal attention."""
        return not (
            layer.is_cross_attention
            or forward_batch.encoder_lens is not None
            or layer.attn_type == AttentionType.ENCODER_ONLY
            or (layer.sliding_window_size is not None and layer.sliding_window_size > -1)
            or self.use_sliding_window_kv_pool
            or layer.logit_cap
        )

    def _buffers(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``[S, H_kv, D]`` and ``[S, H_kv, D_v]``."""
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def _write(self, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool) -> None:
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)

    def _plan(self, forward_batch: Any) -> Any:
        """The plan of this batch, or None if there is none yet."""
        if forward_batch is not self._batch:
            self.init_forward_metadata(forward_batch)
        return self.forward_metadata

    def _plan_prefill(self, forward_batch: Any, dtype: torch.dtype) -> PrefillPlan:
        table, requests = self.req_to_token_pool.req_to_token, []
        lengths = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        for row, (before, new) in zip(forward_batch.req_pool_indices.tolist(), lengths, strict=True):
            requests.append((int(new), table[row, : before + new].long()))
        return PrefillPlan(requests, causal_mask(max(len(slots) for _, slots in requests), dtype))


def _rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``buffer[slots]``, which takes several times as long on a CPU."""
    return buffer.view(len(buffer), -1).index_select(0, slots).view(len(slots), *buffer.shape[1:])


def register() -> None:
    """Make the backend known to SGLang's model runner, under the platform's name for it."""
    register_attention_backend(ATTENTION_BACKEND)(CPUAttentionBackend)
