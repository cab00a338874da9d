"""What every policy owes: the promises of `policies/base.py`, over the whole matrix."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from kvpolicy.policies.base import Candidates, Granularity
from kvpolicy.policies.registry import POLICIES
from kvpolicy.policies.selecting import ScoredPolicy
from tests.policies.candidates import part_of, random_candidates
from tests.policies.matrix import RECENT_FOR_A_PERIOD, ROWS, SELECTING, Row, noise_of
from tests.policies.sizes import PERIOD, SIZES, Size, declared, room, select

MIDDLE = SIZES[1]
rows = pytest.mark.parametrize("row", SELECTING, ids=str)
separate_rows = pytest.mark.parametrize("row", [row for row in SELECTING if row.separate], ids=str)
rows_and_sizes = pytest.mark.parametrize(
    ("row", "size"),
    [pytest.param(row, size, id=f"{size}-{row}") for size in SIZES for row in SELECTING if size.fits(row)],
)


def test_every_registered_policy_has_a_row() -> None:
    assert {row.name for row in ROWS} == set(POLICIES)


@rows_and_sizes
def test_kept_tokens_are_distinct_ascending_indices_of_the_promised_number(row: Row, size: Size) -> None:
    candidates = size.candidates(row)
    kept, asked = select(row, size, candidates), room(row, size, candidates)
    assert kept.shape[:2] == (size.layers, size.heads)
    assert 0 < kept.shape[2] <= asked
    assert row.fewer or kept.shape[2] == asked
    assert kept.dtype == torch.int64
    assert kept.min() >= 0
    assert kept.max() < size.tokens
    assert (kept.diff(dim=-1) > 0).all()


@rows_and_sizes
def test_sinks_and_recent_tokens_are_kept(row: Row, size: Size) -> None:
    sinks = size.sinks if row.has("sinks") else 0
    recent = size.recent if row.has("recent") else 0
    forced = {*range(sinks), *range(size.tokens - recent, size.tokens)}
    for kept in select(row, size).flatten(0, 1).tolist():
        assert forced <= set(kept)


@pytest.mark.parametrize("row", [row for row in SELECTING if row.name in RECENT_FOR_A_PERIOD], ids=str)
def test_with_a_budget_of_the_forced_tokens_these_are_kept(row: Row) -> None:
    policy = row.build()
    forced = policy.forced(PERIOD)
    sinks = {"snapkv": 0}.get(row.name, 4)
    candidates = random_candidates(1, 2, 111, 64, queries=policy.needs(PERIOD).queries)
    kept = policy.select(candidates, forced, PERIOD, noise_of(1))
    assert kept.tolist() == [[[*range(sinks), *range(111 - (forced - sinks), 111)]] * 2]


@pytest.mark.parametrize(
    "row", [row for row in SELECTING if row.name in RECENT_FOR_A_PERIOD and "variant" not in row.options], ids=str
)
def test_recent_tokens_are_one_period_by_default(row: Row) -> None:
    without_window = replace(row, options={name: v for name, v in row.options.items() if name != "window"})
    for period in (16, 64):
        assert without_window.build(sinks="3").forced(period) == 3 + period


@pytest.mark.parametrize(
    ("row", "size"),
    [
        pytest.param(row, size, id=f"{size}-{row}")
        for size in SIZES
        for row in SELECTING
        if size.fits(row) and row.budgeted and not row.fewer
    ],
)
def test_keeping_as_many_as_there_are_keeps_all(row: Row, size: Size) -> None:
    kept = select(row, replace(size, n_keep=size.tokens))
    assert torch.equal(kept, torch.arange(size.tokens).expand_as(kept))


@rows
def test_inputs_are_not_modified(row: Row) -> None:
    candidates, untouched = MIDDLE.candidates(row), MIDDLE.candidates(row)
    select(row, MIDDLE, candidates)
    names = [*declared(row, MIDDLE).values(), *(["statistic"] if MIDDLE.policy(row).accumulates else [])]
    for name in names:
        torch.testing.assert_close(candidates.require(name), untouched.require(name), rtol=0, atol=0, equal_nan=True)


@rows
def test_a_choice_is_repeatable_whatever_was_chosen_in_between(row: Row) -> None:
    first = select(row, MIDDLE, MIDDLE.candidates(row, seed=0))
    select(row, MIDDLE, MIDDLE.candidates(row, seed=1), seed=5)
    assert torch.equal(first, select(row, MIDDLE, MIDDLE.candidates(row, seed=0)))


@rows
@pytest.mark.parametrize("key", ["seed", "eviction", "layer"])
def test_only_the_declared_noise_keys_change_the_choice(row: Row, key: str) -> None:
    one_layer = replace(MIDDLE, layers=1)
    choices = [select(row, one_layer, None, **{key: value}) for value in (3, 4)]
    assert torch.equal(*choices) == (key not in row.noise)


@pytest.mark.parametrize("row", [row for row in SELECTING if not row.build().spans_layers], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_choosing_layer_by_layer_gives_the_same_as_all_layers_at_once(row: Row, chunk: int) -> None:
    size = Size("five layers", 5, 2, 63, 80, n_keep=40, sinks=4, recent=8, dtype=torch.bfloat16)
    candidates = size.candidates(row)
    parts = [
        select(row, size, part_of(candidates, layers=slice(first, first + chunk)), layer=first)
        for first in range(0, 5, chunk)
    ]
    assert torch.equal(torch.cat(parts), select(row, size, candidates))


@separate_rows
def test_a_head_does_not_see_the_other_heads(row: Row) -> None:
    size = replace(MIDDLE, layers=2, heads=3)
    before, after = size.candidates(row, seed=0), size.candidates(row, seed=1)
    for name in ("keys", "values", "positions"):
        after.require(name)[1, 2] = before.require(name)[1, 2]
    if row.reads_queries:
        after.require("queries")[1, 4:6] = before.require("queries")[1, 4:6]  # the group of KV head 2
    assert torch.equal(select(row, size, before)[1, 2], select(row, size, after)[1, 2])


@rows
def test_those_who_share_a_set_hold_the_same_tokens(row: Row) -> None:
    shares = row.build().shares
    kept = select(row, replace(MIDDLE, heads=3))
    if shares in (Granularity.PER_LAYER, Granularity.GLOBAL):
        assert (kept == kept[:, :1]).all()
    if shares in (Granularity.PER_KV_HEAD_INDEX, Granularity.GLOBAL):
        assert (kept == kept[:1]).all()
    # Who shares no set with all others differs from some: two sets alike would be chance.
    assert shares == Granularity.GLOBAL or (kept != kept[:1, :1]).any()


@pytest.mark.parametrize("row", [row for row in SELECTING if not row.build().spans_heads], ids=str)
def test_a_rank_with_some_of_the_heads_chooses_for_them_as_one_with_all(row: Row) -> None:
    size = replace(MIDDLE, heads=4)
    whole = size.candidates(row)
    of_rank = select(row, size, part_of(whole, heads=slice(2, 4)), head=2)
    assert torch.equal(of_rank, select(row, size, whole)[:, 2:])


@pytest.mark.parametrize("row", [row for row in SELECTING if row.separate and row.reads_queries], ids=str)
@pytest.mark.parametrize("changed", [4, 5])
def test_a_head_reads_the_queries_of_all_of_its_group(row: Row, changed: int) -> None:
    size = replace(MIDDLE, heads=3)
    before, after = size.candidates(row), size.candidates(row)
    after.require("queries")[:, changed] *= -1
    differs = (select(row, size, before) != select(row, size, after)).any(dim=-1)
    assert differs.tolist() == [[False, False, True]] * size.layers


@rows
def test_a_policy_reads_nothing_that_it_did_not_declare(row: Row) -> None:
    whole = MIDDLE.candidates(row)
    tensors = ("keys", "values", "queries", "positions", "hidden_change")
    undeclared = {name: None for name in tensors if name not in declared(row, MIDDLE).values()}
    bare = replace(whole, **undeclared)  # type: ignore[arg-type]
    assert torch.equal(select(row, MIDDLE, bare), select(row, MIDDLE, whole))


@rows
def test_a_policy_does_not_work_without_what_it_declared(row: Row) -> None:
    whole = MIDDLE.candidates(row)
    for name in declared(row, MIDDLE).values():
        with pytest.raises(AssertionError, match=f"{name} were not gathered"):
            select(row, MIDDLE, replace(whole, **{name: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [row for row in SELECTING if row.build().accumulates], ids=str)
@pytest.mark.parametrize("size", [MIDDLE, SIZES[2]], ids=str)
def test_what_is_observed_does_not_depend_on_how_often(row: Row, size: Size) -> None:
    policy, whole = size.policy(row), size.candidates(row)
    statistic, tokens = whole.require("statistic").clone(), whole.shape[2]
    for before, after in itertools.pairwise((whole.unseen, 11, 10, 0)):  # unseen in the end
        part = replace(
            part_of(replace(whole, statistic=statistic), tokens=slice(tokens - after)),
            queries=whole.require("queries")[:, :, : whole.unseen - after],
            unseen=before - after,
            true_len=whole.true_len - after,
        )
        statistic[:, :, : tokens - after] = policy.observe(part, PERIOD)
    at_once = policy.observe(whole, PERIOD)
    assert at_once.dtype == torch.float32
    torch.testing.assert_close(statistic, at_once, rtol=1e-5, atol=1e-7, equal_nan=True)


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
    rounding = 1e-6 * float(scores.abs().amax())
    torch.testing.assert_close(policy.scores(moved, noise_of(2)), scores[..., order], rtol=1e-5, atol=rounding)


@rows
def test_only_policies_that_permuting_tokens_would_not_confuse_read_no_order(row: Row) -> None:
    """`keydiff` could do without too, but for the rounding of its mean; `random` scores places, not tokens."""
    reads_order = row.build().reads_order(PERIOD)
    assert reads_order is not (row.name == "random" or (row.permutable and row.name != "keydiff"))
    if row.has("recent"):
        assert row.build(recent=str(PERIOD)).reads_order(PERIOD) is reads_order
        assert row.build(recent=str(PERIOD + 1)).reads_order(PERIOD), "older than the last period's are in any place"


@pytest.mark.parametrize("row", [row for row in SELECTING if row.budgeted], ids=str)
def test_an_eviction_is_due_one_period_above_the_budget_and_cuts_to_it(row: Row) -> None:
    policy = row.build()
    assert [policy.due(resident, 100, 64) for resident in (99, 163, 164, 1000)] == [False, False, True, True]
    assert [policy.n_keep(resident, 100) for resident in (63, 100, 164, 1000)] == [63, 100, 100, 100]


@pytest.mark.parametrize("row", [row for row in ROWS if row not in SELECTING], ids=str)
def test_the_others_are_never_due(row: Row) -> None:
    policy = row.build()
    assert not any(policy.due(resident, 100, 64) for resident in (99, 164, 100_000))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_request_holds_no_more_than_promised_once_it_was_evicted_from(row: Row) -> None:
    """400 tokens of a prompt and 2000 steps: where no number is promised, there is none."""
    policy, budget = row.build(), 128
    resident, evicted, held = 400, 0, []
    for _ in range(2000):
        if evicted:
            held.append(resident)
        if policy.due(resident, budget, PERIOD, evicted=evicted):
            kept = policy.n_keep(resident, budget, evicted=evicted)
            resident, evicted = kept, evicted + resident - kept
        resident += 1
    most = policy.most_resident(budget, PERIOD)
    assert (most is None) == (not held or held[-1] > budget + PERIOD)
    assert most is None or max(held) == most
