"""Compaction in a pool that has no room for it: room is made from the request's own prompt."""

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
