"""One engine, many policies: what a request chooses, and that nothing else in the engine changes its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arms
import harness
import pytest
import torch
from comparison import compare
from transformers import AutoModelForCausalLM

CHUNK = 32
TOKENS = 110
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


@dataclass(frozen=True)
class Request:
    """A prompt, the arm and seed that it is sent with, and the window of queries that the arm reads."""

    prompt: tuple[int, ...]
    arm: arms.Arm
    seed: int
    window: int

    @property
    def choice(self) -> dict[str, Any]:
        return {"kv_policy": self.arm.name, "kv_seed": self.seed}


def requests() -> list[Request]:
    """Eight requests: three share a prefix, two are the same but for the seed; most prompts take several chunks."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 40000, (count,), generator=generator).tolist())

    prefix, twin = tokens(50), tokens(70)
    dkv, _, snapkv, _ = arms.methods(32)
    return [
        Request(prefix + tokens(3), arms.Arm("vase-attnv", arms.vase_attnv(1)), 1, 16),
        Request(prefix + tokens(40), arms.Arm("vase-attnv", arms.vase_attnv(2)), 2, 16),
        Request(prefix + tokens(9), dkv, arms.SEED, 0),
        Request(twin, arms.Arm("vase-attnv", arms.vase_attnv(3)), 3, 16),
        Request(twin, arms.Arm("vase-attnv", arms.vase_attnv(4)), 4, 16),
        Request(tokens(9), snapkv, 5, 16),
        Request(tokens(131), arms.Arm("random", arms.scores.random_score(arms.uniform(seed=6)), stay=True), 6, 0),
        Request(tokens(64), arms.Arm("full", None), 7, 0),
    ]


REQUESTS = requests()
NAMES = ("vase-dkv", "vase-attnv", "snapkv", "random", "full")


@dataclass(frozen=True)
class Shared:
    engine: Any
    trace: Path


@pytest.fixture(scope="module")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    trace = tmp_path_factory.mktemp("trace")
    settings = {"kv_policy": " | ".join(NAMES), "kv_budget": arms.BUDGET, "kv_period": arms.PERIOD, "kv_seed": 99}
    with harness.engine(tiny, **settings, kv_trace=str(trace), chunked_prefill_size=CHUNK) as running:
        yield Shared(running, trace)


def answers(shared: Shared, order: list[int], **parameters: Any) -> dict[int, dict[str, Any]]:
    """Send the requests numbered in `order` as one batch."""
    found = harness.per_request(
        shared.engine,
        [list(REQUESTS[i].prompt) for i in order],
        [REQUESTS[i].choice for i in order],
        TOKENS,
        **parameters,
    )
    return dict(zip(order, found, strict=True))


@pytest.fixture(scope="module")
def runs(shared: Shared) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {"alone": {}}
    everything = list(range(len(REQUESTS)))
    for i in everything:
        harness.flush(shared.engine)
        found["alone"] |= answers(shared, [i])
    harness.flush(shared.engine)
    found["together"] = answers(shared, everything)
    found["again"] = answers(shared, everything)
    found["shuffled"] = answers(shared, [5, 2, 7, 0, 4, 6, 1, 3])
    return found


def test_alone_together_again_and_shuffled_a_request_evicts_and_answers_alike(
    shared: Shared, tiny: Path, runs: dict[str, dict[int, dict[str, Any]]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    near_ties = compared = 0
    for i, request in enumerate(REQUESTS):
        expected = request.arm.expected(model, list(request.prompt), TOKENS)
        for name, run in runs.items():
            if request.arm.name == "full":
                assert run[i]["output_ids"] == expected.tokens
                continue
            agreement = compare(run[i], shared.trace, expected)
            print(i, request.arm.name, name, agreement)
            near_ties += agreement.near_ties
            compared += agreement.evictions
    assert compared >= 4 * 25
    assert near_ties <= 4


def test_a_warm_prompt_is_recomputed_as_far_as_its_policy_reads_queries(
    runs: dict[str, dict[int, dict[str, Any]]],
) -> None:
    for name in ("again", "shuffled"):
        for i, request in enumerate(REQUESTS):
            cached = max(0, len(request.prompt) - max(1, request.window))
            assert runs[name][i]["meta_info"]["cached_tokens"] == cached, (name, i)
    assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in runs["alone"].values())


def test_responses_report_what_their_request_chose(runs: dict[str, dict[int, dict[str, Any]]]) -> None:
    for i, request in enumerate(REQUESTS):
        report = runs["together"][i]["meta_info"]["kv_policy"]
        assert (report["policy"], report["seed"], report["sampling_seed"] is not None) == (
            request.arm.name,
            request.seed,
            True,
        )
        assert (report["evictions"] > 0) == (request.arm.name != "full")
        assert report["resident_peak"] <= max(len(request.prompt) + 2, 81) or request.arm.name == "full"
        assert report["query_window_bytes"] == 4 * 16 * 8 * 32 * 4  # layers, window, query heads, dimensions, fp32


def test_a_smaller_budget_and_period_hold_for_the_one_request(shared: Shared) -> None:
    choices = [{}, {"kv_budget": 40, "kv_period": 8}, {"kv_policy": "vase-attnv", "kv_budget": 40, "kv_period": 8}]
    found = harness.per_request(shared.engine, [list(REQUESTS[5].prompt)] * 3, choices, TOKENS)
    reports = [response["meta_info"]["kv_policy"] for response in found]
    assert [report["resident_peak"] for report in reports] == [80, 48, 48]
    assert [report["policy"] for report in reports] == ["vase-dkv", "vase-dkv", "vase-attnv"]
    assert reports[0]["seed"] == 99


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"kv_policy": "curdkv"}, "kv_policy 'curdkv' of a request was not named at launch"),
        ({"kv_budget": 65}, "kv_budget=65 of a request exceeds the kv_budget=64 of the launch"),
        ({"kv_budget": 20}, "kv_budget=20 leaves nothing to choose"),
        ({"kv_period": 0}, "kv_period must be at least 1"),
        ({"kv_sed": 1}, "did you mean kv_seed?"),
        ({"kv_seed": "1"}, "kv_seed must be a whole number, got '1'"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_request_that_cannot_be_served_is_refused_and_the_engine_goes_on(
    shared: Shared, choice: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        harness.per_request(shared.engine, [list(REQUESTS[5].prompt)], [choice], 4)
    assert len(harness.per_request(shared.engine, [list(REQUESTS[5].prompt)], [{}], 4)[0]["output_ids"]) == 4


def test_a_seed_makes_sampled_answers_repeat_in_any_batch_and_differ_from_other_seeds(shared: Shared) -> None:
    harness.flush(shared.engine)
    alone = {i: answers(shared, [i], **SAMPLED)[i]["output_ids"] for i in (1, 3, 4, 5)}
    together = answers(shared, [6, 4, 3, 7, 1, 0, 5], **SAMPLED)
    assert {i: together[i]["output_ids"] for i in alone} == alone
    assert alone[3] != alone[4], "two seeds, one answer"
    greedy = answers(shared, [3])[3]["output_ids"]
    assert alone[3] != greedy


def test_sglangs_own_seed_works_where_sglang_would_drop_it(shared: Shared) -> None:
    prompt = list(REQUESTS[5].prompt)

    def sampled(**parameters: Any) -> Any:
        found = harness.greedy(shared.engine, prompt, 40, **{**SAMPLED, **parameters})
        return [answer["output_ids"] for answer in found] if isinstance(found, list) else found["output_ids"]

    first = sampled(sampling_seed=5)
    assert sampled(sampling_seed=5) == first
    assert sampled(sampling_seed=6) != first
    assert sampled(custom_params={"kv_seed": 5}) == first  # without sampling_seed, kv_seed keys the tokens too
    assert sampled(sampling_seed=5, min_p=0.05) == sampled(sampling_seed=5, min_p=0.05)
    assert sampled() != sampled()  # no seed: SGLang's own stream
    several = sampled(sampling_seed=5, n=3)
    assert several[0] == first
    assert len({tuple(answer) for answer in several}) == 3
    assert sampled(sampling_seed=5, n=3) == several
