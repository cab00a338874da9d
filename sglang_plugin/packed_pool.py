"""SGLang's KV pool with low-bit storage: packed values (and keys), and rows kept in the precision of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc

from kvpolicy.kernels.pack_rows_paged import pack_rows_paged
from kvpolicy.kernels.packed_buffer import PackedBuffer
from kvpolicy.quant.cache_format import CacheFormat
from kvpolicy.sglang_plugin.kernel_switch import kernels_on
from kvpolicy.sglang_plugin.protected_rows import ProtectedRows


class PackedKVPool(MHATokenToKVPool):  # type: ignore[misc]  # SGLang ships no types
    """A pool whose `get_value_buffer`, and `get_key_buffer` if keys are packed, are :class:`PackedBuffer`.

    Whoever reads rows asks for these of certain slots; nothing ever unpacks the whole pool.

    Parameters
    ----------
    cache_format : how keys and values are stored.
    requests, recent : running requests at most, and how many of its newest tokens each keeps unpacked.
    """

    def __init__(self, *args: Any, cache_format: CacheFormat, requests: int, recent: int, **kw: Any) -> None:
        self.format, self._requests, self._recent = cache_format, requests, recent
        self.protected: ProtectedRows | None = None
        super().__init__(*args, **kw)
        # Kernels of SGLang that write rows of the pool's dtype past `set_kv_buffer` must not take this one for theirs.
        self.dtype = self.store_dtype = torch.uint8
        self._kernels = kernels_on(torch.device(self.device))

    def _create_buffers(self) -> None:
        assert not self.post_capture_active, "a pool that SGLang sizes after graph capture cannot be packed"
        assert self.page_size == 1, f"{self.page_size = } must be 1"
        slots = self.size + self.page_size
        rows = self.format.protected_rows(slots, self._requests, self._recent)
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            if rows:
                self.protected = ProtectedRows(
                    self.layer_num, slots, self.head_num, rows, self.v_head_dim, self.dtype, torch.device(self.device)
                )
            self.k_buffer = [self._buffer(self.format.key_bits, self.head_dim) for _ in range(self.layer_num)]
            self.v_buffer = [
                self._buffer(self.format.value_bits, self.v_head_dim, layer) for layer in range(self.layer_num)
            ]

    def _buffer(self, bits: int | None, head_dim: int, protected_layer: int | None = None) -> Any:
        shape = (self.size + self.page_size, self.head_num)
        if bits is None:
            return torch.zeros(*shape, head_dim, dtype=self.dtype, device=self.device)
        group = self.format.group
        assert group is not None, "the format was not fitted to the model's heads"
        scale, minimum = torch.zeros(2, *shape, head_dim // group, dtype=self.dtype, device=self.device)
        codes = torch.zeros(*shape, head_dim * bits // 8, dtype=torch.uint8, device=self.device)
        index = rows = None
        if self.protected is not None and protected_layer is not None:
            index, rows = self.protected.index[protected_layer], self.protected.rows[protected_layer]
        return PackedBuffer(codes, scale, minimum, bits, group, index, rows)

    def movable(self) -> list[list[torch.Tensor]]:
        """Every kind of tensor that belongs to slots, ``[S, H, *]`` per layer, but for the index of protected rows."""
        return _kinds(self.k_buffer) + _kinds(self.v_buffer)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values, all that is allocated for them."""
        keys, values = (
            sum(tensor.nbytes for kind in _kinds(b) for tensor in kind) for b in (self.k_buffer, self.v_buffer)
        )
        return keys, values + (0 if self.protected is None else self.protected.nbytes)

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, *_: Any) -> None:
        """Store new rows ``[n, H, D]`` of one layer."""
        slots, _swa, _full = unwrap_write_loc(loc_info)
        index = layer.layer_id - self.start_layer
        for buffer, rows in ((self.k_buffer[index], cache_k), (self.v_buffer[index], cache_v)):
            rows = rows.view(len(slots), *buffer.shape[1:])
            if not isinstance(buffer, PackedBuffer):
                buffer[slots] = rows
            elif self._kernels:
                pack_rows_paged(buffer, slots, rows)
            else:
                buffer.write(slots, rows)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots, with scales and protected rows."""
        for kind in self.movable():
            for tensor in kind:
                tensor[tgt_loc] = tensor[src_loc]
        if self.protected is not None:
            held = self.protected.read(src_loc)
            self.protected.give_back(tgt_loc)
            self.protected.put(tgt_loc, held)

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("kvpolicy: a packed KV cache has no copy outside its pool")

    get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos = get_device_pool_infos = _unsupported


def _kinds(buffers: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Tensors of slots by kind, one per layer: codes, scales and minima of packed rows, or the rows."""
    per_layer = [each.tensors[:3] if isinstance(each, PackedBuffer) else (each,) for each in buffers]
    return [list(kind) for kind in zip(*per_layer, strict=True)]
