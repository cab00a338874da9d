"""Read what `kv_trace` wrote: which tokens every head of a request kept, at every eviction."""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT = "kvpolicy trace 2"
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


class TraceError(Exception):
    """A file is no trace that can be read; the message is one sentence for the user."""


@dataclass(frozen=True)
class TraceFile:
    """The evictions of one request. ``E`` evictions; ``T`` tokens computed before the last of them.

    true_len : int64 ``[E]``, tokens computed before each eviction.
    gone : int32 ``[L, H_kv, T]``, the eviction that took the token at a position from a head; ``E`` where none did.
    value_range : fp32 ``[E, 2, L, H_kv, len(quantiles)]``, quantiles of the value range of kept (0) and of evicted
        (1) tokens, NaN where there are none; None if it was not recorded.
    quantiles : which ones, between 0 and 1.
    token_ids : int32, prompt and output; empty if they were not recorded.
    prompt_len : tokens of the prompt.
    budget, period : 0 if they were not recorded, as policy, options and model are then empty.
    """

    true_len: npt.NDArray[np.int64]
    gone: npt.NDArray[np.int32]
    value_range: npt.NDArray[np.float32] | None
    quantiles: tuple[float, ...]
    token_ids: npt.NDArray[np.int32]
    prompt_len: int
    policy: str
    options: str
    budget: int
    period: int
    model: str

    @property
    def evictions(self) -> int:
        """How many there were."""
        return len(self.true_len)

    @property
    def layers(self) -> int:
        """Layers of the process that wrote the trace."""
        return int(self.gone.shape[0])

    @property
    def heads(self) -> int:
        """KV heads of a layer, of the process that wrote the trace."""
        return int(self.gone.shape[1])

    def held(self, eviction: int) -> npt.NDArray[np.bool_]:
        """``[L, H_kv, true_len]``: which of the tokens computed by then a head holds right after an eviction.

        A negative number counts from the last, as in a list.
        """
        number = range(self.evictions)[eviction]
        survives: npt.NDArray[np.bool_] = self.gone[:, :, : self.true_len[number]] > number
        return survives

    def kept(self, eviction: int) -> npt.NDArray[np.int32]:
        """``[L, H_kv, kept]``: positions, ascending, of the tokens that a head holds right after an eviction."""
        held = self.held(eviction)
        return held.nonzero()[2].astype(np.int32).reshape(self.layers, self.heads, -1)

    def shares(self) -> npt.NDArray[np.float64]:
        """``[E, T]``: share of all heads that hold a position after each eviction; NaN before it was computed."""
        tokens = self.gone.shape[-1]
        cells = self.gone.astype(np.int64) * tokens + np.arange(tokens)
        taken = np.bincount(cells.ravel(), minlength=(self.evictions + 1) * tokens).reshape(-1, tokens)
        shares = taken[::-1].cumsum(axis=0)[-2::-1] / (self.layers * self.heads)
        shares[np.arange(tokens) >= self.true_len[:, None]] = np.nan
        return shares


def load_trace(path: Path) -> TraceFile:
    """Read a trace.

    Raises
    ------
    TraceError
        If there is no such file, or it is no trace, one in another format, or damaged.
    """
    if path.is_dir():
        raise TraceError(f"{path} is a folder; name one of the .npz files in it.")
    if not path.exists():
        raise TraceError(f"{path} does not exist.")
    if not zipfile.is_zipfile(path):
        raise TraceError(f"{path} is not a trace; kv_trace writes one .npz file per request.")
    try:
        with np.load(path, allow_pickle=False) as file:
            return _read(path, file)
    except _DAMAGE as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}.") from error


def _read(path: Path, file: Any) -> TraceFile:
    if "about" not in file.files:
        if "true_len" in file.files:
            raise TraceError(
                f"{path} was written by an older kvpolicy, as lists of positions; run again with kv_trace to draw it."
            )
        raise TraceError(f"{path} is not a trace; kv_trace writes one .npz file per request.")
    about = json.loads(str(file["about"]))
    if (found := about.pop("format")) != FORMAT:
        raise TraceError(f"{path} is a {found!r}, and this kvpolicy reads {FORMAT!r}; use the version that wrote it.")
    true_len, ranges = file["true_len"], file["value_range"]
    return TraceFile(
        true_len=true_len,
        gone=_gone([file[f"evicted_{i}"] for i in range(len(true_len))], true_len),
        value_range=ranges.astype(np.float32) if len(ranges) else None,
        quantiles=tuple(about.pop("quantiles")),
        token_ids=file["token_ids"],
        **about,
    )


def _gone(bitmaps: list[npt.NDArray[np.uint8]], true_len: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Bitmaps of what each eviction took, to the number of the eviction that took it."""
    if not bitmaps:
        return np.zeros((0, 0, 0), dtype=np.int32)
    gone = np.full((*bitmaps[-1].shape[:2], true_len[-1]), len(bitmaps), dtype=np.int32)
    for number, (bitmap, length) in enumerate(zip(bitmaps, true_len, strict=True)):
        taken = np.unpackbits(bitmap, axis=-1, count=int(length)).view(np.bool_)
        gone[:, :, :length][taken] = number
    return gone
