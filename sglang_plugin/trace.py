"""Which tokens survived: one .npz per finished request, when `kv_trace` asks for it."""

from __future__ import annotations

import hashlib
import logging
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


class Trace:
    """True positions of one request's resident tokens, per layer and KV head, at every eviction.

    The file holds ``kept_0, kept_1, …`` int32 ``[L, H_kv, n_keep]`` and ``true_len`` int64
    ``[evictions]``, the tokens computed before each of them.
    """

    def __init__(self, prefill: int, layers: int, heads: int) -> None:
        self._positions = torch.arange(prefill, dtype=torch.int32).repeat(layers, heads, 1)
        self._next = prefill
        self._kept: list[np.ndarray] = []
        self._true_len: list[int] = []

    def evicted(self, keep: torch.Tensor, true_len: int) -> None:
        """`keep` int64 ``[L, H_kv, n_keep]`` indexes the resident tokens, of `true_len` ever computed."""
        new = torch.arange(self._next, true_len, dtype=torch.int32)
        appended = torch.cat([self._positions, new.expand(*self._positions.shape[:2], -1)], dim=-1)
        self._positions = appended.gather(-1, keep.cpu())
        self._next = true_len
        self._kept.append(self._positions.numpy().copy())
        self._true_len.append(true_len)

    def write(self, folder: str, name: str) -> None:
        """Write ``<folder>/<name>.npz``, whole or not at all; a failure is logged, for serving goes on."""
        target = Path(folder) / f"{_file_name(name)}.npz"
        partial = target.with_suffix(".part")
        arrays: dict[str, Any] = {f"kept_{i}": kept for i, kept in enumerate(self._kept)}
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez_compressed(file, true_len=np.array(self._true_len, dtype=np.int64), **arrays)
            partial.rename(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            logger.error("kvpolicy: the trace of request %s is lost: %s", name, error)


def _file_name(name: str) -> str:
    """A request's id, which clients may choose, as a file name."""
    quoted = urllib.parse.quote(name, safe="")
    return quoted if len(quoted) <= 200 else hashlib.sha256(name.encode()).hexdigest()
