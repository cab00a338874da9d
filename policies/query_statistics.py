"""What `triattention` knows of a model's queries before it sees a request, and the file that holds it.

The file is in safetensors format: tensors ``mean_real``, ``mean_imag``, ``mean_abs`` (fp32 ``[L, H_q, D / 2]``),
``inv_freq`` (fp32 ``[D / 2]``) and ``attention_scaling`` (fp64, no dimension); everything else is in its metadata.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvpolicy import __version__
from kvpolicy.policies.base import ModelShape

FORMAT = "kvpolicy query statistics, version 1"
TENSORS = ("mean_real", "mean_imag", "mean_abs", "inv_freq", "attention_scaling")
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class QueryStatistics:
    """Means over the queries of a text, after any q_norm and before RoPE, as complex numbers.

    Frequency pair ``f`` of a query is the complex number of its channels ``f`` and ``f + D / 2``.

    mean_real, mean_imag : ``[L, H_q, D / 2]``, mean of the pairs.
    mean_abs : ``[L, H_q, D / 2]``, mean of their absolute values.
    inv_freq : ``[D / 2]``, by how many radians RoPE turns each pair per token, rope scaling included.
    attention_scaling : by how much RoPE stretches queries and keys; 1 unless the model uses YaRN.
    model : its name; for people only.
    tokens : length of the text, 0 if unknown.
    """

    mean_real: torch.Tensor
    mean_imag: torch.Tensor
    mean_abs: torch.Tensor
    inv_freq: torch.Tensor
    attention_scaling: float
    kv_heads: int
    rope_theta: float
    model: str = ""
    tokens: int = 0

    @property
    def shape(self) -> ModelShape:
        """Of the model that these are the queries of."""
        layers, query_heads, pairs = self.mean_abs.shape
        return ModelShape(layers, query_heads, self.kv_heads, 2 * pairs, self.rope_theta)

    def on(self, device: torch.device) -> QueryStatistics:
        """The same in fp64 on `device`."""
        names = ("mean_real", "mean_imag", "mean_abs", "inv_freq")
        return replace(self, **{name: getattr(self, name).to(device, torch.float64) for name in names})

    def check(self) -> None:
        """Raise ValueError, saying what is wrong, unless these can be statistics of a model."""
        shapes = {tuple(x.shape) for x in (self.mean_real, self.mean_imag, self.mean_abs)}
        if len(shapes) > 1 or self.mean_abs.dim() != 3 or self.inv_freq.shape != self.mean_abs.shape[2:]:
            raise ValueError("the shapes of its tensors do not go together")
        if not 0 < self.kv_heads <= self.shape.query_heads or self.shape.query_heads % self.kv_heads:
            raise ValueError(f"{self.shape.query_heads} query heads do not share {self.kv_heads} KV heads evenly")
        if not all(x.isfinite().all() for x in (self.mean_real, self.mean_imag, self.mean_abs, self.inv_freq)):
            raise ValueError("it holds infinities or NaN")
        if (self.mean_real.hypot(self.mean_imag) > self.mean_abs * 1.001 + 1e-6).any():
            raise ValueError("a mean query is longer than the mean length of the queries")
        if not 0 < self.attention_scaling < float("inf"):
            raise ValueError(f"attention_scaling is {self.attention_scaling}")


def load(path: str, device: torch.device = CPU) -> QueryStatistics:
    """Statistics of a file in fp64 on `device`, read once per version of the file.

    Raises
    ------
    ValueError
        A clause: why it cannot be read.
    """
    try:
        modified = os.stat(path).st_mtime_ns
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return _load(path, modified, device)


@functools.lru_cache(maxsize=8)
def _load(path: str, modified: int, device: torch.device) -> QueryStatistics:
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    if told.get("format") != FORMAT or not tensors.keys() >= set(TENSORS):
        raise ValueError(f"{path} holds no query statistics of kvpolicy: format {told.get('format')!r}, not {FORMAT!r}")
    try:
        statistics = QueryStatistics(
            **{name: tensors[name] for name in TENSORS[:-1]},
            attention_scaling=tensors["attention_scaling"].item(),
            kv_heads=int(told["kv_heads"]),
            rope_theta=float(told["rope_theta"]),
            model=told["model"],
            tokens=int(told["tokens"]),
        )
        statistics.check()
    except (KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return statistics.on(device)


def serialized(statistics: QueryStatistics) -> bytes:
    """The content of a statistics file. Raises ValueError if :meth:`QueryStatistics.check` does."""
    statistics.check()
    tensors = {name: getattr(statistics, name).to("cpu", torch.float32).contiguous() for name in TENSORS[:-1]}
    tensors["attention_scaling"] = torch.tensor(statistics.attention_scaling, dtype=torch.float64)
    told = {**statistics.shape._asdict(), "model": statistics.model, "tokens": statistics.tokens}
    return save(tensors, {"format": FORMAT, "kvpolicy": __version__, **{name: str(x) for name, x in told.items()}})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all of it was written, and leaves no trace otherwise.

    Raises
    ------
    OSError
        On entry if the folder cannot be written to, on exit if `path` cannot be replaced.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(statistics: QueryStatistics, path: Path) -> None:
    """Write a statistics file, whole or not at all."""
    with replacing(path) as file:
        file.write(serialized(statistics))
