"""Packed pools on the CPU, built with the arguments that SGLang builds its own with, and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

FIRST_LAYER = 5


def built(
    pool_class: Callable[..., Any], size: int, *, layers: int, heads: int, head_dim: int, dtype: torch.dtype
) -> Any:
    """As `KVCacheConfigurator._build_mha_kv_pool` does; `pool_class` knows the rest already."""
    return pool_class(
        size,
        page_size=1,
        dtype=dtype,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        start_layer=FIRST_LAYER,
        end_layer=FIRST_LAYER + layers - 1,
        enable_alt_stream=True,
        enable_kv_cache_copy=False,
        post_capture_active=False,
    )


def tensors_of(thing: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor that an object holds, in whatever it holds of lists, dictionaries and objects of ours."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from tensors_of(value, seen)
    elif type(thing).__module__.startswith("kvpolicy."):
        yield from tensors_of(vars(thing), seen)


def allocated_bytes(*things: Any) -> int:
    """Bytes of the memory behind all these tensors, each piece once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_of(things)}
    return sum(storage.nbytes() for storage in storages.values())
