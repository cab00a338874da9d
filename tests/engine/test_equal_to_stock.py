"""A policy that has nothing to evict, and one that only moves slots, must not change a token."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest

from kvpolicy.policies.registry import POLICIES

Tokens = list[list[int]]


OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])


@OVERLAP
@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_budget_beyond_the_length_output_is_stock_output(
    policy: str, overlap: bool, tiny: Path, prompts: Tokens, stock_tokens: Tokens
) -> None:
    with harness.engine(tiny, kv_policy=policy, kv_budget=4096, disable_overlap_schedule=not overlap) as running:
        responses = harness.greedy(running, prompts, 120)
    assert [response["output_ids"] for response in responses] == stock_tokens
    for prompt, response in zip(prompts, responses, strict=True):
        report = response["meta_info"]["kv_policy"]
        assert report["policy"] == policy
        assert report["evictions"] == report["tokens_evicted"] == 0
        assert report["resident_end"] == report["full_end"] == len(prompt) + 119
        assert report["resident_mean"] == report["full_mean"] == len(prompt) + 60


@OVERLAP
def test_permuting_all_slots_per_head_and_layer_changes_nothing(
    overlap: bool, tiny: Path, prompts: Tokens, stock_tokens: Tokens
) -> None:
    policy = "kvpolicy_test_support:Permute"
    with harness.engine(tiny, kv_policy=policy, kv_period=16, disable_overlap_schedule=not overlap) as running:
        responses = harness.greedy(running, prompts, 120)
    assert [response["output_ids"] for response in responses] == stock_tokens
    for response in responses:
        report = response["meta_info"]["kv_policy"]
        assert report["evictions"] >= 7
        assert report["tokens_evicted"] == 0
