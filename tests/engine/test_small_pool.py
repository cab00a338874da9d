"""Compaction in a pool that has no room for it: room is made from the request's own prompt, or it is not admitted."""

from __future__ import annotations

from pathlib import Path

import harness

TOKENS = 50
SETTINGS = {"kv_policy": "vase-dkv", "kv_budget": 120, "kv_period": 16}


def test_a_request_may_compact_into_the_slots_of_its_own_prompt(tiny: Path, prompts: list[list[int]]) -> None:
    """180 prompt tokens in 256 slots: the budget fits only where the prompt was, and what it held must be kept."""
    prompt = prompts[2] + prompts[2][::-1]
    responses = []
    for pool in (8192, 256):
        with harness.engine(tiny, **SETTINGS, max_total_tokens=pool) as running:
            responses.append(harness.greedy(running, [prompt], TOKENS)[0])
            if pool == 256:
                (again,) = harness.greedy(running, [prompt], TOKENS)
                assert again["meta_info"]["cached_tokens"] < len(prompt) - 1, "the prompt was not evicted from the tree"
                assert again["output_ids"] == responses[0]["output_ids"]
    assert harness.report(responses[1]) == harness.report(responses[0])
    assert responses[1]["meta_info"]["kv_policy"]["evictions"] >= 2
    assert responses[1]["output_ids"] == responses[0]["output_ids"]


def test_a_request_that_would_have_to_wait_for_slots_is_not_admitted_yet(tiny: Path, prompts: list[list[int]]) -> None:
    """Two requests would lock one prompt of 180 for each other, and 340 slots hold no second set of 170 tokens."""
    prompt = prompts[2] + prompts[2][::-1]
    settings = {"kv_policy": "vase-dkv", "kv_budget": 170, "kv_period": 4, "max_total_tokens": 340}
    with harness.engine(tiny, **settings) as running:
        harness.greedy(running, [prompt], 1)
        together = harness.greedy(running, [prompt, prompt], 60)
        (alone,) = harness.greedy(running, [prompt], 60)
    assert alone["meta_info"]["kv_policy"]["evictions"] >= 10
    for response in together:
        assert harness.report(response) == harness.report(alone)
        assert response["output_ids"] == alone["output_ids"]
    assert alone["meta_info"]["kv_policy"]["evictions_deferred"] == 0
