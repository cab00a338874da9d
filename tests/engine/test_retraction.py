"""A retracted request gives all slots back, is prefilled anew, and is compacted again."""

from __future__ import annotations

from pathlib import Path

import harness

BUDGET, PERIOD, TOKENS = 64, 16, 150


def test_retracted_requests_finish_compacted_and_leak_nothing(tiny: Path, prompts: list[list[int]]) -> None:
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
    settings = {"kv_policy": "vase-dkv", "kv_budget": BUDGET, "kv_period": PERIOD}
    with harness.engine(tiny, environment, **settings) as running:
        responses = harness.greedy(running, prompts, TOKENS)
        again = harness.greedy(running, prompts, 1)
    reports = [response["meta_info"]["kv_policy"] for response in responses]
    assert sum(report["retractions"] for report in reports) >= 2
    for response, report, prompt in zip(responses, reports, prompts, strict=True):
        assert len(response["output_ids"]) == TOKENS
        assert report["evictions"] >= 1
        assert report["full_end"] == len(prompt) + TOKENS - 1
        assert BUDGET < report["resident_end"] <= BUDGET + PERIOD
    # The row of a resumed request is whole again, so its prefix may enter the radix tree as any other.
    assert [response["meta_info"]["cached_tokens"] for response in again] == [len(prompt) - 1 for prompt in prompts]
