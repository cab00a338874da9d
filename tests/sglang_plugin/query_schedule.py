"""A random schedule of prefills and decode steps, and what is read of SGLang's `ForwardBatch` in each."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import torch

from kvpolicy.sglang_plugin.query_taps import QueryTaps

LAYERS, ROWS, HEADS, HEAD_DIM = (2, 3, 4), 6, 3, 4
CPU = torch.device("cpu")
DECODE = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False)
EXTEND = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)


def taps_of(window: int, dtype: torch.dtype = torch.float32, layers: tuple[int, ...] = LAYERS) -> QueryTaps:
    return QueryTaps(window, layers, ROWS, HEADS, HEAD_DIM, dtype, CPU)


def prefill_batch(*chunks: tuple[int, int, int]) -> SimpleNamespace:
    """What is read of SGLang's `ForwardBatch` for a prefill of (row, tokens before, tokens)."""
    rows, before, lengths = (list(column) for column in zip(*chunks, strict=True))
    return SimpleNamespace(
        forward_mode=EXTEND,
        req_pool_indices=torch.tensor(rows),
        extend_prefix_lens_cpu=before,
        extend_seq_lens_cpu=lengths,
    )


def prefill(taps: QueryTaps, queries: torch.Tensor, *chunks: tuple[int, int, int]) -> None:
    """All layers of a prefill as SGLang runs it; `queries` ``[L, tokens, H, D]``, maybe padded."""
    batch = prefill_batch(*chunks)
    taps.plan_prefill(batch)
    for layer, of_layer in zip(taps._layers, queries, strict=True):
        taps.record(of_layer.flatten(1), layer, batch)


def decode(taps: QueryTaps, queries: torch.Tensor, rows: list[int], positions: list[int]) -> None:
    batch = SimpleNamespace(forward_mode=DECODE, req_pool_indices=torch.tensor(rows), positions=torch.tensor(positions))
    for layer, of_layer in zip(taps._layers, queries, strict=True):
        taps.record(of_layer.flatten(1), layer, batch)


def draw(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (len(LAYERS), tokens, HEADS, HEAD_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Simulation:
    """A random schedule of requests; `texts` has each row's query per token, None where a cached prefix has none."""

    def __init__(self, window: int, seed: int, dtype: torch.dtype) -> None:
        self.taps, self.window, self.dtype = taps_of(window, dtype), window, dtype
        self.random, self.steps, self.seen = random.Random(seed), 0, Counter[str]()
        self.texts: dict[int, list[torch.Tensor | None]] = {}
        self.waiting: dict[int, int] = {}  # tokens of a row's prompt that are not computed yet
        self.reads: dict[int, int] = {}  # queries that the policy of a row's request reads
        self.used: set[int] = set()

    def draw(self, tokens: int) -> torch.Tensor:
        self.steps += 1
        return draw(tokens, self.steps, self.dtype)

    def prefill(self) -> None:
        """New requests in free rows, and the next chunk of every prompt that is not whole yet."""
        rows = [row for row in self.waiting if self.random.random() < 0.8]
        free = [row for row in range(1, ROWS) if row not in self.texts]
        for row in self.random.sample(free, min(len(free), self.random.randint(0, 2))):
            tokens = self.random.choice([1, self.window - 1, self.window, self.window + 1, 3 * self.window + 2]) or 1
            self.reads[row] = self.random.choice([1, (self.window + 1) // 2, self.window])
            cached = self.random.choice([0, 1]) * self.random.randint(0, max(0, tokens - self.reads[row]))
            self.texts[row], self.waiting[row] = [None] * cached, tokens - cached
            self.seen.update({"reused": row in self.used, "cached": cached > 0, "shorter": tokens < self.window})
            self.seen.update({"equal": tokens == self.window, "longer": tokens > self.window})
            self.used.add(row)
            rows.append(row)
        if not rows:
            return
        self.random.shuffle(rows)
        chunks = []
        for row in rows:
            tokens = self.random.choice([self.waiting[row], self.random.randint(1, self.waiting[row])])
            chunks.append((row, len(self.texts[row]), tokens))
            self.seen["chunked"] += tokens < self.waiting[row]
        total = sum(tokens for _, _, tokens in chunks)
        queries = self.draw(total + self.random.choice([0, 0, 5]))  # a captured prefill is padded
        prefill(self.taps, queries, *chunks)
        self.seen["several"] += len(chunks) > 1
        computed = iter(queries.unbind(1))
        for row, _, tokens in chunks:
            self.texts[row].extend(next(computed) for _ in range(tokens))
            self.waiting[row] -= tokens
            if not self.waiting[row]:
                del self.waiting[row]

    def decode(self) -> None:
        ready = [row for row in self.texts if row not in self.waiting]
        if not ready:
            return
        rows = self.random.sample(ready, self.random.randint(1, len(ready)))
        padding = self.random.choice([0, 0, 3])
        queries = self.draw(len(rows) + padding)
        positions = [len(self.texts[row]) for row in rows]
        decode(self.taps, queries, rows + [0] * padding, positions + [0] * padding)
        self.seen.update({"decode": 1, "mixed rows": len(rows) > 1, "padding": padding > 0})
        for row, query in zip(rows, queries.unbind(1), strict=False):
            self.texts[row].append(query)

    def finish(self) -> None:
        ready = [row for row in self.texts if row not in self.waiting]
        if ready:
            del self.texts[self.random.choice(ready)]

    def check(self) -> None:
        """Every row whose prompt is whole gives its newest queries, for all layers and for some of them."""
        for row in self.texts.keys() - self.waiting.keys():
            for count in {1, self.reads[row]}:
                text = [query for query in self.texts[row][-count:] if query is not None]
                assert len(text) == min(count, len(self.texts[row])), "the schedule computed too little"
                expected = torch.stack(text, dim=2)
                for layers in (slice(0, 3), slice(1, 3), slice(2, 3)):
                    newest = self.taps.newest(row, len(self.texts[row]), count, layers)
                    assert newest.dtype == self.dtype
                    assert torch.equal(newest, expected[layers])
                    self.seen["checked"] += 1
