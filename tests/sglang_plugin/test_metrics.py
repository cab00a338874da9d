"""What is counted of requests that run, end, are aborted and resumed, against what their states say."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvpolicy.sglang_plugin import metrics
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.metrics import COUNTERS, FINISHED, GAUGES, INTERVAL, Metrics
from kvpolicy.sglang_plugin.request_settings import request_settings
from kvpolicy.sglang_plugin.residency import residency_of

LAUNCH = KVPolicyConfig("vase-dkv|full", budget=100, period=16)
LABELS = {"model_name": "m", "tp_rank": 0}
PER_TOKEN, FULL_PER_TOKEN = 16.0, 64.0


class Scheduler:
    """Metrics in a registry of their own, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 5.0
        self.registry = CollectorRegistry()
        per_token = PER_TOKEN, FULL_PER_TOKEN
        self.metrics = Metrics(
            LABELS, LAUNCH.arms, lambda req: req.settings, *per_token, registry=self.registry, clock=lambda: self.now
        )

    def value(self, name: str, policy: str = "vase-dkv") -> float | None:
        labels = {"model_name": "m", "tp_rank": "0", "policy": policy}
        return self.registry.get_sample_value(f"kvpolicy:{name}", labels)

    def held(self, policy: str = "vase-dkv") -> list[float | None]:
        return [self.value(name, policy) for name in GAUGES]

    def step(self, *reqs: Any, seconds: float = INTERVAL) -> None:
        self.now += seconds
        lengths = torch.tensor([req.length for req in reqs])
        self.metrics.decoding(SimpleNamespace(reqs=list(reqs), is_empty=lambda: not reqs, seq_lens_cpu=lengths))


class Request:
    """A prompt of 110 tokens; `length` tokens of it and of the output are resident."""

    def __init__(self, policy: str = "vase-dkv") -> None:
        self.settings = request_settings(LAUNCH, {"kv_policy": policy})
        self.ended = False
        self.length = 110
        residency_of(self).prefilled(110)

    def finished(self) -> bool:
        return self.ended

    def decodes(self, steps: int) -> None:
        self.length += steps

    def evicts(self, kept: int = 100) -> None:
        residency_of(self).evicted(self.length, kept)
        self.length = kept

    def ends(self, scheduler: Scheduler) -> None:
        self.ended = True
        residency_of(self).advance(self.length)
        scheduler.metrics.released(self)


def test_every_policy_has_every_series_from_the_start() -> None:
    scheduler = Scheduler()
    for policy in LAUNCH.arms:
        assert {scheduler.value(f"{name}_total", policy) for name in (*COUNTERS, FINISHED)} == {0.0}
        assert scheduler.held(policy) == [0.0] * len(GAUGES)
    assert scheduler.value("evictions_total", "snapkv") is None


def test_evictions_of_a_running_request_are_counted_before_it_ends() -> None:
    scheduler, req = Scheduler(), Request()
    req.decodes(6)
    req.evicts()
    req.decodes(4)
    scheduler.step(req)
    assert scheduler.value("evictions_total") == 1
    assert scheduler.value("evicted_tokens_total") == 16
    assert scheduler.value("finished_requests_total") == 0
    assert scheduler.held() == [1, 104, 120, 104 * PER_TOKEN, 120 * FULL_PER_TOKEN]


def test_nothing_is_counted_twice_and_the_gauges_fall_back_to_zero() -> None:
    scheduler, req = Scheduler(), Request()
    for _ in range(3):
        req.decodes(16 if residency_of(req).evictions else 6)
        req.evicts()
        scheduler.step(req)
        scheduler.step(req)
    req.decodes(5)
    req.ends(scheduler)
    state = residency_of(req)
    assert [scheduler.value(f"{name}_total") for name in ("evictions", "evicted_tokens")] == [3, 16 * 3]
    assert scheduler.value("decode_steps_total") == 6 + 16 + 16 + 5 == state.steps
    assert scheduler.value("resident_token_steps_total") == state.resident_sum
    assert scheduler.value("full_token_steps_total") == sum(range(111, 111 + 43))
    assert scheduler.value("finished_requests_total") == 1
    assert scheduler.held() == [0] * len(GAUGES)


def test_a_request_that_ends_between_two_looks_is_counted_whole() -> None:
    scheduler, req = Scheduler(), Request()
    req.decodes(6)
    req.evicts()
    req.ends(scheduler)
    assert scheduler.value("evictions_total") == 1
    assert scheduler.value("finished_requests_total") == 1


def test_running_requests_are_looked_at_once_an_interval() -> None:
    scheduler, req = Scheduler(), Request()
    scheduler.step(req)
    req.decodes(3)
    scheduler.step(req, seconds=0.9 * INTERVAL)
    assert scheduler.value("resident_tokens") == 110
    scheduler.step(req, seconds=0.2 * INTERVAL)
    assert scheduler.value("resident_tokens") == 113


def test_a_step_without_requests_changes_nothing() -> None:
    scheduler, req = Scheduler(), Request()
    scheduler.step()
    scheduler.step(req, seconds=0)  # the empty step was no look
    assert scheduler.value("running_requests") == 1


def test_policies_are_told_apart_and_requests_of_one_are_added() -> None:
    scheduler, reqs = Scheduler(), [Request(), Request(), Request("full")]
    reqs[1].decodes(6)
    reqs[1].evicts()
    reqs[2].decodes(40)
    scheduler.step(*reqs)
    assert scheduler.held()[:3] == [2, 110 + 100, 110 + 116]
    assert scheduler.held("full")[:3] == [1, 150, 150]
    assert scheduler.value("evictions_total", "full") == 0
    reqs[0].ends(scheduler)
    assert scheduler.held()[:3] == [1, 100, 116]
    assert scheduler.held("full")[:3] == [1, 150, 150]


def test_a_finished_request_that_is_still_in_the_batch_is_not_held_again() -> None:
    """SGLang filters a batch after the hook, and its requests gave back their cache before."""
    scheduler, req = Scheduler(), Request()
    scheduler.step(req)
    req.ends(scheduler)
    scheduler.step(req)
    assert scheduler.held() == [0] * len(GAUGES)


def test_a_retracted_request_keeps_its_counts_and_has_not_finished() -> None:
    scheduler, req = Scheduler(), Request()
    req.decodes(6)
    req.evicts()
    residency_of(req).advance(req.length)
    scheduler.metrics.released(req)
    residency_of(req).retracted()
    assert scheduler.held() == [0] * len(GAUGES)
    assert scheduler.value("finished_requests_total") == 0
    residency_of(req).prefilled(116)
    req.length = 116
    scheduler.step(req)
    assert scheduler.held()[:3] == [1, 116, 116]
    req.evicts()
    req.ends(scheduler)
    assert scheduler.value("evictions_total") == 2
    assert scheduler.value("finished_requests_total") == 1


def test_seconds_of_many_requests_never_make_a_counter_fall() -> None:
    """Of floats, (a + b) - b may be less than a."""
    scheduler, reqs = Scheduler(), [Request() for _ in range(30)]
    for i, req in enumerate(reqs):
        residency_of(req).seconds = 0.1 * 3**i
        scheduler.step(*reqs)
    for req in reversed(reqs):
        req.ends(scheduler)
    assert scheduler.value("eviction_seconds_total") == pytest.approx(sum(0.1 * 3**i for i in range(30)))


@pytest.mark.parametrize("on", [False, True])
def test_a_scheduler_has_metrics_where_sglang_writes_its_own(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SimpleNamespace(
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=on),
        metrics_collector=SimpleNamespace(labels=LABELS) if on else None,
    )
    made: list[Any] = []
    monkeypatch.setattr(Metrics, "__init__", lambda _self, *given: made.append(given))
    found = Metrics.of_scheduler(scheduler, LAUNCH.arms, len, 1.0, 2.0)
    assert isinstance(found, Metrics) == on
    assert made == ([(LABELS, LAUNCH.arms, len, 1.0, 2.0)] if on else [])


def test_the_page_names_all_of_them() -> None:
    page = (Path(metrics.__file__).resolve().parents[1] / "docs" / "server.md").read_text()
    named = set(re.findall(r"`kvpolicy:(\w+)`", page))
    assert named == {*GAUGES, *(f"{name}_total" for name in (*COUNTERS, FINISHED))}
