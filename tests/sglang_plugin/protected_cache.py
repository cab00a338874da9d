"""Packed values with protected rows, and beside them what loops over single tokens make of the same operations."""

from __future__ import annotations

import random
from fractions import Fraction

import torch

from kvpolicy.kernels.pack_rows import pack_rows, unpack_rows
from kvpolicy.kernels.packed_buffer import PackedBuffer
from kvpolicy.quant.cache_format import CacheFormat
from kvpolicy.sglang_plugin.protected_rows import ProtectedRows
from kvpolicy.sglang_plugin.protection import Protection
from tests.sglang_plugin.protection_by_loops import HEADS, HEADS_OF_ALL, LAYERS, ByLoops

HEAD_DIM, BITS = 16, 2
CPU = torch.device("cpu")


class Cache:
    """Packed values of `slots`, with a row for each unless `rows` says otherwise, and what loops make of it."""

    def __init__(self, slots: int, share: float, rows: int | None = None) -> None:
        self.rows = ProtectedRows(LAYERS, slots, HEADS, slots if rows is None else rows, HEAD_DIM, torch.bfloat16, CPU)
        self.protection = Protection(self.rows, CacheFormat("range-int2", protect=share))
        self.buffers = [
            PackedBuffer(
                torch.zeros(slots, HEADS, HEAD_DIM * BITS // 8, dtype=torch.uint8),
                torch.zeros(slots, HEADS, 1, dtype=torch.bfloat16),
                torch.zeros(slots, HEADS, 1, dtype=torch.bfloat16),
                BITS,
                HEAD_DIM,
                self.rows.index[layer],
                self.rows.rows[layer],
            )
            for layer in range(LAYERS)
        ]
        self.loops = ByLoops(Fraction(str(share)))
        self.random = random.Random(slots)
        self.vectors, self.codes = torch.empty(2, 0, HEAD_DIM, dtype=torch.bfloat16)  # exact, and what codes make of it
        self.pending: list[int] = []  # given back; nothing has been asked for since

    def values(self, tokens: int) -> torch.Tensor:
        """bf16 ``[L, n, H, D]`` with ranges of 1, 2 or 3, so that many are equal, and which no code holds exactly."""
        shape = (LAYERS, tokens, HEADS)
        spread = torch.tensor([self.random.choice([1.0, 2.0, 3.0]) for _ in range(LAYERS * tokens * HEADS)]).view(shape)
        shift = torch.tensor([self.random.choice([-2.0, 0.0, 1.0]) for _ in range(LAYERS * tokens * HEADS)]).view(shape)
        generator = torch.Generator().manual_seed(self.random.randrange(2**40))
        unit = torch.rand(*shape, HEAD_DIM, generator=generator)
        unit[..., 0], unit[..., 1] = 0, 1
        return (shift.unsqueeze(-1) + unit * spread.unsqueeze(-1)).bfloat16()

    def write(self, slots: list[int], values: torch.Tensor) -> None:
        """As a forward pass does, layer by layer."""
        for buffer, rows in zip(self.buffers, values, strict=True):
            buffer.write(torch.tensor(slots, dtype=torch.int64), rows)
        self.remember(slots, values)

    def remember(self, slots: list[int], values: torch.Tensor) -> None:
        rows = [(layer, head, i) for layer, head in HEADS_OF_ALL for i in range(len(slots))]
        for number, (layer, head, i) in enumerate(rows, start=len(self.vectors)):
            self.loops.content[layer, head, slots[i]] = number
        new = values.transpose(1, 2).reshape(-1, HEAD_DIM)
        self.loops.spread += [max(vector) - min(vector) for vector in new.tolist()]
        codes = unpack_rows(pack_rows(new, BITS, HEAD_DIM), BITS, torch.bfloat16)
        assert (codes != new).any(dim=-1).all(), "exact and packed could not be told apart"
        self.vectors, self.codes = torch.cat([self.vectors, new]), torch.cat([self.codes, codes])

    def settle_pending(self) -> None:
        self.loops.release(self.pending)
        self.pending.clear()

    def decode(self, slots: list[int]) -> None:
        self.settle_pending()
        self.protection.before_decode(torch.tensor(slots, dtype=torch.int32))
        self.write(slots, self.values(len(slots)))
        self.loops.decode(slots)

    def prefill(self, chunks: list[tuple[list[int], int, int, int]], values: torch.Tensor | None = None) -> None:
        """chunks : of each request its new slots, where they start, length of the prompt, newest tokens"""
        self.settle_pending()
        asked = [(start, start + len(slots), length, recent) for slots, start, length, recent in chunks]
        self.protection.before_prefill(asked, CPU)
        slots = [slot for chunk, *_ in chunks for slot in chunk]
        values = self.values(len(slots)) if values is None else values
        for layer in range(LAYERS):
            self.protection.choose(layer, torch.tensor(slots), values[layer])
            self.buffers[layer].write(torch.tensor(slots), values[layer])
        self.remember(slots, values)
        for chunk, start, length, recent in chunks:
            self.loops.prefill(chunk, start, length, recent)

    def settle(self, slots: list[int], first: int) -> None:
        self.settle_pending()
        self.protection.settle(torch.tensor(slots, dtype=torch.int64), first)
        self.loops.settle(slots, first)

    def evict(
        self, row: list[int], own: list[int], keep: list[list[list[int]]], destination: list[int], recent: int
    ) -> None:
        kept = self.protection.carry(torch.tensor(row), torch.tensor(keep), recent)
        source, target = torch.tensor(row), torch.tensor(destination)
        for layer, head in HEADS_OF_ALL:
            for tensor in self.buffers[layer].tensors[:3]:
                tensor[target, head] = tensor[source[keep[layer][head]], head]
        self.protection.place(torch.tensor(own, dtype=torch.int64), kept, target)
        self.loops.evict(row, own, keep, destination, recent, self.pending)
        self.pending.clear()

    def release(self, slots: list[int]) -> None:
        given_back = torch.tensor(slots, dtype=torch.int64)
        self.protection.released(given_back)
        given_back.fill_(0)  # SGLang may use its tensor for something else
        self.pending += slots

    def clear(self) -> None:
        self.protection.cleared()
        self.loops.protected.clear()
        self.pending.clear()

    def held(self) -> set[tuple[int, int, int]]:
        """All that has a row, slots that nothing was asked for since they were given back aside."""
        layers, slots, heads = (self.rows.index >= 0).nonzero(as_tuple=True)
        found = zip(layers.tolist(), heads.tolist(), slots.tolist(), strict=True)
        return {place for place in found if place[2] not in self.pending}

    def check_held(self) -> None:
        assert self.held() == {place for place in self.loops.protected if place[2] not in self.pending}

    def check_content(self) -> None:
        """What is read of every slot that was ever written: exact where it has a row, else what codes make of it."""
        held = self.held()
        places = [place for place in self.loops.content if place[2] not in self.pending]
        if places:
            layers, heads, slots = torch.tensor(places).T
            every = torch.arange(len(self.rows.index[0]))
            found = torch.stack([buffer.read(every) for buffer in self.buffers])[layers, slots, heads]
            vectors = torch.tensor([self.loops.content[place] for place in places])
            exact = torch.tensor([place in held for place in places]).unsqueeze(-1)
            assert torch.equal(found, torch.where(exact, self.vectors[vectors], self.codes[vectors]))
