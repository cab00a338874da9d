"""Residency statistics against a simulation that looks at every decode step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvpolicy.sglang_plugin.residency import Residency, residency_of


@dataclass
class Simulation:
    """One request, step by step; its methods drive the `Residency` under test as the hooks do."""

    state: Residency = field(default_factory=Residency)
    resident: int = 0
    true_len: int = 0
    residents: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    peak: int = 0
    evictions: int = 0
    tokens_evicted: int = 0

    def prefill(self, tokens: int) -> None:
        self.resident = self.true_len = tokens
        self.peak = max(self.peak, tokens)
        self.state.prefilled(tokens)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.resident += 1
            self.true_len += 1
            self.residents.append(self.resident)
            self.full.append(self.true_len)
            self.peak = max(self.peak, self.resident)

    def evict(self, kept: int) -> None:
        self.state.evicted(self.resident, kept)
        self.evictions += 1
        self.tokens_evicted += self.resident - kept
        self.resident = kept

    def release(self) -> None:
        self.state.advance(self.true_len - self.state.offset)

    def retract(self) -> None:
        """Slots are freed, prompt and output are prefilled anew."""
        self.release()
        self.state.retracted()

    def check(self) -> None:
        found = self.state.statistics()
        steps = len(self.residents)
        assert found == {
            "evictions": self.evictions,
            "tokens_evicted": self.tokens_evicted,
            "evictions_deferred": 0,
            "eviction_seconds": 0.0,
            "decode_steps": steps,
            "resident_mean": pytest.approx(sum(self.residents) / steps if steps else self.resident),
            "resident_peak": self.peak,
            "resident_end": self.resident,
            "full_mean": pytest.approx(sum(self.full) / steps if steps else self.true_len),
            "full_end": self.true_len,
        }


@pytest.mark.parametrize("seed", range(30))
def test_statistics_equal_a_step_by_step_simulation(seed: int) -> None:
    rng, request = random.Random(seed), Simulation()
    request.prefill(rng.choice([1, 63, 111, 500]))
    for _ in range(rng.randint(0, 12)):
        request.decode(rng.choice([0, 1, 2, 63, 64]))
        match rng.choice(["evict", "evict", "retract", "go on"]):
            case "evict":
                request.evict(rng.randint(1, request.resident))
            case "retract":
                request.retract()
                request.prefill(request.true_len)
    request.decode(rng.choice([0, 1, 17]))
    request.release()
    request.check()


def test_a_steady_request_by_hand() -> None:
    request = Simulation()
    request.prefill(6)
    request.decode(2)  # attends to 7, 8
    request.evict(5)
    request.decode(3)  # attends to 6, 7, 8 of 9, 10, 11
    request.evict(5)
    request.release()
    statistics = request.state.statistics()
    assert statistics["resident_mean"] == (7 + 8 + 6 + 7 + 8) / 5
    assert statistics["full_mean"] == (7 + 8 + 9 + 10 + 11) / 5
    assert statistics["resident_peak"] == 8
    assert statistics["resident_end"] == 5
    assert statistics["full_end"] == 11
    assert statistics["tokens_evicted"] == 6


def test_a_request_that_ends_with_its_prefill_is_counted() -> None:
    state = Residency()
    state.advance(63)
    assert state.statistics()["resident_mean"] == 63
    assert state.statistics()["resident_peak"] == 63
    assert state.statistics()["full_end"] == 63
    assert state.statistics()["decode_steps"] == 0


def test_a_prompt_in_chunks_counts_as_one_prefill() -> None:
    whole, chunks = Simulation(), Simulation()
    whole.prefill(600)
    for tokens in (256, 512, 600):
        chunks.prefill(tokens)
    for request in (whole, chunks):
        request.decode(10)
        request.release()
    assert chunks.state == whole.state


def test_a_retraction_forgets_the_cache_and_keeps_the_history() -> None:
    request = Simulation()
    request.prefill(100)
    request.decode(64)
    request.evict(80)
    request.decode(10)
    request.retract()
    state = request.state
    assert (state.published, state.start, state.offset, state.trace) == (None, None, 0, None)
    assert (state.evictions, state.steps, state.peak) == (1, 74, 164)
    request.prefill(174)
    request.decode(1)
    request.release()
    request.check()


def test_the_time_spent_on_evictions_is_reported_and_outlives_a_retraction() -> None:
    request = Simulation()
    request.prefill(100)
    request.state.seconds += 0.25
    request.retract()
    request.prefill(100)
    request.state.seconds += 0.5
    assert request.state.statistics()["eviction_seconds"] == 0.75


def test_counting_twice_adds_nothing() -> None:
    request = Simulation()
    request.prefill(10)
    request.decode(5)
    request.release()
    before = request.state.statistics()
    request.release()
    assert request.state.statistics() == before


def test_the_state_travels_with_the_request() -> None:
    first, second = SimpleNamespace(), SimpleNamespace()
    state = residency_of(first)
    assert residency_of(first) is state
    assert residency_of(second) is not state
