"""Requests with settings of their own in one batch, evicted in pools that are plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise, Policy
from kvpolicy.sglang_plugin import observation
from kvpolicy.sglang_plugin.arms import Arm
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import residency_of
from tests.sglang_plugin.fake_requests import FIRST_HEAD, LAYERS, LENGTH, Pools, evictor, hooked, request


@dataclass(frozen=True)
class Newest(Policy):
    """Keeps the newest tokens, and remembers what it was given."""

    name: ClassVar[str] = "newest"
    calls: ClassVar[list[tuple[Candidates, int, int, Noise]]] = []

    queries: int = 0

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, queries=self.queries)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        candidates.require("keys")  # as they are now: what is kept is moved next
        self.calls.append((candidates, n_keep, period, noise))
        layers, heads, tokens = candidates.shape
        return torch.arange(tokens - n_keep, tokens).expand(layers, heads, n_keep)


class Taps:
    """Answers with what it was asked for."""

    def newest(self, row: int, true_len: int, count: int, layers: slice) -> Any:
        return row, true_len, count, layers


def settings(budget: int, period: int, seed: int = 0, queries: int = 0) -> RequestSettings:
    return RequestSettings(Arm(f"newest {queries}", "newest", "", Newest(queries)), budget, period, seed)


def before_decode(*reqs: Any, pools: Pools | None = None, taps: Any = None) -> Any:
    Newest.calls.clear()
    return hooked(*reqs, pools=pools or Pools(), taps=taps)


def test_each_request_is_cut_to_its_own_budget_when_its_own_period_is_over() -> None:
    pools = Pools()
    keys, values = ([layer.clone() for layer in layers] for layers in (pools.keys, pools.values))
    reqs = [
        request(1, 14, settings(10, 4, seed=3)),
        request(2, 14, settings(10, 5)),  # not due yet
        request(3, 14, settings(6, 2, seed=2**62)),
        request(4, 5, settings(4, 1)),
    ]
    batch = before_decode(*reqs, pools=pools)
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [10, 14, 6, 4]
    assert batch.seq_lens_sum is None
    assert pools.given_back == {1: 4, 3: 8, 4: 1}
    given = [(n_keep, period, noise.seed, noise.first_head) for _, n_keep, period, noise in Newest.calls]
    assert given == [(10, 4, 3, FIRST_HEAD), (6, 2, 2**62, FIRST_HEAD), (4, 1, 0, FIRST_HEAD)]
    for row, length, kept in ((1, 14, 10), (2, 14, 14), (3, 14, 6), (4, 5, 4)):
        start = row * LENGTH
        for now, before in ((pools.keys, keys), (pools.values, values)):
            for layer in range(LAYERS):
                newest = before[layer][start + length - kept : start + length]
                assert torch.equal(now[layer][start : start + kept], newest)


@pytest.mark.parametrize(("offset", "full"), [(0, False), (3, True)])
def test_the_first_eviction_after_a_prefill_lets_the_scheduler_look_for_room(offset: int, full: bool) -> None:
    batch = before_decode(request(1, 14, settings(10, 4), offset=offset), request(2, 10, settings(10, 4)))
    assert batch.batch_is_full is full


def test_only_a_request_that_is_cut_has_an_eviction_and_the_time_it_took() -> None:
    cut, left = request(1, 14, settings(10, 4)), request(2, 13, settings(10, 4))
    before_decode(cut, left)
    assert residency_of(cut).statistics()["evictions"] == 1
    assert residency_of(cut).statistics()["eviction_seconds"] > 0
    assert cut.skip_radix_cache_insert
    assert residency_of(left).statistics()["evictions"] == 0
    assert residency_of(left).statistics()["eviction_seconds"] == 0
    assert not left.skip_radix_cache_insert


def test_without_an_eviction_the_batch_is_left_alone() -> None:
    req = request(1, 13, settings(10, 4))
    batch = before_decode(req)
    assert batch.seq_lens_sum == 1
    assert batch.seq_lens.tolist() == [13]
    assert before_decode().seq_lens_sum == 1


def test_lengths_that_a_step_in_flight_reads_are_not_written() -> None:
    lengths: list[torch.Tensor] = []

    class Watching(Pools):
        def take_slots(self, req: Any, row: torch.Tensor, n_keep: int) -> Any:
            lengths.extend((batch_of[0].seq_lens, batch_of[0].seq_lens_cpu))
            return super().take_slots(req, row, n_keep)

    batch_of: list[Any] = []
    req = request(1, 14, settings(10, 4))
    batch = SimpleNamespace(reqs=[req], is_empty=lambda: False, seq_lens=torch.tensor([14]), seq_lens_sum=1)
    batch.seq_lens_cpu = batch.seq_lens.clone()
    batch_of.append(batch)
    evictor(Watching()).before_decode(batch)
    assert [length.tolist() for length in lengths] == [[14], [14]]
    assert batch.seq_lens.tolist() == [10]


def test_a_policy_is_given_as_many_queries_as_it_reads_up_to_the_true_length() -> None:
    reading = request(4, 14, settings(10, 4, queries=7), prefill=5, offset=30)
    before_decode(reading, request(2, 14, settings(10, 4)), taps=Taps())
    first, second = (candidates.queries for candidates, *_ in Newest.calls)
    assert first == (4, 44, 7, slice(0, LAYERS))
    assert second is None


def test_layers_in_pieces_come_with_their_own_queries_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "SCRATCH_BYTES", 2 * 14 * Pools.full_bytes_per_token / LAYERS)
    pools = Pools()
    keys = torch.stack([layer[LENGTH : LENGTH + 14] for layer in pools.keys]).transpose(1, 2).clone()
    before_decode(request(1, 14, settings(10, 4, queries=3)), pools=pools, taps=Taps())
    assert [candidates.queries for candidates, *_ in Newest.calls] == [(1, 14, 3, slice(0, 2)), (1, 14, 3, slice(2, 3))]
    assert [noise.layers for *_, noise in Newest.calls] == [(5, 6), (7,)]
    assert torch.equal(torch.cat([candidates.require("keys") for candidates, *_ in Newest.calls]), keys)


@pytest.mark.parametrize(
    ("published", "extend_end", "length", "offset", "ready"),
    [
        pytest.param(None, 14, 14, 0, False, id="prefill not processed"),
        pytest.param(8, 14, 14, 0, False, id="one chunk published"),
        pytest.param(14, 14, 14, 0, False, id="no token decoded"),
        pytest.param(14, 14, 15, 0, True, id="one token decoded"),
        pytest.param(14, 14, 14, 1, True, id="compacted to the length of the prompt"),
    ],
)
def test_a_request_is_cut_only_after_its_prompt_is_published_and_a_token_was_decoded(
    published: int | None, extend_end: int, length: int, offset: int, ready: bool
) -> None:
    req = request(1, length, settings(10, 4), prefill=extend_end, offset=offset)
    residency_of(req).published = published
    assert before_decode(req).seq_lens.tolist() == [10 if ready else length]


def test_an_eviction_without_free_slots_is_counted_and_changes_nothing() -> None:
    pools = Pools()
    pools.full = True
    before = [layer.clone() for layer in pools.keys]
    req = request(1, 14, settings(10, 4))
    assert before_decode(req, pools=pools).seq_lens.tolist() == [14]
    assert (residency_of(req).deferred, residency_of(req).evictions) == (1, 0)
    assert all(torch.equal(*pair) for pair in zip(pools.keys, before, strict=True))
    assert not req.skip_radix_cache_insert
