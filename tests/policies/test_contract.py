"""What every policy owes: the promises of `policies/base.py`, over the whole matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kvpolicy.policies.base import Candidates, Granularity
from kvpolicy.policies.registry import POLICIES
from kvpolicy.policies.selecting import ScoredPolicy
from tests.policies.candidates import random_candidates
from tests.policies.matrix import ROWS, SELECTING, Row, noise_of

PERIOD = 16


@dataclass(frozen=True)
class Size:
    label: str
    layers: int
    heads: int
    tokens: int
    head_dim: int
    n_keep: int
    sinks: int
    recent: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.label

    def candidates(self, seed: int = 0) -> Candidates:
        return random_candidates(self.layers, self.heads, self.tokens, self.head_dim, dtype=self.dtype, seed=seed)


SIZES = (
    Size("one token", 1, 1, 1, 60, n_keep=1, sinks=1, recent=0),
    Size("63 tokens of one head", 2, 1, 63, 64, n_keep=40, sinks=4, recent=16),
    Size("111 tokens in bf16", 3, 2, 111, 80, n_keep=100, sinks=4, recent=8, dtype=torch.bfloat16),
    Size("budget + 1", 2, 2, 33, 96, n_keep=32, sinks=4, recent=16),
    Size("nothing but the forced", 1, 3, 50, 128, n_keep=20, sinks=4, recent=16),
    Size("nothing forced", 2, 2, 63, 64, n_keep=31, sinks=0, recent=0, dtype=torch.float16),
)
rows = pytest.mark.parametrize("row", SELECTING, ids=str)
sizes = pytest.mark.parametrize("size", SIZES, ids=str)
MIDDLE = SIZES[1]


def select(row: Row, size: Size, candidates: Candidates | None = None, **noise: int) -> torch.Tensor:
    policy = row.build(sinks=str(size.sinks), recent=str(size.recent))
    return policy.select(candidates or size.candidates(), size.n_keep, PERIOD, noise_of(size.layers, **noise))


def test_every_registered_policy_has_a_row() -> None:
    assert {row.name for row in ROWS} == set(POLICIES)


@rows
@sizes
def test_kept_tokens_are_distinct_ascending_indices_of_the_promised_number(row: Row, size: Size) -> None:
    kept = select(row, size)
    assert kept.shape == (size.layers, size.heads, size.n_keep)
    assert kept.dtype == torch.int64
    assert kept.min() >= 0
    assert kept.max() < size.tokens
    assert (kept.diff(dim=-1) > 0).all()


@rows
@sizes
def test_sinks_and_recent_tokens_are_kept(row: Row, size: Size) -> None:
    forced = {*range(size.sinks), *range(size.tokens - size.recent, size.tokens)}
    for kept in select(row, size).flatten(0, 1).tolist():
        assert forced <= set(kept)


@pytest.mark.parametrize("row", [row for row in SELECTING if isinstance(row.build(), ScoredPolicy)], ids=str)
def test_recent_tokens_are_one_period_by_default(row: Row) -> None:
    policy = row.build()
    assert policy.forced(PERIOD) == 4 + PERIOD
    kept = policy.select(random_candidates(1, 2, 111, 64), 4 + PERIOD, PERIOD, noise_of(1))
    assert kept.tolist() == [[[0, 1, 2, 3, *range(111 - PERIOD, 111)]] * 2]


@rows
@sizes
def test_keeping_as_many_as_there_are_keeps_all(row: Row, size: Size) -> None:
    kept = select(row, replace(size, n_keep=size.tokens))
    assert torch.equal(kept, torch.arange(size.tokens).expand_as(kept))


@rows
def test_inputs_are_not_modified(row: Row) -> None:
    candidates, untouched = MIDDLE.candidates(), MIDDLE.candidates()
    select(row, MIDDLE, candidates)
    assert torch.equal(candidates.require("keys"), untouched.require("keys"))
    assert torch.equal(candidates.require("values"), untouched.require("values"))


@rows
def test_a_choice_is_repeatable_whatever_was_chosen_in_between(row: Row) -> None:
    policy = row.build(recent="8")
    noise = noise_of(MIDDLE.layers)
    first = policy.select(MIDDLE.candidates(seed=0), 40, PERIOD, noise)
    policy.select(MIDDLE.candidates(seed=1), 40, PERIOD, noise_of(MIDDLE.layers, seed=5))
    assert torch.equal(first, policy.select(MIDDLE.candidates(seed=0), 40, PERIOD, noise_of(MIDDLE.layers)))
    assert torch.equal(first, row.build(recent="8").select(MIDDLE.candidates(seed=0), 40, PERIOD, noise))


@rows
@pytest.mark.parametrize("key", ["seed", "eviction", "layer"])
def test_only_the_declared_noise_keys_change_the_choice(row: Row, key: str) -> None:
    one_layer = replace(MIDDLE, layers=1)
    choices = [select(row, one_layer, **{key: value}) for value in (3, 4)]
    assert torch.equal(*choices) == (key not in row.noise)


@rows
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_choosing_layer_by_layer_gives_the_same_as_all_layers_at_once(row: Row, chunk: int) -> None:
    candidates = random_candidates(5, 2, 63, 80, dtype=torch.bfloat16)
    keys, values = candidates.require("keys"), candidates.require("values")
    policy, parts = row.build(recent="8"), []
    for first in range(0, 5, chunk):
        part = slice(first, min(first + chunk, 5))
        piece = Candidates((part.stop - part.start, 2, 63), keys[part], values[part])
        parts.append(policy.select(piece, 40, PERIOD, noise_of(part.stop - part.start, layer=first)))
    assert torch.equal(torch.cat(parts), policy.select(candidates, 40, PERIOD, noise_of(5)))


@pytest.mark.parametrize("row", [r for r in SELECTING if r.build().granularity == Granularity.PER_HEAD], ids=str)
def test_a_head_does_not_see_the_other_heads(row: Row) -> None:
    size = replace(MIDDLE, layers=2, heads=3)
    before, after = size.candidates(seed=0), size.candidates(seed=1)
    after.require("keys")[1, 2] = before.require("keys")[1, 2]
    after.require("values")[1, 2] = before.require("values")[1, 2]
    assert torch.equal(select(row, size, before)[1, 2], select(row, size, after)[1, 2])


@rows
def test_a_policy_reads_nothing_that_it_did_not_declare(row: Row) -> None:
    whole = MIDDLE.candidates()
    needs = row.build().needs
    bare = Candidates(whole.shape, whole.keys if needs.keys else None, whole.values if needs.values else None)
    assert torch.equal(select(row, MIDDLE, bare), select(row, MIDDLE, whole))


@pytest.mark.parametrize("row", [row for row in SELECTING if row.permutable], ids=str)
def test_permuting_the_tokens_permutes_the_scores(row: Row) -> None:
    policy = row.build()
    assert isinstance(policy, ScoredPolicy)
    candidates = random_candidates(2, 3, 111, 60)
    order = torch.randperm(111, generator=torch.Generator().manual_seed(0))
    moved = Candidates(
        candidates.shape, candidates.require("keys")[:, :, order], candidates.require("values")[:, :, order]
    )
    scores = policy.scores(candidates, noise_of(2))
    torch.testing.assert_close(policy.scores(moved, noise_of(2)), scores[..., order], rtol=1e-5, atol=0)


@rows
def test_an_eviction_is_due_one_period_above_the_budget_and_cuts_to_it(row: Row) -> None:
    policy = row.build()
    assert [policy.due(resident, 100, 64) for resident in (99, 163, 164, 1000)] == [False, False, True, True]
    assert [policy.n_keep(resident, 100) for resident in (63, 100, 164, 1000)] == [63, 100, 100, 100]
