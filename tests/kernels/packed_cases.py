"""Packed buffers for tests, in which whatever must not be read holds NaN or nonsense."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvpolicy.kernels.pack_rows import pack_rows
from kvpolicy.kernels.packed_buffer import Buffer, PackedBuffer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Head size, bits, channels of a group.
LAYOUTS = [(64, 4, 32), (64, 2, 16), (80, 4, 16), (80, 2, 80), (96, 8, 32), (96, 4, 96), (128, 4, 64), (128, 8, 128)]


def empty_buffer(
    slots: int, heads: int, layout: tuple[int, int, int], dtype: torch.dtype, rows: int | None = None
) -> PackedBuffer:
    """Nonsense for codes, NaN for numbers. `rows` : usable protected rows, none of them named yet."""
    head_dim, bits, group = layout
    scale, minimum = torch.full((2, slots, heads, head_dim // group), torch.nan, dtype=dtype)
    codes = torch.full((slots, heads, head_dim * bits // 8), 0b10110100, dtype=torch.uint8)
    if rows is None:
        return PackedBuffer(codes, scale, minimum, bits, group)
    index = torch.full((slots, heads), -1, dtype=torch.int32)
    return PackedBuffer(
        codes, scale, minimum, bits, group, index, torch.full((rows + 1, heads, head_dim), torch.nan, dtype=dtype)
    )


def random_buffer(
    used: torch.Tensor,
    slots: int,
    heads: int,
    layout: tuple[int, int, int],
    dtype: torch.dtype,
    protected: float = 0.0,
    seed: int = 0,
) -> PackedBuffer:
    """Random rows in the slots `used`, packed; of each head a share is protected, with rows that are in no code."""
    generator = torch.Generator().manual_seed(seed)
    share = round(len(used) * protected)
    buffer = empty_buffer(slots, heads, layout, dtype, share + 2 if protected else None)
    new = torch.randn(len(used), heads, layout[0], generator=generator).to(dtype)
    for stored, packed in zip((buffer.codes, buffer.scale, buffer.minimum), pack_rows(new, *layout[1:]), strict=True):
        stored[used] = packed
    if buffer.index is not None and buffer.rows is not None:
        for head in range(heads):
            those = used[torch.randperm(len(used), generator=generator)[:share]]
            numbers = torch.randperm(share + 2, generator=generator)[:share]
            buffer.index[those, head] = numbers.int()
            buffer.rows[numbers, head] = torch.randn(share, layout[0], generator=generator).to(dtype)
            buffer.scale[those, head] = buffer.minimum[those, head] = torch.nan
    return buffer


def on(buffer: PackedBuffer, device: torch.device) -> PackedBuffer:
    """A copy on `device`."""
    names = ("codes", "scale", "minimum", "index", "rows")
    moved = {name: tensor.clone().to(device) for name, tensor in zip(names, buffer.tensors, strict=False)}
    return replace(buffer, **moved)


@dataclass(frozen=True)
class Batch:
    """Requests of a decode step: what :func:`packed_attention` takes, but for keys, values and the factor."""

    queries: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.req_to_token, self.req_pool_indices, self.seq_lens


@dataclass(frozen=True)
class Case:
    """A batch and its cache: keys and values are packed as laid out, or not at all.

    lengths : of the requests; heads : KV heads; group : query heads of each
    """

    label: str
    lengths: tuple[int, ...]
    heads: int
    group: int
    head_dim: int
    keys: tuple[int, int] | None  # bits, channels of a group
    values: tuple[int, int] | None
    dtype: torch.dtype = torch.float32
    protected_keys: float = 0.0
    protected_values: float = 0.0

    def __str__(self) -> str:
        return self.label

    @property
    def slots(self) -> int:
        return sum(self.lengths) + 9

    def draw(self, device: torch.device) -> tuple[Batch, Buffer, Buffer]:
        """Logits have a standard deviation of 2. Where no token is, the table of slots names one that holds NaN."""
        generator = torch.Generator().manual_seed(self.head_dim)
        order = torch.randperm(self.slots, generator=generator)
        nobody, used = order[0], order[1 : 1 + sum(self.lengths)]
        queries = 2 * torch.randn(len(self.lengths), self.heads * self.group, self.head_dim, generator=generator)
        table = torch.full((len(self.lengths) + 2, max(self.lengths, default=0) + 3), int(nobody), dtype=torch.int32)
        rows = torch.randperm(len(table), generator=generator)[: len(self.lengths)]
        for row, slots in zip(rows.tolist(), used.split(list(self.lengths)), strict=True):
            table[row, : len(slots)] = slots.int()
        batch = Batch(
            queries.to(device, self.dtype),
            table.to(device),
            rows.to(device),
            torch.tensor(self.lengths, dtype=torch.int64, device=device),
        )
        keys = self._buffer(used, self.keys, self.protected_keys, 1, device)
        return batch, keys, self._buffer(used, self.values, self.protected_values, 2, device)

    def _buffer(
        self, used: torch.Tensor, packing: tuple[int, int] | None, protected: float, seed: int, device: torch.device
    ) -> Buffer:
        if packing is not None:
            layout = (self.head_dim, *packing)
            return on(random_buffer(used, self.slots, self.heads, layout, self.dtype, protected, seed), device)
        plain = torch.full((self.slots, self.heads, self.head_dim), torch.nan)
        generator = torch.Generator().manual_seed(seed)
        plain[used] = torch.randn(len(used), self.heads, self.head_dim, generator=generator)
        return plain.to(device, self.dtype)
