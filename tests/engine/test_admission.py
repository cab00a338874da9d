"""Admission by budget: how many requests run at once, how long they may get, and what happens to those that cannot."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import harness
import pytest

SETTINGS = {"kv_policy": "vase-dkv|full", "kv_budget": 64, "kv_period": 16}
MOST = 64 + 16


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40000), k=length)


def together(running: Any, prompts: list[list[int]], tokens: int, **custom: Any) -> list[Any]:
    """Responses, or what was raised in place of them."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": custom or None}

    async def all_of_them() -> list[Any]:
        asked = [running.async_generate(input_ids=each, sampling_params=sampling) for each in prompts]
        return await asyncio.gather(*asked, return_exceptions=True)

    return running.loop.run_until_complete(all_of_them())


def reports(responses: list[Any], tokens: int) -> list[dict[str, Any]]:
    """Their reports, once all have as many tokens as were asked for."""
    assert [len(response["output_ids"]) for response in responses] == [tokens] * len(responses)
    return [harness.report(response) for response in responses]


@pytest.fixture
def probe(tmp_path: Path) -> dict[str, str]:
    return {"KVPOLICY_TEST_PROBE": str(tmp_path / "steps.jsonl"), "KVPOLICY_TEST_PREFIX": "0"}


def in_flight(probe: dict[str, str]) -> list[int]:
    """Requests in each decode step."""
    return [len(step["resident"]) for step in harness.probe_lines(Path(probe["KVPOLICY_TEST_PROBE"]))]


def test_a_pool_serves_sixteen_requests_that_outgrow_it_together(tiny: Path, probe: dict[str, str]) -> None:
    """Each would hold up to 1152 tokens: SGLang lets five of them into 6144 slots."""
    prompts = [prompt(128 - 5 * i, seed=i) for i in range(16)]
    settings = {"kv_policy": "vase-dkv", "kv_budget": 192, "kv_period": 64}
    with harness.engine(tiny, probe, **settings, max_total_tokens=6144) as running:
        of_each = reports(together(running, prompts, 1024), 1024)
    for report in of_each:
        assert (report["retractions"], report["evictions_deferred"]) == (0, 0)
        assert report["resident_peak"] <= 192 + 64
        assert report["evictions"] >= 13
    steps = in_flight(probe)
    assert sum(requests == 16 for requests in steps) >= 1000
    assert len(steps) <= 1040


def test_without_a_radix_tree_as_many_run(tiny: Path, probe: dict[str, str]) -> None:
    """Nothing of a prompt is shared or kept then: each request holds 80 tokens of its own, eight of them 640."""
    settings = {**SETTINGS, "disable_radix_cache": True, "chunked_prefill_size": 64}
    with harness.engine(tiny, probe, **settings, max_total_tokens=700) as running:
        responses = together(running, [prompt(70 - i, seed=50 + i) for i in range(10)], 200)
    for report in reports(responses, 200):
        assert report["evictions_deferred"] == report["retractions"] == 0
        assert report["resident_peak"] == MOST
    assert max(in_flight(probe)) == 8


@pytest.fixture(scope="module")
def small(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine of 340 slots that prefills in chunks of 64, and its decode steps.

    An engine that is shut down takes all others with it: tests with one of their own stand before or at the end.
    """
    path = tmp_path_factory.mktemp("small") / "steps.jsonl"
    probe = {"KVPOLICY_TEST_PROBE": str(path), "KVPOLICY_TEST_PREFIX": "0"}
    with harness.engine(tiny, probe, **SETTINGS, max_total_tokens=340, chunked_prefill_size=64) as running:
        yield running, probe


def steps_of(small: Any, *asked: Any, **custom: Any) -> tuple[list[Any], int]:
    """Responses, and how many requests ran at once."""
    running, probe = small
    before = len(in_flight(probe)) if Path(probe["KVPOLICY_TEST_PROBE"]).exists() else 0
    responses = together(running, *asked, **custom)
    return responses, max(in_flight(probe)[before:])


def test_one_request_thinks_far_beyond_its_pool(small: Any) -> None:
    responses, _ = steps_of(small, [prompt(100, seed=0)], 2000)
    (report,) = reports(responses, 2000)
    assert report["full_end"] == 2099
    assert (report["retractions"], report["resident_peak"]) == (0, 101)


def test_requests_of_one_prompt_share_it_and_are_never_put_off(small: Any) -> None:
    same = [prompt(180, seed=1)] * 3
    (first, *cold), most = steps_of(small, same, 100)
    assert most == 2
    warm, _ = steps_of(small, same, 100)
    for report in reports([first, *cold, *warm], 100):
        assert report["evictions_deferred"] == report["retractions"] == 0
    assert {tuple(response["output_ids"]) for response in (*cold, *warm)} == {tuple(first["output_ids"])}
    assert warm[0]["meta_info"]["cached_tokens"] == 179


def test_many_questions_behind_one_few_shot_prefix(small: Any) -> None:
    prefix = prompt(100, seed=2)
    responses, most = steps_of(small, [prefix + prompt(10, seed=10 + i) for i in range(32)], 60)
    assert most == 3, "the prefix and three requests of 80 tokens are what 340 slots hold"
    for report in reports(responses, 60):
        assert report["evictions_deferred"] == report["retractions"] == 0
    assert sum(response["meta_info"]["cached_tokens"] >= 100 for response in responses) >= 29


def test_prompts_in_chunks_that_fill_the_pool(small: Any) -> None:
    responses, _ = steps_of(small, [prompt(330, seed=3), prompt(300, seed=4), prompt(50, seed=5)], 100)
    for report, peak in zip(reports(responses, 100), (331, 301, MOST), strict=True):
        assert report["evictions_deferred"] == report["retractions"] == 0
        assert report["resident_peak"] == peak


def test_a_prompt_that_can_never_fit_is_refused_and_the_next_one_served(small: Any) -> None:
    (refused, served), _ = steps_of(small, [prompt(336, seed=6), prompt(30, seed=7)], 100)
    assert "exceeds the maximum allowed length" in str(refused)
    reports([served], 100)


def test_the_full_cache_still_ends_where_the_pool_does(small: Any) -> None:
    """What keeps everything is admitted, and cut off, as in stock SGLang."""
    (response,), _ = steps_of(small, [prompt(100, seed=8)], 500, kv_policy="full")
    assert len(response["output_ids"]) == 340 - 100 - 2
    assert response["meta_info"]["finish_reason"]["type"] == "length"
    _, most = steps_of(small, [prompt(100, seed=20 + i) for i in range(3)], 150, kv_policy="full")
    assert most == 1


def test_a_retracted_request_that_outgrew_the_pool_is_ended_with_a_sentence(tiny: Path) -> None:
    """SGLang is made to retract at every 450th step, when all three requests have more text than the pool has slots."""
    forced = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "450"}
    with harness.engine(tiny, forced, **SETTINGS, max_total_tokens=400) as running:
        responses = together(running, [prompt(60 - i, seed=30 + i) for i in range(3)], 600)
        ended = [response for response in responses if isinstance(response, BaseException)]
        assert len(ended) == 1
        assert "too long to be computed anew in a pool of 400" in str(ended[0])
        served = [response for response in responses if not isinstance(response, BaseException)]
        assert [report["retractions"] for report in reports(served, 600)] == [0, 0]
        (after,) = together(running, [prompt(60, seed=40)], 100)
        reports([after], 100)
        harness.flush(running)
