"""Requests that end in unusual ways leak nothing: SGLang's own memory checks are on, and the pool is whole again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest

BUDGET, PERIOD, POOL = 64, 16, 2048


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def running(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Any]:
    settings = {"kv_policy": "vase-dkv", "kv_budget": BUDGET, "kv_period": PERIOD}
    with harness.engine(
        tiny, **settings, max_total_tokens=POOL, disable_overlap_schedule=not request.param, enable_metrics=False
    ) as engine:
        yield engine


def assert_pool_is_whole(running: Any) -> None:
    """After a flush every slot is free; a scheduler that found a leak would have died before it could answer."""
    harness.flush(running)
    (state,) = running.get_server_info()["internal_states"]
    assert state["memory_usage"]["token_capacity"] == POOL
    response = harness.greedy(running, [list(range(200, 230))], 100)[0]
    assert response["meta_info"]["kv_policy"]["evictions"] >= 2


def test_one_new_token_ends_before_any_decode_step(running: Any, prompts: list[list[int]]) -> None:
    for response, prompt in zip(harness.greedy(running, prompts, 1), prompts, strict=True):
        report = response["meta_info"]["kv_policy"]
        assert report["decode_steps"] == report["evictions"] == 0
        assert report["resident_mean"] == report["resident_peak"] == report["resident_end"] == len(prompt)
    assert_pool_is_whole(running)


def test_a_response_may_end_on_any_step_around_an_eviction(running: Any, prompts: list[list[int]]) -> None:
    # With a prompt of 47 the row is due when 34 tokens are out; lengths around it end before, on and after.
    for tokens in range(32, 38):
        (response,) = harness.greedy(running, [prompts[1]], tokens)
        report = response["meta_info"]["kv_policy"]
        assert report["full_end"] == len(prompts[1]) + tokens - 1
        assert report["resident_end"] == report["full_end"] - report["tokens_evicted"]
    assert_pool_is_whole(running)


def test_a_stop_string_on_the_step_of_an_eviction(running: Any, prompts: list[list[int]]) -> None:
    tokenizer = running.tokenizer_manager.tokenizer
    (whole,) = harness.greedy(running, [prompts[1]], 60)
    for at in range(33, 37):
        # The last token's own text; an earlier occurrence would end the response earlier, which is as good a test.
        stop = tokenizer.decode(whole["output_ids"][at : at + 1])
        (response,) = harness.greedy(running, [prompts[1]], 60, stop=[stop])
        assert response["meta_info"]["finish_reason"]["type"] == "stop"
        assert response["output_ids"] == whole["output_ids"][: len(response["output_ids"])]
    assert_pool_is_whole(running)


def test_a_stop_token_on_the_step_of_an_eviction(running: Any, prompts: list[list[int]]) -> None:
    (whole,) = harness.greedy(running, [prompts[1]], 60)
    for at in range(33, 37):
        parameters = {"ignore_eos": False, "stop_token_ids": [whole["output_ids"][at]]}
        (response,) = harness.greedy(running, [prompts[1]], 60, **parameters)
        assert response["output_ids"] == whole["output_ids"][: len(response["output_ids"])]
        assert len(response["output_ids"]) <= at + 1
    assert_pool_is_whole(running)


def test_an_abort_in_mid_generation(running: Any, prompts: list[list[int]]) -> None:
    async def abort_after(seconds: float, rid: str) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}
        task = asyncio.ensure_future(running.async_generate(input_ids=prompts[2], sampling_params=sampling, rid=rid))
        await asyncio.sleep(seconds)
        running.tokenizer_manager.abort_request(rid=rid)
        return await task

    for i, seconds in enumerate((0.05, 0.7, 1.3)):
        response = running.loop.run_until_complete(abort_after(seconds, f"abort-{i}"))
        assert response["meta_info"]["finish_reason"]["type"] == "abort"
    assert_pool_is_whole(running)


def test_flushing_the_cache_between_requests_changes_no_output(running: Any, prompts: list[list[int]]) -> None:
    outputs = []
    for _ in range(2):
        outputs.append([response["output_ids"] for response in harness.greedy(running, prompts, 90)])
        harness.flush(running)
    assert outputs[0] == outputs[1]
    assert_pool_is_whole(running)


def test_more_requests_than_the_pool_holds_at_once(running: Any, prompts: list[list[int]]) -> None:
    many = [[*prompts[i % 3][:60], 500 + i] for i in range(24)]
    responses = harness.greedy(running, many, 120)
    assert [len(response["output_ids"]) for response in responses] == [120] * 24
    assert all(response["meta_info"]["kv_policy"]["evictions"] >= 1 for response in responses)
    assert_pool_is_whole(running)
