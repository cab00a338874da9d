"""Kept tokens of every layer and head at every eviction, and the output, against plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import harness
import pytest
import reference
import torch
from comparison import Agreement, compare
from transformers import AutoModelForCausalLM

from kvpolicy.policies.base import Noise
from kvpolicy.policies.curdkv import CurDKV
from kvpolicy.policies.vase_dkv import VaseDKV

BUDGET, PERIOD, SINKS, SEED = 64, 16, 4, 7


def vase_dkv(head_dim: int) -> reference.Score:
    def projection(eviction: int, layer: int) -> torch.Tensor:
        return VaseDKV().projection(head_dim, Noise(SEED, eviction, (layer,)))[0]

    return reference.vase_dkv_score(projection, recent=PERIOD)


def curdkv(head_dim: int) -> reference.Score:
    def projection(layer: int) -> torch.Tensor:
        return CurDKV().projection(head_dim, Noise(SEED, 0, (layer,)))[0]

    return reference.curdkv_score(projection, recent=PERIOD)


def run_both(
    model: Path, prompts: list[list[int]], tokens: int, policy: str, score: reference.Score, trace: Path
) -> list[Agreement]:
    settings = {"kv_policy": policy, "kv_budget": BUDGET, "kv_period": PERIOD, "kv_seed": SEED}
    with harness.engine(model, **settings, kv_trace=str(trace)) as running:
        responses = harness.greedy(running, prompts, tokens)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    agreements = []
    for prompt, response in zip(prompts, responses, strict=True):
        expected = reference.run(
            oracle,
            prompt,
            max_new_tokens=tokens,
            budget=BUDGET,
            period=PERIOD,
            recent=PERIOD,
            sinks=SINKS,
            score=score,
            first_eligible_step=1,
        )
        assert len(set(expected.tokens)) > tokens // 8, "the model repeats itself: the comparison would prove little"
        agreements.append(compare(response, trace, expected))
    return agreements


@pytest.mark.parametrize(("policy", "score"), [("vase-dkv", vase_dkv), ("curdkv", curdkv)], ids=["vase-dkv", "curdkv"])
def test_a_tiny_qwen3_keeps_the_same_tokens_and_says_the_same(
    policy: str, score: Callable[[int], reference.Score], tiny: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    agreements = run_both(tiny, prompts, 280, policy, score(32), tmp_path)
    print(agreements)
    assert max(agreement.tokens for agreement in agreements) >= 256
    assert sum(agreement.near_ties for agreement in agreements) <= 1
    assert sum(agreement.evictions for agreement in agreements) >= 30


def test_smollm2_keeps_the_same_tokens_and_says_the_same(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "A farmer has 17 cows and buys 5 more each year. How many cows does he have after 6 years? Explain."
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
    (agreement,) = run_both(smollm2, [prompt], 260, "vase-dkv", vase_dkv(64), tmp_path)
    print(agreement)
    assert agreement.tokens >= 256
    assert agreement.evictions >= 10
