"""Attention over a packed cache, in place of SGLang's own backend.

A decode step reads packed rows where they lie. A prefill attends to its own keys and values as they come, and
to unpacked copies of what the request already has in the cache: of these rows and no others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvpolicy.kernels.packed_attention import packed_attention
from kvpolicy.kernels.packed_buffer import Buffer, PackedBuffer
from kvpolicy.kernels.unpack_rows_paged import unpack_rows_paged
from kvpolicy.sglang_plugin.kernel_switch import kernels_on
from kvpolicy.sglang_plugin.protection import Protection


class PackedAttention:
    """Attention of one scheduler process whose pool is a `PackedKVPool`."""

    def __init__(self, pool: Any, req_to_token: torch.Tensor, protection: Protection | None) -> None:
        self._pool = pool
        self._kernels = kernels_on(req_to_token.device)
        self._req_to_token = req_to_token
        self._protection = protection

    def forward(
        self,
        _backend: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kw: Any,
    ) -> torch.Tensor:
        """``AttentionBackend.forward``: `q` is ``[n, H_q * D]`` after RoPE, `k` and `v` are of new tokens."""
        assert not kw, f"{kw = } of attention would be left out"
        assert not layer.logit_cap, f"{layer.logit_cap = } would be left out"
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(len(q), layer.tp_q_head_num * layer.v_head_dim)
        queries = q.reshape(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        index = layer.layer_id - self._pool.start_layer
        if mode.is_decode():
            if save_kv_cache:
                self._pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
            output = packed_attention(
                queries,
                self._pool.k_buffer[index],
                self._pool.v_buffer[index],
                self._req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                layer.scaling,
                use_triton=self._kernels,
            )
            return output.flatten(1)
        assert save_kv_cache, "the keys and values of a prefill were written past the pool"
        keys, values = (rows.view(len(q), -1, queries.shape[-1]) for rows in (k, v))
        if self._protection is not None:
            self._protection.choose(index, forward_batch.out_cache_loc, values)
        self._pool.set_kv_buffer(layer, forward_batch.out_cache_loc, keys, values)
        return self._prefill(queries, keys, values, index, layer.scaling, forward_batch).flatten(1)

    def _read(self, buffer: Buffer, slots: torch.Tensor) -> torch.Tensor:
        """``[n, H, D]``: the rows in `slots`."""
        if self._kernels and isinstance(buffer, PackedBuffer):
            return unpack_rows_paged(buffer, slots)
        return buffer[slots]

    def _prefill(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        index: int,
        scaling: float,
        forward_batch: Any,
    ) -> torch.Tensor:
        """``[n, H_q, D]``: attention of new tokens to all tokens of their request up to their own."""
        output, start = torch.empty_like(queries), 0
        lengths = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        for request, (before, length) in enumerate(lengths):
            new = slice(start, start + length)
            own_keys, own_values = keys[new], values[new]
            if before:
                row = forward_batch.req_pool_indices[request : request + 1]  # as an index a scalar makes the host wait
                slots = self._req_to_token[row, :before][0].long()
                own_keys = torch.cat([self._read(self._pool.k_buffer[index], slots), own_keys])
                own_values = torch.cat([self._read(self._pool.v_buffer[index], slots), own_values])
            attended = scaled_dot_product_attention(
                queries[new].transpose(0, 1)[None],
                own_keys.transpose(0, 1)[None],
                own_values.transpose(0, 1)[None],
                attn_mask=causal_lower_right(length, before + length) if before else None,
                is_causal=not before,
                scale=scaling,
                enable_gqa=True,
            )
            output[new] = attended[0].transpose(0, 1)
            start += length
        return output
