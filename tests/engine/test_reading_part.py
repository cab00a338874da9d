"""Methods that keep everything and read a part: the same words as transformers under a mask, and honest counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import reading_reference as reference
from comparison import LOGIT_GAP
from transformers import AutoModelForCausalLM

from tests.policies.gate_files import random_state, write_folder

BUDGET, TOKENS, PAGE = 48, 110, 8
QUEST = f"quest[page:{PAGE};dense_layers:1]"


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Any:
    import torch

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


@pytest.fixture(scope="module")
def gates() -> dict[str, Any]:
    return random_state(range(4), 2, 4, 32)


@pytest.fixture(scope="module")
def seer(gates: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_folder(tmp_path_factory.mktemp("gates"), gates)
    return f"seerattention-r[gates:{folder};block:{PAGE}]"


@pytest.fixture(scope="module")
def running(tiny: Path, seer: str) -> Iterator[Any]:
    policies = f"{QUEST}|{seer}|full|vase-dkv"
    with harness.engine(tiny, kv_policy=policies, kv_budget=BUDGET, kv_period=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(running: Any, prompts: list[list[int]], seer: str) -> dict[str, list[dict[str, Any]]]:
    """All prompts under each method, in one batch of nothing else."""
    return {
        arm: harness.per_request(running, prompts, [{"kv_policy": arm}] * len(prompts), TOKENS)
        for arm in (QUEST, seer, "full", "vase-dkv")
    }


@pytest.mark.parametrize("method", ["quest", "seerattention-r"])
@pytest.mark.parametrize("which", range(3))
def test_it_says_what_transformers_says_under_a_mask(
    method: str,
    which: int,
    alone: dict[str, list[dict[str, Any]]],
    prompts: list[list[int]],
    oracle: Any,
    gates: dict[str, Any],
    seer: str,
) -> None:
    if method == "quest":
        arm, choose = QUEST, reference.quest(BUDGET, PAGE, dense_layers=1)
    else:
        arm, choose = seer, reference.seer(BUDGET, PAGE, gates, oracle.config.rope_parameters["rope_theta"])
    expected, response = reference.run(oracle, prompts[which], TOKENS, choose), alone[arm][which]
    pairs = zip(response["output_ids"], expected.tokens, strict=True)
    same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), TOKENS)
    report = response["meta_info"]["kv_policy"]
    if same < TOKENS:
        assert expected.margins[same] < LOGIT_GAP, f"token {same} differs at a margin of {expected.margins[same]}"
    else:
        # Every step but the last token's own is counted; of equal texts the counts are equal.
        assert report["tokens_read_mean"] == pytest.approx(sum(expected.read) / len(expected.read), rel=1e-6)
        assert report["tokens_read_peak"] == pytest.approx(max(expected.read), rel=1e-6)
    assert same >= TOKENS // 2, "too little was compared"


def test_everything_stays_resident_and_less_is_read(
    alone: dict[str, list[dict[str, Any]]], prompts: list[list[int]], seer: str
) -> None:
    for arm in (QUEST, seer):
        for response, prompt in zip(alone[arm], prompts, strict=True):
            report = response["meta_info"]["kv_policy"]
            assert (report["evictions"], report["tokens_evicted"]) == (0, 0)
            assert report["resident_end"] == report["full_end"] == len(prompt) + TOKENS - 1
            assert report["tokens_read_mean"] < report["resident_mean"]
            assert report["page_summary_bytes"] > 0
    assert "tokens_read_mean" not in alone["full"][0]["meta_info"]["kv_policy"]


def test_beside_other_methods_it_says_the_same(
    running: Any, alone: dict[str, list[dict[str, Any]]], prompts: list[list[int]], seer: str
) -> None:
    arms = [(arm, which) for which in range(3) for arm in (QUEST, "vase-dkv", seer, "full")]
    choices = [{"kv_policy": arm} for arm, _ in arms]
    responses = harness.per_request(running, [prompts[which] for _, which in arms], choices, TOKENS)
    for (arm, which), response in zip(arms, responses, strict=True):
        before = alone[arm][which]
        assert response["output_ids"] == before["output_ids"], arm
        assert harness.report(response) == harness.report(before), arm
