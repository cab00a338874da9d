"""Which protected rows of a packed cache are taken: lists of free rows per layer and KV head, kept on the device.

A row belongs to one slot, in one layer and head; each head protects its own tokens. Nothing here asks the device how
many rows are free, so nothing waits for it: where a list runs out, tokens are left to their codes, and counted.

Where slots are asked for, they are distinct, and either int64 ``[n]``, the same in all layers and heads, or
``[L, H, n]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeldRows(NamedTuple):
    """held : bool ``[L, H, n]``, where slots have a row; rows : ``[L, H, n, D]``, arbitrary where they have none."""

    held: torch.Tensor
    rows: torch.Tensor


class ProtectedRows:
    """All protected rows of one scheduler process.

    index : int32 ``[L, S, H]``, which row holds a slot's token; -1 if none does.
    rows : ``[L, P + 1, H, D]``, the last one spare (see :class:`PackedBuffer`).
    denied : int64 ``[]``, tokens, per layer and head, that got no row because none was free.
    """

    def __init__(
        self, layers: int, slots: int, heads: int, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.index = torch.empty(layers, slots, heads, dtype=torch.int32, device=device)
        self.rows = torch.zeros(layers, rows + 1, heads, head_dim, dtype=dtype, device=device)
        # The free rows are the first `_free` of each list; its last column takes what belongs nowhere.
        self._list = torch.zeros(layers, heads, rows + 1, dtype=torch.int32, device=device)
        self._free = torch.empty(layers, heads, dtype=torch.int64, device=device)
        self.denied = torch.zeros((), dtype=torch.int64, device=device)
        self._layer = torch.arange(layers, device=device).view(-1, 1, 1)
        self._head = torch.arange(heads, device=device).view(1, -1, 1)
        self.clear()

    @property
    def capacity(self) -> int:
        """Rows per layer and head."""
        return self._list.shape[-1] - 1

    @property
    def nbytes(self) -> int:
        helpers = (self._list, self._free, self._layer, self._head)
        return sum(tensor.nbytes for tensor in (self.index, self.rows, self.denied, *helpers))

    @property
    def taken(self) -> torch.Tensor:
        """int64 ``[L, H]``: rows that are not free."""
        return self.capacity - self._free

    def clear(self) -> None:
        """No slot has a row."""
        self.index.fill_(-1)
        self._list[..., :-1] = torch.arange(self.capacity, dtype=torch.int32, device=self._list.device)
        self._free.fill_(self.capacity)

    def take(self, slots: torch.Tensor, wanted: torch.Tensor | None = None, layers: slice = slice(None)) -> None:
        """Give slots a row in each layer and head where it is `wanted` (bool ``[L, H, n]`` of these `layers`; None:
        everywhere); a slot that has one keeps it."""
        where = self._where(slots, layers)
        index, free = self.index[where], self._free[layers]
        missing = index < 0
        if wanted is not None:
            missing &= wanted
        place = free.unsqueeze(-1) - missing.cumsum(dim=-1)
        given = missing & (place >= 0)
        found = self._list[layers].gather(-1, place.clamp(min=0))
        self.index[where] = torch.where(given, found, index)
        free -= given.sum(dim=-1)
        self.denied += (missing & ~given).sum()

    def give_back(self, slots: torch.Tensor, freed: torch.Tensor | None = None) -> None:
        """Free the rows that slots have, in all layers and heads, or in those of `freed` (bool ``[L, H, n]``)."""
        where = self._where(slots)
        index = self.index[where]
        held = index >= 0
        if freed is not None:
            held &= freed
        place = self._free.unsqueeze(-1) + held.cumsum(dim=-1) - 1
        self._list.scatter_(-1, torch.where(held, place, self.capacity), index)
        self.index[where] = torch.where(held, -1, index)
        self._free += held.sum(dim=-1)

    def holds(self, slots: torch.Tensor) -> torch.Tensor:
        """bool ``[L, H, n]``: where slots have a row."""
        return self.index[self._where(slots)] >= 0

    def read(self, slots: torch.Tensor) -> HeldRows:
        """The rows of slots."""
        index = self.index[self._where(slots)].long()
        return HeldRows(index >= 0, self.rows[self._layer, index.clamp(min=0), self._head])

    def put(self, slots: torch.Tensor, new: HeldRows) -> None:
        """Give slots rows where they are held, as far as there are any, and write them."""
        self.take(slots, new.held)
        index = self.index[self._where(slots)].long()
        place = torch.where(new.held & (index >= 0), index, self.capacity)
        self.rows[self._layer, place, self._head] = new.rows

    def _where(self, slots: torch.Tensor, layers: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        layer = self._layer[layers]
        return layer, slots.expand(len(layer), self._head.shape[1], slots.shape[-1]), self._head
