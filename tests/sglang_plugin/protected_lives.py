"""Random lives of requests in a packed cache: who comes, shares a prefix, decodes, is cut, and goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sglang_plugin.protected_cache import Cache
from tests.sglang_plugin.protection_by_loops import HEADS, LAYERS, SINKS


@dataclass
class Request:
    length: int  # of its prompt
    recent: int
    row: list[int] = field(default_factory=list)
    of_tree: int = 0  # the first slots of its row that it does not own
    settled: int = 0
    evicted: bool = False

    @property
    def running(self) -> bool:
        return self.evicted or len(self.row) >= self.length


class Life:
    """Requests that come, share prefixes, decode, are cut, and go; the tree keeps prompts."""

    def __init__(self, share: float, seed: int, rows: int | None = None) -> None:
        self.random = random.Random(seed)
        self.enough_rows = rows is None
        self.cache = Cache(300, share, rows)
        self.free, self.requests, self.tree = list(range(1, 300)), list[Request](), list[list[int]]()

    def slots(self, count: int) -> list[int]:
        """The last ones that were given back come first."""
        while len(self.free) < count:
            self.forget_a_prompt()
        return [self.free.pop() for _ in range(count)]

    def forget(self, slots: list[int]) -> None:
        self.cache.release(slots)
        self.free += slots

    def forget_a_prompt(self) -> None:
        """The tree gives back the end of one of its texts, as far as no other text or request has it."""
        if not self.tree:
            return
        text = self.random.choice(self.tree)
        self.tree.remove(text)
        cut = self.random.randrange(len(text))
        used = {slot for other in self.tree for slot in other} | {s for r in self.requests for s in r.row[: r.of_tree]}
        self.forget([slot for slot in text[cut:] if slot not in used])
        if cut:
            self.tree.append(text[:cut])

    def admit(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            if len(self.requests) < 5:
                request = Request(self.random.randint(1, 30), self.random.randint(1, 6))
                if self.tree and self.random.random() < 0.6:
                    text = self.random.choice(self.tree)
                    request.row = text[: self.random.randint(0, min(len(text), request.length - 1))]
                    request.of_tree = len(request.row)
                self.requests.append(request)
        self.prefill()

    def prefill(self) -> None:
        """A chunk, or all that is left, of each prompt that is not complete."""
        chunks = []
        for request in [each for each in self.requests if not each.running]:
            start, left = len(request.row), request.length - len(request.row)
            count = self.random.choice([left, self.random.randint(1, left)])
            slots = self.slots(count)
            request.row += slots
            chunks.append((slots, start, request.length, request.recent))
            request.of_tree = len(request.row)
            request.settled = max(0, min(len(request.row), request.length - request.recent))
        if chunks:
            self.cache.prefill(chunks)

    def decode(self) -> None:
        running = [request for request in self.requests if request.running and len(request.row) < 50]
        if running:
            self.settle()
            slots = self.slots(len(running))
            self.cache.decode(slots)
            for request, slot in zip(running, slots, strict=True):
                request.row.append(slot)

    def settle(self) -> None:
        """At least as often as is needed for no more than twice the newest tokens to be undecided."""
        for request in self.requests:
            end = len(request.row) - request.recent
            first = max(SINKS, request.settled)
            if request.running and first < end:
                if end - first < request.recent:
                    end = self.random.randint(first, end)
                self.cache.settle(request.row[first:end], first)
                request.settled = end

    def evict(self) -> None:
        running = [request for request in self.requests if request.running and len(request.row) > 1]
        if not running:
            return
        request = self.random.choice(running)
        row, own = request.row, request.row[request.of_tree :]
        count = self.random.randint(1, len(row) - 1)
        keep = [[sorted(self.random.sample(range(len(row)), count)) for _ in range(HEADS)] for _ in range(LAYERS)]
        prefix, request.of_tree = row[: request.of_tree], 0  # from now on the tree may give it back
        if prefix:
            self.tree.append(prefix)
        if self.random.random() < 0.5:
            self.forget_a_prompt()
        destination = own[:count] + self.slots(max(0, count - len(own)))
        self.cache.evict(row, own, keep, destination, request.recent)
        request.row, request.evicted = destination, True
        request.settled = max(0, count - request.recent)
        if own[count:]:
            self.forget(own[count:])

    def finish(self) -> None:
        if not self.requests:
            return
        request = self.requests.pop(self.random.randrange(len(self.requests)))
        first = max(SINKS, request.settled)
        if not request.evicted and first < len(request.row):
            self.cache.settle(request.row[first:], first)
        if request.evicted:
            self.forget(request.row)
        elif request.row:
            self.tree.append(request.row)

    def clear(self) -> None:
        self.requests.clear()
        self.tree.clear()
        self.cache.clear()
        self.free = list(range(1, 300))

    def run(self, steps: int) -> None:
        often: list[Callable[[], None]] = [self.decode] * 8 + [self.settle] * 3 + [self.prefill] * 2
        operations = [*often, self.admit, self.admit, self.evict, self.evict, self.finish, self.forget_a_prompt]
        for step in range(steps):
            (self.clear if step % 150 == 149 else self.random.choice(operations))()
            if self.enough_rows:
                self.cache.check_held()
            if step % 2:
                self.cache.check_content()
