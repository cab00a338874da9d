"""Decode attention of a batch on a CPU against loops over requests, heads and tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from kvpolicy.kernels import batched_decode_attention as module
from kvpolicy.kernels.batched_decode_attention import (
    DecodePlan,
    batched_decode_attention,
    batched_decode_attention_reference,
    plan_decode,
)
from tests.kernels.cpu_attention_by_loops import assert_near, attention_by_loops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = (111, 1, 63, 64, 100, 5)
BEYOND = 2**30  # where no slot is


@dataclass
class Batch:
    """Requests whose slots are scattered over a pool that is NaN everywhere else, and rows with slots that are none."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    lengths: list[int]

    @classmethod
    def draw(
        cls,
        lengths: tuple[int, ...],
        heads: int = 2,
        group: int = 3,
        head_dim: int = 64,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        pool, requests = sum(lengths) + 7, len(lengths)
        slots = torch.randperm(pool, generator=generator)[: sum(lengths)]
        buffers = []
        for width in (head_dim, value_dim or head_dim):
            buffer = torch.full((pool, heads, width), torch.nan)
            buffer[slots] = torch.randn(len(slots), heads, width, generator=generator)
            buffers.append(buffer.to(dtype))
        table = torch.full((requests + 3, max(lengths, default=0) + 2), BEYOND, dtype=torch.int32)
        rows = torch.randperm(requests + 3, generator=generator)[:requests]
        for row, own in zip(rows.tolist(), slots.split(lengths), strict=True):
            table[row, : len(own)] = own.int()
        queries = torch.randn(requests, heads * group, head_dim, generator=generator).to(dtype)
        return cls(queries, *buffers, table, rows, list(lengths))

    @property
    def slots(self) -> list[torch.Tensor]:
        lengths = zip(self.rows.tolist(), self.lengths, strict=True)
        return [self.table[row, :length].long() for row, length in lengths]

    def plan(self) -> DecodePlan:
        row_bytes = (self.keys[0].numel() + self.values[0].numel()) * self.keys.element_size()
        return plan_decode(self.table, self.rows, self.lengths, row_bytes, self.queries.dtype)

    def attend(self, scaling: float = 0.125) -> torch.Tensor:
        return batched_decode_attention(self.queries, self.keys, self.values, self.plan(), scaling)

    def check(self, output: torch.Tensor, scaling: float = 0.125) -> None:
        for query, slots, own in zip(self.queries, self.slots, output, strict=True):
            assert_near(own, *attention_by_loops(query, self.keys[slots], self.values[slots], scaling))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("head_dim", [60, 64, 80, 96, 128])
def test_each_request_attends_to_its_own_tokens(dtype: torch.dtype, group: int, head_dim: int) -> None:
    batch = Batch.draw(MIXED, group=group, head_dim=head_dim, dtype=dtype, seed=group)
    output = batch.attend()
    assert output.dtype == dtype
    batch.check(output)


@pytest.mark.parametrize("length", [1, 63, 111])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_one_request_alone(dtype: torch.dtype, length: int) -> None:
    batch = Batch.draw((length,), heads=1, dtype=dtype)
    batch.check(batch.attend())


def test_values_may_be_of_another_width() -> None:
    batch = Batch.draw(MIXED, value_dim=40)
    output = batch.attend()
    assert output.shape == (len(MIXED), 6, 40)
    batch.check(output)


def test_scaling_is_that_of_the_caller() -> None:
    batch = Batch.draw(MIXED)
    batch.check(batch.attend(1.0), 1.0)


@pytest.mark.parametrize("limit", [1, 3 * 2**16, 2**40], ids=["each alone", "some together", "as many as are alike"])
def test_how_requests_are_grouped_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_PER_THREAD", limit)
    batch = Batch.draw((64, 63, 64, 1, 111, 109, 64, 2))
    groups = [group.requests for group in batch.plan().groups]
    assert groups == {1: [1] * 8, 2**40: [6, 2]}.get(limit, groups)
    batch.check(batch.attend())


@pytest.mark.parametrize("seed", range(50))
def test_a_plan_has_every_request_once_and_little_padding(seed: int) -> None:
    rng = random.Random(seed)
    lengths = tuple(rng.choice([1, 63, 111, 1000, rng.randint(1, 3000)]) for _ in range(rng.randint(1, 12)))
    batch = Batch.draw(lengths, heads=1, group=1, head_dim=1)
    plan, row_bytes = batch.plan(), 2**12
    plan = plan_decode(batch.table, batch.rows, batch.lengths, row_bytes, torch.float32)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    first = 0
    for group in plan.groups:
        members = plan.order[first : first + group.requests].tolist()
        slots, longest = group.slots.view(group.requests, -1), lengths[members[0]]
        assert group.requests == 1 or slots.numel() * row_bytes <= module.BYTES_PER_THREAD * torch.get_num_threads()
        for number, member in enumerate(members):
            length, own = lengths[member], batch.slots[member]
            assert longest - length <= max(64, longest / 8)
            assert torch.equal(slots[number, :length], own)
            assert set(slots[number, length:].tolist()) <= {int(own[0])}
            if group.mask is not None:
                seen = group.mask[number, 0, 0] == 0
                assert seen.tolist() == [True] * length + [False] * (longest - length)
                assert bool((group.mask[number, 0, 0, length:] == -torch.inf).all())
            else:
                assert length == longest
        first += group.requests
    assert first == len(lengths)


def test_a_request_without_tokens_gets_zero() -> None:
    batch = Batch.draw((5, 0, 63, 0))
    output = batch.attend()
    assert not output[[1, 3]].any()
    for number in (0, 2):
        own = batch.slots[number]
        assert_near(
            output[number], *attention_by_loops(batch.queries[number], batch.keys[own], batch.values[own], 0.125)
        )


def test_no_request_is_no_row() -> None:
    batch = Batch.draw((), value_dim=40)
    assert batch.attend().shape == (0, 6, 40)


def test_the_reference_is_the_formula() -> None:
    batch = Batch.draw(MIXED, value_dim=40, dtype=torch.bfloat16)
    batch.check(batched_decode_attention_reference(batch.queries, batch.keys, batch.values, batch.slots, 0.125))


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("queries", torch.zeros(6, 6, 80), "does not fit"),
        ("queries", torch.zeros(6, 5, 64), "must be a multiple"),
        ("queries", torch.zeros(5, 6, 64), "the plan is for 6 requests, not 5"),
        ("queries", torch.zeros(6, 6, 64).half(), "dtype"),
        ("values", torch.zeros(9, 2, 64), "does not fit"),
    ],
    ids=["head size", "group", "requests", "dtype", "slots"],
)
def test_what_does_not_fit_is_noticed(name: str, tensor: torch.Tensor, sentence: str) -> None:
    batch = Batch.draw(MIXED)
    plan = batch.plan()
    setattr(batch, name, tensor)
    with pytest.raises(AssertionError, match=sentence):
        batched_decode_attention(batch.queries, batch.keys, batch.values, plan, 0.125)
