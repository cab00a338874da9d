"""A policy that has nothing to evict, and one that only moves slots, must not change a token."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest

from kvpolicy.policies.registry import POLICIES
from tests.policies.gate_files import random_state, write_folder
from tests.policies.references.table import Shape, statistics_file

Tokens = list[list[int]]


def every_policy(folder: Path) -> dict[str, str]:
    """Each policy's name, and how to call it for the tiny model: 4 layers, 2 KV heads of 32, 4 query heads to each."""
    statistics = statistics_file(Shape(4, 2, 4, 32), folder, rope_theta=10000.0)
    options = {
        "triattention": f"stats:{statistics}",
        "alpha": f"base:triattention[stats:{statistics}]",
        "epikv": "band_a:1;band_b:2",
        "epikv-seg": "band_a:1;band_b:2",
        "seerattention-r": f"gates:{write_folder(folder / 'gates', random_state(range(4), 2, 4, 32))}",
    }
    return {name: f"{name}[{options[name]}]" if name in options else name for name in POLICIES}


OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])


@OVERLAP
def test_with_a_budget_beyond_the_length_output_is_stock_output(
    overlap: bool, tiny: Path, prompts: Tokens, stock_tokens: Tokens, tmp_path: Path
) -> None:
    arms = every_policy(tmp_path)
    with harness.engine(
        tiny, kv_policy="|".join(arms.values()), kv_budget=4096, disable_overlap_schedule=not overlap
    ) as running:
        answers = {
            name: harness.greedy(running, prompts, 120, custom_params={"kv_policy": arm}) for name, arm in arms.items()
        }
    for policy, responses in answers.items():
        assert [response["output_ids"] for response in responses] == stock_tokens, policy
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
