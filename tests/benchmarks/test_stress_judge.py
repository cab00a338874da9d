"""What benchmarks/stress.py says of lives: their ends, their differences, and when a run fails."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import stress
from stress_alone import Alone, Alones, Judgement
from stress_judge import EndError, end_of, evicted_late, explained_by_records, first_difference, gap_at
from stress_lives import Life, Question
from stress_messages import Answer, Outcome
from stress_run import Run
from stress_server import log_counts
from stress_table import Led, tallies

QUESTION = Question(3, "generate", (5, 6, 7), 4, "random", 48, 8, 9)
LIFE = Life(17, QUESTION, "whole", False, 2, 0.0, 0.0)
RECORD = {
    **{"policy": "random", "budget": 48, "period": 8, "retractions": 0, "evictions_deferred": 0, "evictions": 0},
    **{"tokens_evicted": 0, "full_end": 6, "resident_end": 6, "decode_steps": 3},
}
ANSWER = Answer([1, 2, 3, 4], "abcd", "length", 4, RECORD)


def life(way: Any = "whole", **question: Any) -> Life:
    streams = way in ("stream", "abort", "disconnect")
    return replace(LIFE, way=way, streams=streams, question=replace(QUESTION, **question))


def outcome(*answers: Answer, status: int | None = 200, error: str | None = None) -> Outcome:
    return Outcome(list(answers), status, error)


@pytest.mark.parametrize(
    ("led", "found", "end"),
    [
        (life(), outcome(ANSWER), "finished"),
        (life(stop=("e",)), outcome(replace(ANSWER, ids=[1, 2, 3, 4], finish="stop")), "finished"),
        (life("abort"), outcome(Answer([1], "a", "abort", 1)), "aborted"),
        (life("abort"), outcome(Answer([], "", "abort", 0)), "aborted"),
        (life("disconnect"), outcome(status=None), "disconnected"),
        (life("disconnect"), outcome(Answer([1], "a")), "disconnected"),
        (life("disconnect", samples=2), outcome(Answer([1], "a"), ANSWER), "disconnected"),
        (life("flush"), outcome(), "flushed"),
        (life("flush"), outcome(status=400), "refused"),
    ],
)
def test_ends(led: Life, found: Outcome, end: str) -> None:
    assert end_of(led, found) == end


def record(**changes: Any) -> Answer:
    return replace(ANSWER, report={**RECORD, **changes})


@pytest.mark.parametrize(
    ("led", "found", "sentence"),
    [
        (life(), outcome(status=503, error="busy"), "HTTP 503: busy"),
        (life(), outcome(status=400, error="no"), "HTTP 400: no"),
        (life(), outcome(status=None, error="lost: no end within 240 s"), "lost: no end"),
        (life("flush"), outcome(status=404), "200 or 400, not 404"),
        (life(), outcome(replace(ANSWER, finish=None)), "finish reason None"),
        (life(), outcome(replace(ANSWER, finish="abort")), "finish reason 'abort'"),
        (life(), outcome(replace(ANSWER, finish="stop")), "finish reason 'stop'"),
        (life(), outcome(replace(ANSWER, ids=[1, 2, 3])), "3 tokens instead of 4"),
        (life(stop=("e",)), outcome(replace(ANSWER, ids=[1] * 5, finish="stop")), "5 tokens of at most 4"),
        (life(), outcome(ANSWER, ANSWER), "2 answers instead of 1"),
        (life(), outcome(replace(ANSWER, report=None)), "without the record"),
        (life(), outcome(record(policy="h2o")), "its record says"),
        (life(), outcome(record(period=16)), "its record says"),
        (life(), outcome(record(full_end=7)), "6 tokens have keys and values"),
        (life(), outcome(record(resident_end=5)), "does not add up"),
        (life(budget=1, period=2), outcome(record(budget=1, period=2, evictions=1)), "6 tokens resident"),
        (life(), outcome(replace(ANSWER, tokens=5)), "counts 5 tokens"),
        (life(api="completions", samples=2), outcome(ANSWER, ANSWER), "counts 4 tokens"),
        (life(api="chat"), outcome(replace(ANSWER, ids=None, tokens=3)), "counts 3 tokens"),
    ],
)
def test_wrong_ends(led: Life, found: Outcome, sentence: str) -> None:
    with pytest.raises(EndError, match=sentence):
        end_of(led, found)


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        (ANSWER, None),
        (replace(ANSWER, ids=[1, 2, 9, 4]), 2),
        (Answer([1, 2], "ab", "abort"), None),
        (Answer([1, 9], "ax", None), 1),
        (Answer([1, 2, 3, 4, 5, 6], "abcdef", None), None),  # asked for more
        (replace(ANSWER, ids=[1, 2, 3]), 3),
        (replace(ANSWER, ids=[1, 2, 3], finish="stop"), 3),
        (Answer(None, "abc", "stop"), 3),
        (Answer(None, "abcd", "length"), None),
        (Answer(None, "abx", "length"), 2),
        (Answer(None, "ab\ufffd", None), None),  # a character whose other tokens did not come
    ],
)
def test_where_an_answer_leaves_the_one_alone(answer: Answer, place: int | None) -> None:
    assert first_difference(answer, ANSWER) == place


def test_an_answer_does_not_go_on_where_the_one_alone_stopped() -> None:
    stopped = replace(ANSWER, finish="stop")
    assert first_difference(replace(ANSWER, ids=[1, 2, 3, 4, 5]), stopped) == 4
    assert first_difference(ANSWER, stopped) is None


def test_records_explain_in_either_run() -> None:
    assert explained_by_records(ANSWER, ANSWER) is None
    assert explained_by_records(Answer(), ANSWER) is None
    assert explained_by_records(record(retractions=1), ANSWER) == "retracted"
    assert explained_by_records(ANSWER, record(evictions_deferred=2)) == "deferred"


@pytest.mark.parametrize(
    ("mine", "late"),
    [([80, 96], False), ([80], True), ([], True), ([81, 97], True), ([80, 99], True), ([80, 95], False), ([79], False)],
)
def test_an_eviction_that_came_late_shows_in_the_trace(mine: list[int], late: bool) -> None:
    assert evicted_late(mine, [80, 96, 112], length=100) is late


def test_evictions_after_the_difference_are_its_consequences() -> None:
    assert not evicted_late([80], [80, 96], length=95)
    assert not evicted_late([], [], length=95)


BEST = [[(-1.0, token, text), (-1.5, 50 + token, "?")] for token, text in zip((1, 2, 3, 4), "abcd", strict=True)]


def test_the_gap_is_between_the_two_tokens() -> None:
    assert gap_at(BEST, ANSWER, replace(ANSWER, ids=[1, 2, 53, 4]), 2).value == 0.5
    assert gap_at(BEST, ANSWER, replace(ANSWER, ids=[1, 2, 99, 4]), 2).value == float("inf")
    assert gap_at([], ANSWER, replace(ANSWER, ids=[1, 2, 53, 4]), 2).value == float("inf")
    assert gap_at(BEST, ANSWER, replace(ANSWER, ids=[1, 2]), 2).value == float("inf")
    text = gap_at(BEST, ANSWER, Answer(None, "abx"), 2)
    assert (text.place, text.value, text.is_tie) == (2, 0.5, False)
    close = [[(-1.0, 1, "a"), (-1.0005, 9, "b")]]
    assert gap_at(close, ANSWER, replace(ANSWER, ids=[9]), 0).is_tie


class FakeAlones(Alones):
    """Answers from memory instead of a server."""

    def __init__(self, best: Any, evictions: dict[str, list[int]], disturbed: bool = True) -> None:
        self.best, self.evictions, self._disturbed = best, evictions, disturbed
        self.found = {3: Alone([5, 6, 7], [replace(ANSWER, rid="alone")])}

    def _best(self, *_: Any) -> Any:
        return self.best

    def _evictions(self, answer: Answer) -> list[int]:
        return self.evictions.get(answer.rid or "", [])


@pytest.mark.parametrize(
    ("answer", "best", "changes", "comparison"),
    [
        (ANSWER, BEST, {}, "equal"),
        (Answer([], ""), BEST, {}, "nothing came"),
        (replace(record(retractions=1), ids=[1, 9, 3, 4]), BEST, {}, "retracted"),
        (replace(record(evictions_deferred=1), ids=[1, 9, 3, 4]), BEST, {}, "deferred"),
        (replace(ANSWER, ids=[1, 9, 3, 4]), BEST, {}, "unexplained"),
        (replace(ANSWER, ids=[1, 52, 3, 4]), [BEST[0], [(-1, 2, "b"), (-1.0001, 52, "?")]], {}, "near-tie"),
        (replace(ANSWER, ids=[1, 52, 3, 4]), [BEST[0], [(-1, 2, "b"), (-1.01, 52, "?")]], {}, "unexplained"),
        (replace(ANSWER, ids=[1, 52, 3, 4]), BEST, {"temperature": 0.8}, "unexplained"),
        (Answer([1, 9], "ax", rid="late"), BEST, {}, "late eviction"),
        (Answer([1, 9], "ax", rid="same"), BEST, {}, "unexplained"),
        (replace(ANSWER, ids=[1, 9, 3, 4], rid="late"), BEST, {}, "unexplained"),  # its record would say so
    ],
)
def test_judgements(answer: Answer, best: Any, changes: dict[str, Any], comparison: str) -> None:
    alones = FakeAlones(best, {"alone": [4], "same": [4], "late": [5]})
    assert alones.judge(life(**changes), outcome(answer)).comparison == comparison


def test_no_eviction_may_come_late_where_nothing_was_retracted_or_deferred() -> None:
    alones = FakeAlones(BEST, {"alone": [4], "late": [5]}, disturbed=False)
    assert alones.judge(life(), outcome(Answer([1, 9], "ax", rid="late"))).comparison == "unexplained"


def test_a_question_that_was_not_asked_alone_is_not_judged() -> None:
    alones = FakeAlones(BEST, {})
    assert alones.judge(life(number=4), outcome(ANSWER)).comparison == "not judged"


def test_of_several_samples_the_gravest_counts() -> None:
    alones = FakeAlones(BEST, {})
    alones.found[3].answers.append(ANSWER)
    found = outcome(replace(ANSWER, ids=[1, 9, 3, 4]), ANSWER)
    assert alones.judge(life(samples=2), found).comparison == "unexplained"


def run_with(*all_led: Led, faults: tuple[str, ...] = ()) -> Run:
    run = Run(Path("tiny"), Path("out"), ("plain",), 2048, 24, 60)
    run.led, run.faults = list(all_led), list(faults)
    return run


def led(comparison: Any = "equal", end: str = "finished", fault: str = "") -> Led:
    return Led(LIFE, "plain", outcome(ANSWER), end, fault, Judgement(comparison, ["sample 0 differs at 2"]))


def test_a_run_fails_by_what_is_wrong_with_it_and_says_how_to_replay_it() -> None:
    args = argparse.Namespace(seed=5, quick=False)
    explained = [led(each) for each in ("equal", "near-tie", "deferred", "late eviction", "retracted", "nothing came")]
    assert stress.verdict(run_with(*explained), args, 6) == []
    (unexplained,) = stress.verdict(run_with(led("unexplained")), args, 1)
    assert "sample 0 differs at 2; python benchmarks/stress.py --seed 5 --only 17" in unexplained
    (failed,) = stress.verdict(run_with(led(end="failed", fault="HTTP 500")), args, 1)
    assert "life 17 (generate, whole): HTTP 500" in failed
    assert stress.verdict(run_with(led(), faults=("the server died",)), args, 1) == ["the server died"]


def test_too_few_lives_fail_a_run_but_not_a_quick_one() -> None:
    few = run_with(led(), led("not judged"))
    assert len(stress.verdict(few, argparse.Namespace(seed=0, quick=False), 3)) == 2
    assert stress.verdict(few, argparse.Namespace(seed=0, quick=True), 3) == []


def test_the_log_is_counted() -> None:
    text = (
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 9\n"
        "Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 5\n"
        "Testing retraction. #retracted_reqs: 0, #new_tokens_gained: 0\n"
    )
    expected = {"retracted, pool full": 2, "retracted, forced": 1, "deferral warned of": 0, "fatal lines": 0}
    assert log_counts(text) == expected
    assert log_counts("kvpolicy: the KV pool has no free slots to compact a request into;")["deferral warned of"] == 1
    assert log_counts("Full Pool Mem Leak Detected! [full] total=9")["fatal lines"] == 1
    assert log_counts("KV page use-after-free: 3 owner page refs")["fatal lines"] == 1


def test_lives_are_counted_by_kind_and_by_trait() -> None:
    kinds, traits = tallies([led(), led("near-tie")])
    assert kinds["generate, whole"].shown()["answers"] == {"equal": 1, "near-tie": 1}
    assert set(traits) == {"random", "plain server"}
    assert traits["random"].shown()["lives"] == 2
