"""Policies that carry something from step to step, or keep fewer tokens than they may, in plain tensors for pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from kvpolicy.policies.base import Band, Candidates, Granularity, Needs, Noise, Policy
from kvpolicy.sglang_plugin import observation
from kvpolicy.sglang_plugin.arms import Arm
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import residency_of
from tests.sglang_plugin.fake_requests import HEADS, LAYERS, LENGTH, Pools, hooked, request

BUDGET, PERIOD, PROMPT = 8, 4, 5


@dataclass(frozen=True)
class Counting(Policy):
    """Counts for each token how many queries it has been shown; keeps the oldest, `short` fewer than it may."""

    name: ClassVar[str] = "counting"
    granularity: ClassVar[Granularity] = Granularity.PER_HEAD
    accumulates: ClassVar[bool] = True
    seen: ClassVar[list[Candidates]] = []

    short: int = 0

    def needs(self, period: int) -> Needs:
        return Needs(positions=True, queries=period)

    def observe(self, candidates: Candidates, period: int) -> torch.Tensor:
        before = candidates.require("statistic").nan_to_num(nan=0.0)
        tokens, unseen = candidates.shape[-1], candidates.unseen
        age = torch.arange(tokens)
        newer = (tokens - torch.maximum(age, torch.tensor(tokens - unseen))).clamp_max(unseen)
        return before + newer

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        self.seen.append(candidates)
        layers, heads, _ = candidates.shape
        return torch.arange(n_keep - self.short).expand(layers, heads, -1)


class Taps:
    def newest(self, row: int, true_len: int, count: int, layers: slice) -> Any:
        return true_len


class Hidden:
    def changes(self, row: int, prompt_len: int, true_len: int, bands: Any) -> Any:
        return row, prompt_len, true_len, bands


def settings(policy: Policy) -> RequestSettings:
    return RequestSettings(Arm("counting", "counting", "", policy), BUDGET, PERIOD, 0)


def live(policy: Policy, steps: int) -> tuple[Any, Pools]:
    """Decode step by step: the hook, then one token more."""
    Counting.seen.clear()
    pools, req = Pools(), request(1, PROMPT, settings(policy), prefill=PROMPT)
    for _ in range(steps):
        hooked(req, pools=pools, taps=Taps())
        req.kv.kv_committed_len += 1
        req.kv.kv_allocated_len += 1
    return req, pools


def test_every_decode_query_is_observed_once_by_every_token_that_it_saw() -> None:
    """A token has been shown the queries of all decode steps since its own, its own included."""
    _, _ = live(Counting(), steps=30)
    first, second = Counting.seen[:2]
    assert [(c.true_len, c.previous_len, c.prompt_len) for c in Counting.seen[:2]] == [(12, 0, 5), (16, 12, 5)]
    for candidates in (first, second):
        positions, shown = candidates.require("positions"), candidates.require("statistic")
        assert shown.shape == (LAYERS, HEADS, BUDGET + PERIOD)
        # Queries exist of the decode steps only: those of positions 5, 6, …
        expected = candidates.true_len - positions.clamp_min(PROMPT)
        assert torch.equal(shown, expected.float())
    assert first.require("positions")[0, 0].tolist() == list(range(12))
    assert second.require("positions")[0, 0].tolist() == [*range(8), *range(12, 16)]


def test_a_policy_may_keep_fewer_tokens_and_the_rest_of_the_slots_goes_back() -> None:
    req, pools = live(Counting(short=3), steps=8)
    assert pools.given_back == {1: PERIOD + 3}
    assert residency_of(req).statistics()["tokens_evicted"] == PERIOD + 3
    assert req.kv.kv_committed_len == BUDGET - 3 + 1


def test_a_request_that_cannot_be_cut_is_observed_all_the_same() -> None:
    Counting.seen.clear()
    pools, req = Pools(), request(1, PROMPT, settings(Counting()), prefill=PROMPT)
    pools.full = True
    for _ in range(14):
        hooked(req, pools=pools, taps=Taps())
        req.kv.kv_committed_len += 1
        req.kv.kv_allocated_len += 1
    pools.full = False
    hooked(req, pools=pools, taps=Taps())
    (candidates,) = Counting.seen
    assert candidates.true_len == PROMPT + 14
    assert torch.equal(
        candidates.require("statistic"), (19 - candidates.require("positions").clamp_min(PROMPT)).float()
    )
    assert residency_of(req).deferred > 0


def test_layers_in_pieces_observe_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    live(Counting(), steps=30)
    whole = [(c.require("positions"), c.require("statistic")) for c in Counting.seen]
    monkeypatch.setattr(observation, "SCRATCH_BYTES", 2 * 12 * Pools.full_bytes_per_token / LAYERS)
    live(Counting(), steps=30)
    pieces = [(c.require("positions"), c.require("statistic")) for c in Counting.seen]
    assert len(pieces) == 2 * len(whole)
    for i, tensors in enumerate(whole):
        for name in (0, 1):
            assert torch.equal(torch.cat([pieces[2 * i][name], pieces[2 * i + 1][name]]), tensors[name])


def test_after_a_retraction_nothing_is_carried_on() -> None:
    req, _ = live(Counting(), steps=9)
    assert residency_of(req).tokens is not None
    residency_of(req).retracted()
    assert residency_of(req).tokens is None


@dataclass(frozen=True)
class Changing(Policy):
    """Reads changes of hidden states."""

    name: ClassVar[str] = "changing"
    seen: ClassVar[list[Any]] = []

    def needs(self, period: int) -> Needs:
        return Needs(hidden_bands=(Band(1, 2), Band(0.5, 0.5)))

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        self.seen.append(candidates)
        return torch.arange(n_keep).expand(*candidates.shape[:2], -1)


def test_a_policy_is_given_the_changes_of_its_own_bands_since_the_prompt() -> None:
    req = request(3, 12, settings(Changing()), prefill=PROMPT, offset=30)
    hooked(req, pools=Pools(), hidden=Hidden())
    (candidates,) = Changing.seen
    assert candidates.hidden_change == (3, PROMPT, 42, (Band(1, 2), Band(0.5, 0.5)))
    assert (candidates.keys, candidates.statistic, candidates.positions) == (None, None, None)
    assert LENGTH > 12
