"""`int2`, `int4`, `int8`: low-bit integers with a scale and a minimum per token, KV head and group of channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpolicy.kernels.pack_rows import check_layout, pack_rows, unpack_rows
from kvpolicy.quant.codec import Codec


@dataclass(frozen=True)
class AsymmetricInt(Codec):
    """Codes of `bits_per_code` bits between the smallest and the largest number of each group of `group` channels.

    Parameters
    ----------
    bits_per_code : {2, 4, 8}
    group : int or None
        Channels that share a scale and a minimum, both of the dtype of the rows; None: the whole head.
    """

    bits_per_code: int
    group: int | None

    @property
    def name(self) -> str:
        return f"int{self.bits_per_code}-g{'D' if self.group is None else self.group}"

    def check(self, head_dim: int) -> None:
        check_layout(head_dim, self.bits_per_code, self._group(head_dim))

    def bits(self, head_dim: int, dtype: torch.dtype) -> float:
        return self.bits_per_code + 2 * 8 * dtype.itemsize / self._group(head_dim)

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        packed = pack_rows(rows, self.bits_per_code, self._group(rows.shape[-1]))
        return unpack_rows(packed, self.bits_per_code, rows.dtype)

    def _group(self, head_dim: int) -> int:
        return head_dim if self.group is None else self.group
