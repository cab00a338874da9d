"""SGLang's row, slot and KV pools as the plugin uses them, and the proof that they are of that kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpolicy.kernels.coarser_codes import coarsen_rows
from kvpolicy.kernels.packed_buffer import Buffer, PackedBuffer
from kvpolicy.quant.kv_bytes import kv_bytes_per_token
from kvpolicy.sglang_plugin.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.sglang_plugin.packed_pool import PackedKVPool


class Pools:
    """The pools of one scheduler process.

    keys, values : per layer ``[slots, H_kv, D]``; a slot index serves all layers.
    packed : SGLang's pool, if it is stored in low bits; None if in the precision of the model.
    offsets : int64 ``[rows]``, true minus resident length of the request in that row.
    """

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        from kvpolicy.sglang_plugin.packed_pool import PackedKVPool

        self.tree: Any = scheduler.tree_cache
        self.rows: Any = scheduler.req_to_token_pool
        self.allocator: Any = scheduler.token_to_kv_pool_allocator
        cache = self.allocator.get_kvcache()
        self.packed: PackedKVPool | None = cache if isinstance(cache, PackedKVPool) else None
        for found, wanted in (
            (cache, PackedKVPool if self.packed is not None else MHATokenToKVPool),
            (self.allocator, TokenToKVPoolAllocator),
            (self.rows, ReqToTokenPool),
        ):
            if type(found) is not wanted:
                raise KVPolicyError(
                    f"kv_policy needs SGLang's {wanted.__name__}, but this model and these options made it use "
                    f"{type(found).__name__}."
                )
        self.layers = tuple(range(cache.start_layer, cache.start_layer + cache.layer_num))
        self.keys: list[Buffer] = [cache.get_key_buffer(layer) for layer in self.layers]
        self.values: list[Buffer] = [cache.get_value_buffer(layer) for layer in self.layers]
        self.offsets = torch.zeros(self.rows.req_to_token.shape[0], dtype=torch.int64, device=self.keys[0].device)

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def full_bytes_per_token(self) -> float:
        """Bytes of one token over this process' layers and KV heads, in the precision of the model."""
        _, heads, head_dim = self.keys[0].shape
        return kv_bytes_per_token(len(self.layers), heads, head_dim, 8 * self.keys[0].dtype.itemsize)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one resident token as it is stored: of a packed pool all that is allocated, divided by its slots."""
        if self.packed is None:
            return self.full_bytes_per_token
        return sum(self.packed.get_kv_size_bytes()) / self.keys[0].shape[0]

    @property
    def movable(self) -> list[list[torch.Tensor]]:
        """Every kind of tensor that belongs to slots, ``[S, H, *]`` for each layer."""
        if self.packed is not None:
            return self.packed.movable()
        return [[each for each in buffers if isinstance(each, torch.Tensor)] for buffers in (self.keys, self.values)]

    def coarsen(self, slots: torch.Tensor, bits: torch.Tensor) -> None:
        """Leave packed rows in `slots` (int64 ``[K]``) as many levels as `bits` (uint8 ``[L, H_kv, K]``) says."""
        for buffers in (self.keys, self.values):
            for buffer, of_layer in zip(buffers, bits, strict=True):
                if isinstance(buffer, PackedBuffer):
                    coarsen_rows(buffer, slots, of_layer)

    def row(self, req: Any, length: int) -> torch.Tensor:
        """int64 ``[length]``: the slots of a request, oldest token first (a copy)."""
        row: torch.Tensor = self.rows.req_to_token[req.kv.req_pool_idx, :length]
        return row.to(torch.int64)

    def take_slots(self, req: Any, row: torch.Tensor, n_keep: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Slots that a request may write its `n_keep` kept tokens to, and those it has left over.

        The first `cache_protected_len` slots of a row belong to the radix tree and may be shared, so
        the destination is made of the request's own slots and, where they are too few, of fresh ones.
        The request's lock on the tree is released: its prefix stays there, reusable and evictable.
        None, and nothing changed, when even evicting the tree could not free enough.

        The tree may evict this very prefix to make room: its rows keep their content until someone
        writes to them, and until the caller has moved the kept tokens nobody does.
        """
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        own = row[req.kv.cache_protected_len :]
        missing = n_keep - len(own)
        self.tree.unlock(req.lock)
        if missing > self.allocator.available_size() + self.tree.evictable_size():
            req.lock = self.tree.lock(req.last_node)
            return None
        req.lock = None
        if missing <= 0:
            return own[:n_keep], own[n_keep:]
        evict_from_tree_cache(self.tree, missing)
        fresh = self.allocator.alloc(missing)
        assert fresh is not None, f"{missing} slots were counted as available, but could not be had"
        return torch.cat([own, fresh]), own[:0]

    def set_row(self, req: Any, slots: torch.Tensor, left_over: torch.Tensor, *, evicted: int) -> None:
        """Make `slots` the request's row, give the left-over ones back, and shift its positions."""
        row = req.kv.req_pool_idx
        self.rows.req_to_token[row, : len(slots)] = slots.to(torch.int32)
        self.allocator.free(left_over)
        self.offsets[row] += evicted
        req.kv.cache_protected_len = 0
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(slots)
