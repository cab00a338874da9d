"""The lives of benchmarks/stress.py, what they say to the APIs, and how answers are put together."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from stress_lives import (
    ARMS,
    BUDGET,
    CUT_TOKENS,
    PERIOD,
    QUESTIONS,
    Question,
    life_of,
    prefixes,
    question_of,
)
from stress_messages import Stream, read_whole, request_alone, request_of, request_of_life
from stress_run import RETRACTING_OF, batched, deal

from kvpolicy.sglang_plugin.arms import parse_arms

LIVES = [life_of(0, number) for number in range(2000)]
QUESTION = Question(number=3, api="generate", prompt=(5, 6, 7), tokens=4, policy="random", budget=48, period=8, seed=9)


def question(**changes: Any) -> Question:
    return Question(**{**QUESTION.__dict__, **changes})


def test_a_life_is_a_function_of_seed_and_number_alone() -> None:
    assert [life_of(0, number) for number in (1999, 7, 0)] == [LIVES[1999], LIVES[7], LIVES[0]]
    assert [life_of(1, number) for number in range(50)] != LIVES[:50]


def test_all_that_is_promised_occurs() -> None:
    """A seed whose lives lack a kind would test less than the page says."""
    kinds = Counter(life.kind for life in LIVES)
    apis = ("generate", "completions", "chat")
    cuts = {f"{api}, {how}, {way}" for api in apis for how in ("whole", "streamed") for way in ("abort", "disconnect")}
    assert set(kinds) == {f"{api}, {how}" for api in apis for how in ("whole", "streamed")} | cuts | {"flush"}
    assert min(kinds.values()) >= 5
    traits = Counter(trait for life in LIVES for trait in life.traits)
    wanted = {*ARMS, "1 token", "n > 1", "stop strings", "sampled", "prompt over 150"}
    assert set(traits) == wanted
    assert min(traits.values()) >= 30
    assert len({life.question.number for life in LIVES}) > 0.95 * QUESTIONS


def test_prompts_share_prefixes_and_differ_in_length() -> None:
    prompts = [q.prompt for q in (question_of(0, k) for k in range(QUESTIONS)) if isinstance(q.prompt, tuple)]
    for prefix in prefixes(0):
        assert sum(prompt[: len(prefix)] == prefix for prompt in prompts) >= 10
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) < 10
    assert max(lengths) > 400


def test_every_policy_can_work_with_every_budget_and_period_that_is_asked_for() -> None:
    arms = parse_arms("|".join(ARMS), "")
    for each in (question_of(0, number) for number in range(QUESTIONS)):
        arms[each.policy].check(each.budget, each.period)
        assert (each.budget <= BUDGET, each.period <= PERIOD) == (True, True)


def test_no_id_is_the_beginning_of_another() -> None:
    """SGLang aborts every request whose id begins with the given one."""
    ids = sorted([life.rid for life in LIVES] + [life_of(0, 10**6).rid])
    assert not any(b.startswith(a) for a, b in itertools.pairwise(ids))


def test_a_life_that_is_cut_off_asks_for_more_than_it_waits_for() -> None:
    cut = [life for life in LIVES if life.is_cut]
    assert all(life.tokens >= CUT_TOKENS > life.cut_tokens for life in cut)
    assert all(life.tokens == life.question.tokens for life in LIVES if not life.is_cut)
    assert not any(life.way == "abort" and life.question.samples > 1 for life in LIVES)


def test_requests_say_the_same_to_each_api() -> None:
    choice = {"kv_policy": "random", "kv_budget": 48, "kv_period": 8, "kv_seed": 9}
    several = {"stop": ("e",), "samples": 2}
    path, body = request_of(question(**several), tokens=4, stream=True, rid="x")
    assert (path, body["rid"], body["stream"], body["input_ids"]) == ("/generate", "x", True, [5, 6, 7])
    sampling = {"temperature": 0.0, "ignore_eos": True, "stop": ["e"], "n": 2, "custom_params": choice}
    assert body["sampling_params"] == {**sampling, "max_new_tokens": 4}
    path, body = request_of(question(**several, api="completions"), tokens=4, stream=True, rid="x")
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [5, 6, 7], 4)
    assert sampling.items() <= body.items()
    path, body = request_of(question(api="chat", prompt="Count."), tokens=4, stream=False, rid="x")
    assert (path, body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "Count."}])
    assert body["return_token_ids"]  # with a stream SGLang refuses it there
    assert (
        "return_token_ids" not in request_of(question(api="chat", prompt="Count."), tokens=4, stream=True, rid="x")[1]
    )


def test_every_request_is_json_and_alone_it_is_the_same_for_the_native_api() -> None:
    for life in LIVES[:200]:
        json.dumps(request_of_life(life))
    path, body = request_alone(question(api="chat", prompt="Count."), [1, 2], "y", probe=True)
    assert (path, body["input_ids"], body["top_logprobs_num"], body["stream"]) == ("/generate", [1, 2], 2, False)
    assert request_alone(question(), [5, 6, 7], "y")[1] == request_of(question(), tokens=4, stream=False, rid="y")[1]


def output(ids: list[int], text: str, finish: str | None, count: int, **more: Any) -> dict[str, Any]:
    reason = None if finish is None else {"type": finish}
    meta = {"id": "r", "completion_tokens": count, "finish_reason": reason, **more.pop("meta", {})}
    return {"output_ids": ids, "text": text, "meta_info": meta, **more}


def test_a_native_stream_of_two_samples_is_put_together() -> None:
    stream = Stream(question(samples=2))
    stream.event(output([1], "a", None, 1, index=1))
    stream.event(output([2], "b", None, 1, index=0))
    stream.event(output([3, 4], "cd", "length", 3, index=1, meta={"kv_policy": {"evictions": 2}}))
    first, second = stream.outcome.answers
    assert (first.ids, first.text, first.finish, first.report, first.tokens) == ([2], "b", None, None, 1)
    assert (second.ids, second.text, second.finish, second.tokens) == ([1, 3, 4], "acd", "length", 3)
    assert (second.report, second.rid, stream.received) == ({"evictions": 2}, "r", 3)


def test_what_comes_with_an_abort_is_left_out() -> None:
    stream = Stream(question())
    stream.event(output([1, 2], "ab", None, 2))
    stream.event(output([2], "ab", "abort", 2))
    assert (stream.outcome.answers[0].ids, stream.outcome.answers[0].finish) == ([1, 2], "abort")


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_stream_of_an_openai_api_is_put_together(api: Any) -> None:
    def choice(text: str, ids: list[int], finish: str | None, **more: Any) -> dict[str, Any]:
        said = {"delta": {"content": text}} if api == "chat" else {"text": text, "token_ids": ids}
        return {"id": "r", "choices": [{"index": 0, "finish_reason": finish, **said, **more}]}

    stream = Stream(question(api=api))
    stream.event(choice("a", [1], None))
    stream.event(choice("b", [2], "stop", kv_policy={"evictions": 0}))
    stream.event({"id": "r", "choices": [], "usage": {"completion_tokens": 7}})
    (answer,) = stream.outcome.answers
    assert (answer.text, answer.finish, answer.tokens, answer.report) == ("ab", "stop", 7, {"evictions": 0})
    assert answer.ids == (None if api == "chat" else [1, 2])


def test_an_error_in_a_stream_is_kept() -> None:
    stream = Stream(question())
    stream.event({"error": {"message": "no", "code": 500}})
    assert "'no'" in (stream.outcome.error or "")


def test_whole_responses_are_read() -> None:
    native = read_whole(question(samples=2), [output([1], "a", "length", 1), output([2], "b", "stop", 1)])
    assert [(a.ids, a.finish, a.report) for a in native.answers] == [([1], "length", None), ([2], "stop", None)]
    choices = [
        {"index": 1, "text": "b", "token_ids": [2], "finish_reason": "stop", "kv_policy": {}},
        {"index": 0, "text": "a", "token_ids": [1], "finish_reason": "length", "kv_policy": {}},
    ]
    usage = {"completion_tokens": 2}
    found = read_whole(question(api="completions", samples=2), {"id": "r", "choices": choices, "usage": usage})
    assert [(a.ids, a.text, a.tokens, a.report) for a in found.answers] == [([1], "a", 2, {}), ([2], "b", 2, {})]
    message = {"message": {"content": "a"}, "response_token_ids": [1], "finish_reason": "length", "index": 0}
    (chat,) = read_whole(question(api="chat"), {"id": "r", "choices": [message], "usage": usage}).answers
    assert (chat.ids, chat.text, chat.report, chat.rid) == ([1], "a", None, "r")


def test_each_life_goes_to_one_server_and_waves_keep_all() -> None:
    dealt = dict(deal(LIVES, ("retracting", "plain")))
    assert len(dealt["retracting"]) == len(LIVES) / RETRACTING_OF
    assert sorted((*dealt["retracting"], *dealt["plain"]), key=lambda life: life.number) == LIVES
    assert dict(deal(LIVES, ("retracting",))) == {"retracting": LIVES}
    assert list(dict(deal([LIVES[3]], ("retracting", "plain")))) == ["retracting", "plain"]
    assert list(dict(deal([LIVES[4]], ("retracting", "plain")))) == ["plain"]
    assert [len(wave) for wave in batched(LIVES[:7], 3)] == [3, 3, 1]
