"""What a way of storing rows of the cache in few bits has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


class Codec(ABC):
    """A lossy store of rows ``[..., D]``, one row per token and KV head, each stored independently of the others."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As :func:`kvpolicy.quant.codecs.codec` reads it."""

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise ValueError if rows of `head_dim` numbers cannot be stored so."""

    @abstractmethod
    def bits(self, head_dim: int, dtype: torch.dtype) -> float:
        """Bits per number of rows ``[..., head_dim]`` of `dtype`, with everything that is stored beside the codes."""

    @abstractmethod
    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        """The numbers that stand for finite rows of a size that :meth:`check` accepts; any float dtype."""

    def round_trip(self, rows: torch.Tensor) -> torch.Tensor:
        """What a reader of the cache would see of `rows`.

        Parameters
        ----------
        rows : ``[..., N, D]``
            fp32, fp16 or bf16; not changed.

        Returns
        -------
        A new tensor of the shape and dtype of `rows`, all of it finite.

        Raises
        ------
        ValueError
            If rows of this size cannot be stored, or a number is NaN or infinite, or cannot be restored as a number
            because its group spans more than fp32 can hold.
        """
        self.check(rows.shape[-1])
        if not bool(rows.isfinite().all()):
            raise ValueError(f"{self.name} stores finite numbers only, and the rows hold a NaN or an infinity")
        restored = self.restored(rows).to(rows.dtype)
        if not bool(restored.isfinite().all()):
            raise ValueError(f"{self.name} cannot store these rows: numbers of one group span more than fp32 can hold")
        return restored


@dataclass(frozen=True)
class Unchanged(Codec):
    """Rows as they are: the arm that every other one is compared with."""

    @property
    def name(self) -> str:
        return "none"

    def check(self, head_dim: int) -> None:
        pass

    def bits(self, head_dim: int, dtype: torch.dtype) -> float:
        return float(8 * dtype.itemsize)

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()
