"""Kernels that evict many requests at once, in a whole engine: the same evictions and words as one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest

ARMS = ("vase-dkv", "vase-attnv", "snapkv", "curdkv", "random", "evict-large-range")
TOKENS = 90


def answers(tiny: Path, prompts: list[list[int]], kernels: str) -> dict[str, list[dict[str, Any]]]:
    """Each arm's requests as one batch, in which several are due at once; Triton is interpreted."""
    environment = {"KVPOLICY_KERNELS": kernels, **({"KVPOLICY_TEST_INTERPRET": "1"} if kernels == "triton" else {})}
    settings = {"kv_policy": "|".join(ARMS), "kv_budget": 64, "kv_period": 16}
    with harness.engine(tiny, environment, **settings) as running:
        return {
            arm: harness.per_request(
                running, [*prompts, prompts[1]], [{"kv_policy": arm, "kv_seed": i} for i in range(4)], TOKENS
            )
            for arm in ARMS
        }


@pytest.fixture(scope="module")
def by_kernels(tiny: Path, prompts: list[list[int]]) -> dict[str, list[dict[str, Any]]]:
    return answers(tiny, prompts, "triton")


@pytest.fixture(scope="module")
def one_by_one(tiny: Path, prompts: list[list[int]]) -> dict[str, list[dict[str, Any]]]:
    return answers(tiny, prompts, "torch")


@pytest.mark.parametrize("arm", ARMS)
def test_kernels_evict_and_answer_as_one_request_after_the_other(
    arm: str, by_kernels: dict[str, list[dict[str, Any]]], one_by_one: dict[str, list[dict[str, Any]]]
) -> None:
    for ours, expected in zip(by_kernels[arm], one_by_one[arm], strict=True):
        assert ours["output_ids"] == expected["output_ids"]
        assert harness.report(ours) == harness.report(expected)
        assert expected["meta_info"]["kv_policy"]["evictions"] >= 2
