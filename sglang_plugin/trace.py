"""Which tokens survived: one small .npz per finished request, when `kv_trace` asks for it.

`kvpolicy.reports.trace_file` reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import urllib.parse
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvpolicy.kernels.packed_buffer import Buffer
from kvpolicy.kernels.value_range import value_range

logger = logging.getLogger(__name__)

FORMAT = "kvpolicy trace 2"
QUANTILES = (0.05, 0.5, 0.95)
_LARGEST = torch.finfo(torch.float16).max


class Trace:
    """What the heads of one request evicted, at every eviction.

    The file holds, for ``E`` evictions:

    * ``evicted_0, evicted_1, …``, uint8 ``[L, H_kv, ceil(true_len / 8)]``: bitmaps over positions, as
      `numpy.packbits` makes them, of the tokens that this eviction took from each head. What was computed by then and
      was never taken survives. An eviction takes few tokens, so that its bitmap deflates to little;
    * ``true_len``, int64 ``[E]``: tokens computed before each eviction;
    * ``value_range``, fp16 ``[E, 2, L, H_kv, quantiles]``: quantiles of the value range of the tokens that were kept
      and of those that were evicted, NaN where there are none; ``[0]`` if it was not recorded;
    * ``token_ids``, int32: prompt and output; empty if they were not given;
    * ``about``, JSON: ``format``, ``policy``, ``options``, ``budget``, ``period``, ``prompt_len``, ``model``,
      ``quantiles``.

    Bitmaps are deflated as they come in, so that a running request's trace takes no more than its file will.

    Parameters
    ----------
    prefill : int
        Tokens that were computed before the request decoded.
    layers, heads : int
        Of this process.
    """

    def __init__(self, prefill: int, layers: int, heads: int) -> None:
        self._prefill = self._next = prefill
        self._positions = torch.arange(prefill, dtype=torch.int32).repeat(layers, heads, 1)
        self._true_len: list[int] = []
        self._ranges: list[torch.Tensor] = []
        self._file = io.BytesIO()
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED)

    def evicted(self, keep: torch.Tensor, true_len: int, ranges: torch.Tensor | None = None) -> None:
        """One eviction, of `true_len` tokens ever computed.

        Parameters
        ----------
        keep : int64 ``[L, H_kv, n_keep]``
            Distinct indices into the tokens that were resident before it, oldest first.
        ranges : fp32 ``[L, H_kv, N]`` or None
            Value range of the tokens resident before it (:func:`resident_value_range`); for all evictions or none.
        """
        new = torch.arange(self._next, true_len, dtype=torch.int32)
        resident = torch.cat([self._positions, new.expand(*self._positions.shape[:2], -1)], dim=-1)
        chosen = keep.cpu()
        gone = torch.ones(resident.shape, dtype=torch.bool).scatter_(-1, chosen, False)
        bits = torch.zeros(*resident.shape[:2], true_len, dtype=torch.bool).scatter_(-1, resident.long(), gone)
        self._add(f"evicted_{len(self._true_len)}", np.packbits(bits.numpy(), axis=-1))
        if ranges is not None:
            kept = ranges.gather(-1, keep)
            lost = ranges[gone.to(ranges.device)].view(*keep.shape[:2], -1)
            self._ranges.append(torch.stack([_quantiles(kept), _quantiles(lost)]))
        self._positions, self._next = resident.gather(-1, chosen), true_len
        self._true_len.append(true_len)

    def write(
        self,
        folder: str,
        name: str,
        *,
        token_ids: Sequence[int] = (),
        prompt_len: int | None = None,
        policy: str = "",
        options: str = "",
        budget: int = 0,
        period: int = 0,
        model: str = "",
    ) -> None:
        """Write ``<folder>/<name>.npz``, whole or not at all; a failure is logged, for serving goes on.

        Once for each trace, after its last eviction. `token_ids` are of prompt and output; a `prompt_len` of None is
        the length of the prefill.
        """
        assert len(self._ranges) in (0, len(self._true_len)), "value ranges of some evictions only"
        about = {
            "format": FORMAT,
            "policy": policy,
            "options": options,
            "budget": budget,
            "period": period,
            "prompt_len": self._prefill if prompt_len is None else prompt_len,
            "model": model,
            "quantiles": QUANTILES,
        }
        self._add("true_len", np.array(self._true_len, dtype=np.int64))
        self._add("value_range", np.array([ranges.numpy() for ranges in self._ranges], dtype=np.float16))
        self._add("token_ids", np.array(token_ids, dtype=np.int32))
        self._add("about", np.array(json.dumps(about)))
        self._archive.close()
        target = Path(folder) / f"{_file_name(name)}.npz"
        partial = target.with_suffix(".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(self._file.getbuffer())
            partial.rename(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            logger.error("kvpolicy: the trace of request %s is lost: %s", name, error)

    def _add(self, name: str, array: npt.NDArray[np.generic]) -> None:
        with self._archive.open(f"{name}.npy", "w") as member:
            np.save(member, array, allow_pickle=False)


def resident_value_range(values: Sequence[Buffer], row: torch.Tensor) -> torch.Tensor:
    """Value range of the tokens in the slots `row`: ``L`` buffers ``[slots, H_kv, D]`` to fp32 ``[L, H_kv, N]``.

    One layer's values are copied at a time.
    """
    return torch.stack([value_range(buffer[row]).T for buffer in values])


def _quantiles(ranges: torch.Tensor) -> torch.Tensor:
    """``[L, H_kv, N]`` to fp16 ``[L, H_kv, quantiles]`` on the CPU, each the value of the nearest rank."""
    count = ranges.shape[-1]
    if count == 0:
        return torch.full((*ranges.shape[:2], len(QUANTILES)), torch.nan, dtype=torch.float16)
    ranks = [1 + round(quantile * (count - 1)) for quantile in QUANTILES]
    found = torch.stack([ranges.kthvalue(rank, dim=-1).values for rank in ranks], dim=-1)
    return found.clamp(max=_LARGEST).half().cpu()


def _file_name(name: str) -> str:
    """A request's id, which clients may choose, as a file name."""
    quoted = urllib.parse.quote(name, safe="")
    return quoted if len(quoted) <= 200 else hashlib.sha256(name.encode()).hexdigest()
