"""Protected rows against dictionaries, one per layer and head, over long random lives."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch

from kvpolicy.sglang_plugin.protected_rows import HeldRows, ProtectedRows

HEAD_DIM = 5
OPERATIONS = 700


class Life:
    """One `ProtectedRows` and what it must hold: per layer and head, for each slot with a row, its number and content.

    Which of several slots are left without a row where rows run out, and which row a slot gets, is read from the
    `ProtectedRows`: that is its own affair. How many are, and that no row is another slot's, is not.
    """

    def __init__(self, layers: int, slots: int, heads: int, capacity: int, seed: int) -> None:
        self.shape, self.capacity, self.random = (layers, slots, heads), capacity, random.Random(seed)
        self.rows = ProtectedRows(layers, slots, heads, capacity, HEAD_DIM, torch.bfloat16, torch.device("cpu"))
        self.content: dict[tuple[int, int], dict[int, list[float]]] = {p: {} for p in self.places()}
        self.number: dict[tuple[int, int], dict[int, int]] = {p: {} for p in self.places()}
        self.denied = 0

    def places(self) -> list[tuple[int, int]]:
        layers, _, heads = self.shape
        return [(layer, head) for layer in range(layers) for head in range(heads)]

    def some_slots(self, layers: int) -> torch.Tensor:
        """Distinct in each layer and head: the same ones everywhere, or others in each."""
        _, slots, heads = self.shape
        count = self.random.choice([0, 1, self.random.randint(0, slots), slots])
        if self.random.random() < 0.5:
            return torch.tensor(self.random.sample(range(slots), count), dtype=torch.int64)
        each = [[self.random.sample(range(slots), count) for _ in range(heads)] for _ in range(layers)]
        return torch.tensor(each, dtype=torch.int64).view(layers, heads, count)

    def mask(self, slots: torch.Tensor, layers: int) -> torch.Tensor:
        share, shape = self.random.choice([0.0, 0.3, 0.7, 1.0]), (layers, self.shape[2], slots.shape[-1])
        drawn = [self.random.random() < share for _ in range(shape[0] * shape[1] * shape[2])]
        return torch.tensor(drawn, dtype=torch.bool).view(shape)

    def content_of(self, slots: torch.Tensor, layers: int) -> torch.Tensor:
        drawn = [self.random.gauss(0, 1) for _ in range(layers * self.shape[2] * slots.shape[-1] * HEAD_DIM)]
        return torch.tensor(drawn).view(layers, self.shape[2], -1, HEAD_DIM).bfloat16()

    def slots_at(self, slots: torch.Tensor, layer: int, head: int) -> list[int]:
        found: list[int] = (slots if slots.dim() == 1 else slots[layer, head]).tolist()
        return found

    def take(self) -> None:
        first = self.random.randrange(self.shape[0]) if self.random.random() < 0.3 else 0
        last = self.random.randint(first + 1, self.shape[0]) if first else self.shape[0]
        slots = self.some_slots(last - first)
        wanted = None if self.random.random() < 0.3 else self.mask(slots, last - first)
        if (first, last) == (0, self.shape[0]) and self.random.random() < 0.5:
            self.rows.take(slots, wanted)
        else:
            self.rows.take(slots, wanted, slice(first, last))
        self.given(slots, wanted, range(first, last))

    def given(self, slots: torch.Tensor, wanted: torch.Tensor | None, layers: range) -> None:
        """Follow a `take`; what is written to a slot next is its content."""
        for i, layer in enumerate(layers):
            for head in range(self.shape[2]):
                here = self.slots_at(slots, i, head)
                asked = [s for j, s in enumerate(here) if wanted is None or bool(wanted[i, head, j])]
                missing = [s for s in asked if s not in self.content[layer, head]]
                numbers = {s: int(self.rows.index[layer, s, head]) for s in missing}
                got = [s for s in missing if numbers[s] >= 0]
                assert len(got) == min(len(missing), self.capacity - len(self.content[layer, head]))
                self.denied += len(missing) - len(got)
                for s in got:
                    content = [float(self.random.randint(-99, 99)) for _ in range(HEAD_DIM)]
                    self.rows.rows[layer, numbers[s], head] = torch.tensor(content)
                    self.content[layer, head][s], self.number[layer, head][s] = content, numbers[s]

    def give_back(self) -> None:
        slots = self.some_slots(self.shape[0])
        freed = None if self.random.random() < 0.4 else self.mask(slots, self.shape[0])
        self.rows.give_back(slots, freed)
        for layer, head in self.places():
            for j, s in enumerate(self.slots_at(slots, layer, head)):
                if freed is None or freed[layer, head, j]:
                    self.content[layer, head].pop(s, None)
                    self.number[layer, head].pop(s, None)

    def read(self) -> None:
        slots = self.some_slots(self.shape[0])
        held, rows = self.rows.read(slots)
        assert torch.equal(held, self.rows.holds(slots))
        assert rows.shape == (*held.shape, HEAD_DIM)
        for layer, head in self.places():
            for j, s in enumerate(self.slots_at(slots, layer, head)):
                expected = self.content[layer, head].get(s)
                assert bool(held[layer, head, j]) == (expected is not None)
                if expected is not None:
                    assert rows[layer, head, j].tolist() == expected

    def put(self) -> None:
        slots = self.some_slots(self.shape[0])
        new = HeldRows(self.mask(slots, self.shape[0]), self.content_of(slots, self.shape[0]))
        self.rows.put(slots, new)
        for layer, head in self.places():
            here = self.slots_at(slots, layer, head)
            held = [j for j in range(len(here)) if new.held[layer, head, j]]
            free = self.capacity - len(self.content[layer, head])
            missing = [here[j] for j in held if here[j] not in self.content[layer, head]]
            self.denied += max(0, len(missing) - free)
            got = 0
            for j in held:
                number = int(self.rows.index[layer, here[j], head])
                if number >= 0:
                    got += here[j] in missing
                    self.content[layer, head][here[j]] = new.rows[layer, head, j].tolist()
                    self.number[layer, head].setdefault(here[j], number)
            assert got == min(len(missing), free)

    def clear(self) -> None:
        self.rows.clear()
        for layer, head in self.places():
            self.content[layer, head].clear()
            self.number[layer, head].clear()

    def check(self) -> None:
        """Every slot, held or not, after each operation."""
        slots = self.shape[1]
        index, taken = self.rows.index.tolist(), self.rows.taken.tolist()
        assert int(self.rows.denied) == self.denied
        for layer, head in self.places():
            numbers = {s: index[layer][s][head] for s in range(slots) if index[layer][s][head] != -1}
            assert numbers == self.number[layer, head]  # who had a row keeps that one
            assert len(set(numbers.values())) == len(numbers)
            assert all(0 <= number < self.capacity for number in numbers.values())
            assert taken[layer][head] == len(numbers)
            for s, number in numbers.items():
                assert self.rows.rows[layer, number, head].tolist() == self.content[layer, head][s]

    def check_free(self) -> None:
        """Whatever is not taken can be had, and no more: asked of a copy."""
        rows = copy.deepcopy(self.rows)
        rows.take(torch.arange(self.shape[1]))
        for layer, head in self.places():
            numbers = [number for number in rows.index[layer, :, head].tolist() if number >= 0]
            assert len(numbers) == min(self.capacity, self.shape[1])
            assert sorted(set(numbers)) == sorted(numbers)
            assert all(number < self.capacity for number in numbers)


@pytest.mark.parametrize(
    ("layers", "slots", "heads", "capacity"),
    [
        pytest.param(1, 7, 1, 3, id="one layer and head"),
        pytest.param(3, 12, 2, 5, id="fewer rows than slots"),
        pytest.param(2, 9, 3, 9, id="as many rows as slots"),
        pytest.param(2, 8, 2, 20, id="more rows than slots"),
        pytest.param(2, 16, 2, 1, id="one row"),
        pytest.param(2, 3, 2, 0, id="no row"),
    ],
)
def test_a_long_life(layers: int, slots: int, heads: int, capacity: int) -> None:
    life = Life(layers, slots, heads, capacity, seed=slots)
    operations: list[Callable[[], None]] = [life.take] * 4 + [life.give_back] * 4 + [life.put] * 3 + [life.read] * 2
    for step in range(OPERATIONS):
        (life.clear if step % 100 == 99 else life.random.choice(operations))()
        life.check()
        if step % 10 == 0:
            life.check_free()
    assert life.denied > 0 or capacity >= slots


def made(capacity: int = 4) -> ProtectedRows:
    return ProtectedRows(2, 10, 3, capacity, HEAD_DIM, torch.float16, torch.device("cpu"))


def test_at_first_no_slot_has_a_row() -> None:
    rows = made()
    assert rows.capacity == 4
    assert rows.rows.shape == (2, 5, 3, HEAD_DIM)
    assert rows.rows.dtype == torch.float16
    assert rows.index.dtype == torch.int32
    assert rows.index.eq(-1).all()
    assert rows.taken.tolist() == [[0] * 3] * 2
    assert int(rows.denied) == 0
    assert not rows.holds(torch.arange(10)).any()


def test_layers_and_heads_run_out_apart() -> None:
    rows, wanted = made(2), torch.zeros(2, 3, 4, dtype=torch.bool)
    wanted[0, 1], wanted[1, 2, :2] = True, True
    rows.take(torch.tensor([8, 1, 5, 3]), wanted)
    assert rows.taken.tolist() == [[0, 2, 0], [0, 0, 2]]
    assert int(rows.denied) == 2
    rows.take(torch.tensor([8, 1, 5, 3]))
    assert rows.taken.tolist() == [[2] * 3] * 2
    assert int(rows.denied) == 2 + 4 * 2 + 2 + 2


def test_a_row_given_back_is_anothers_and_denial_is_still_counted_after_a_clear() -> None:
    rows = made(1)
    rows.take(torch.tensor([2, 3]))
    assert int(rows.denied) == 6
    rows.give_back(torch.tensor([9, 3, 2]))
    rows.take(torch.tensor([3]))
    assert rows.holds(torch.tensor([2, 3]))[0, 0].tolist() == [False, True]
    rows.clear()
    assert rows.taken.sum() == 0
    assert int(rows.denied) == 6


def test_what_gets_no_row_is_written_nowhere_but_to_the_spare_one() -> None:
    rows = made(2)
    rows.put(
        torch.tensor([4, 6]), HeldRows(torch.ones(2, 3, 2, dtype=torch.bool), torch.ones(2, 3, 2, HEAD_DIM).half())
    )
    held = torch.ones(2, 3, 3, dtype=torch.bool)
    held[:, :, 0] = False  # has one, but nothing is put there
    rows.put(torch.tensor([4, 7, 8]), HeldRows(held, torch.full((2, 3, 3, HEAD_DIM), 2.0).half()))
    assert rows.read(torch.tensor([4, 6])).rows.eq(1).all()
    assert rows.holds(torch.tensor([7, 8])).sum() == 0
    assert rows.rows[:, :2].eq(1).all()


@pytest.mark.parametrize("capacity", [1, 7])
def test_bytes_are_those_of_its_tensors(capacity: int) -> None:
    rows = made(capacity)
    tensors = [value for value in vars(rows).values() if isinstance(value, torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert rows.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
