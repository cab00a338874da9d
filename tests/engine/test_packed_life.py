"""A packed cache through everything that takes and gives back slots: no protected row is lost or held twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pytest

BUDGET, PERIOD, POOL = 64, 16, 900


class Running(NamedTuple):
    engine: Any
    probe: Path


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def running(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    probe = tmp_path_factory.mktemp("probe") / "steps.jsonl"
    environment = {
        "KVPOLICY_TEST_PROBE": str(probe),
        "KVPOLICY_TEST_PREFIX": "8",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "37",
    }
    settings = {
        "kv_policy": "full|vase-dkv",
        "kv_budget": BUDGET,
        "kv_period": PERIOD,
        "kv_quant": "range-int4",
        "kv_quant_group": 16,
        "kv_protect": 0.1,
        "max_total_tokens": POOL,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "disable_overlap_schedule": not request.param,
    }
    with harness.engine(tiny, environment, **settings) as engine:
        yield Running(engine, probe)


def assert_rows_are_whole(running: Running) -> None:
    """After a flush no row is taken: a request alone has one in each layer and head for each of its few tokens."""
    harness.flush(running.engine)
    running.probe.write_text("")
    prompt = list(range(300, 318))
    harness.greedy(running.engine, [prompt], 12)
    lines = harness.probe_lines(running.probe)
    assert len(lines) >= 11
    for line in lines:
        (resident,) = line["resident"]
        fewest, most, capacity = line["protected"]
        assert fewest == most == resident
        assert capacity >= 8 * (2 * PERIOD + 4) + POOL // 10


def test_two_policies_share_a_small_pool_with_retractions(running: Running, prompts: list[list[int]]) -> None:
    """Requests that share prefixes, more than run at once, some of them retracted and prefilled again."""
    many = [[*prompts[i % 3][:60], 500 + i % 5] for i in range(16)]
    choices = [{"kv_policy": ("full", "vase-dkv")[i % 2]} for i in range(16)]
    responses = harness.per_request(running.engine, many, choices, 150)
    records = [harness.report(response) for response in responses]
    assert [len(response["output_ids"]) for response in responses] == [150] * 16
    assert sum(record["retractions"] for record in records) >= 1
    assert [record["evictions"] > 0 for record in records] == [False, True] * 8
    assert all(record["protected_rows_denied"] == 0 for record in records)
    assert_rows_are_whole(running)


def test_the_share_is_kept_to(running: Running, prompts: list[list[int]]) -> None:
    for policy, tokens in (("full", 300), ("vase-dkv", 300)):
        choice = [{"kv_policy": policy}]
        (response,) = harness.per_request(running.engine, [prompts[0]], choice, tokens)
        record = harness.report(response)
        resident = record["resident_end"]
        most = (4 + 2 * PERIOD + 0.1 * resident) / resident
        assert 0.1 < record["protected_end"] <= most
    assert_rows_are_whole(running)


def test_a_prompt_in_the_tree_keeps_its_share_alone(running: Running, prompts: list[list[int]]) -> None:
    """Its newest tokens had rows while it ran; those that stay for the next request are settled."""
    harness.flush(running.engine)
    prompt = [*prompts[2], *prompts[1]]
    harness.greedy(running.engine, [prompt], 1)
    running.probe.write_text("")
    harness.greedy(running.engine, [list(range(700, 710))], 3)
    for line in harness.probe_lines(running.probe):
        fewest, most, _ = line["protected"]
        in_tree = 4 + len(prompt) // 10 - 4 // 10
        assert fewest == most == in_tree + line["resident"][0]
    again = harness.greedy(running.engine, [prompt], 40)[0]
    assert again["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert_rows_are_whole(running)


def test_aborts_and_several_samples(running: Running, prompts: list[list[int]]) -> None:
    async def aborted(seconds: float, rid: str) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
        task = asyncio.ensure_future(
            running.engine.async_generate(input_ids=prompts[2], sampling_params=sampling, rid=rid)
        )
        await asyncio.sleep(seconds)
        running.engine.tokenizer_manager.abort_request(rid=rid)
        return await task

    for i, seconds in enumerate((0.05, 0.6, 1.2)):
        response = running.engine.loop.run_until_complete(aborted(seconds, f"abort-{i}"))
        assert response["meta_info"]["finish_reason"]["type"] == "abort"
    samples = harness.greedy(running.engine, [prompts[1]], 60, n=3, temperature=1.0)
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3
    assert_rows_are_whole(running)
