"""The record in a response's `meta_info`, and that the reports can add it up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.reports.cache_summary import summarize
from kvpolicy.reports.lmeval_output import TaskRun
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.report import response_report
from kvpolicy.sglang_plugin.request_settings import request_settings
from kvpolicy.sglang_plugin.residency import Residency

ARM = "vase-attnv[reserve:random;window:8]"
LAUNCH = KVPolicyConfig(f"vase-dkv|{ARM}", budget=100, period=16, seed=5)


def evicted_once() -> Residency:
    """A prompt of 110 tokens, 6 steps, cut to 100, 4 steps."""
    state = Residency(seconds=0.125)
    state.prefilled(110)
    state.evicted(116, 100)
    state.advance(104)
    return state


def report(custom: dict[str, Any] | None = None, sampling_seed: int | None = None, **changed: Any) -> dict[str, Any]:
    per_token = {"bytes_per_token": 32.0, "full_bytes_per_token": 64.0}
    given = {**per_token, "beside": {"query_window_bytes": 640}, "retractions": 2, **changed}
    return response_report(evicted_once(), request_settings(LAUNCH, custom, sampling_seed), **given)


def test_a_record_has_these_entries() -> None:
    """Their names are an interface: `kvpolicy cache`, the lm-eval tasks and users read them."""
    state = evicted_once().statistics()
    assert report() == {
        "policy": "vase-dkv",
        "options": "",
        "budget": 100,
        "period": 16,
        "seed": 5,
        "sampling_seed": None,
        **state,
        "retractions": 2,
        "kv_bytes_per_token": 32.0,
        "kv_bytes_mean": 32.0 * state["resident_mean"],
        "kv_bytes_peak": 32.0 * 116,
        "kv_bytes_end": 32.0 * 104,
        "kv_bytes_full_mean": 64.0 * state["full_mean"],
        "kv_bytes_full_end": 64.0 * 120,
        "query_window_bytes": 640,
        "token_state_bytes": 0,
    }
    assert (state["evictions"], state["tokens_evicted"], state["eviction_seconds"]) == (1, 16, 0.125)
    assert state["resident_mean"] == (sum(range(111, 117)) + sum(range(101, 105))) / 10


def test_a_record_tells_what_the_request_chose() -> None:
    custom = {"kv_policy": ARM, "kv_budget": 90, "kv_period": 8, "kv_seed": 6}
    settings = request_settings(LAUNCH, custom)
    chosen = report(custom)
    assert (chosen["policy"], chosen["options"]) == ("vase-attnv", "reserve:random;window:8")
    assert (chosen["budget"], chosen["period"], chosen["seed"]) == (90, 8, 6)
    assert chosen["sampling_seed"] == settings.sampling_seed is not None


def test_the_seed_of_the_tokens_is_the_one_that_drew_them() -> None:
    assert report(sampling_seed=-3)["sampling_seed"] == request_settings(LAUNCH, None, -3).sampling_seed
    assert report(sampling_seed=-3)["seed"] == 5


def test_a_record_survives_json() -> None:
    largest = report({"kv_seed": 2**63 - 1}, 2**63 - 1)
    assert json.loads(json.dumps(largest)) == largest


@pytest.mark.parametrize("custom", [None, {"kv_policy": ARM}], ids=["the default", "with options"])
def test_the_reports_can_add_records_up(custom: dict[str, Any] | None) -> None:
    samples = [{"kv_policy": report(custom)} for _ in range(2)]
    summary = summarize(TaskRun("task", "model", Path("samples.jsonl"), {}, samples))
    assert (summary.evictions, summary.tokens_evicted, summary.resident_peak) == (2, 32, 116)
    assert (summary.policy, summary.options) == (samples[0]["kv_policy"]["policy"], samples[0]["kv_policy"]["options"])
    assert summary.kv_bytes_full_peak == 64 * 120
