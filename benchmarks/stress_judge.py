"""What a life of stress.py came to: did it end as its kind should, and is its answer that of the request alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stress_lives import Life
from stress_messages import Answer, Outcome

LOGPROB_GAP = 1e-3  # below it two tokens are as good as equal: fp32 sums differ in their last bits with the batch size

Comparison = Literal[
    "equal", "nothing came", "retracted", "deferred", "late eviction", "near-tie", "unexplained", "not judged"
]


class EndError(Exception):
    """A life did not end as its kind should; the message says how."""


def end_of(life: Life, outcome: Outcome) -> str:
    """How a life ended: finished, aborted, disconnected, flushed or refused.

    Raises
    ------
    EndError
        If that is no end for a life of its kind.
    """
    if outcome.status is not None and outcome.status >= 500:
        raise EndError(f"HTTP {outcome.status}: {outcome.error}")
    if outcome.error is not None:
        raise EndError(outcome.error if outcome.status in (None, 200) else f"HTTP {outcome.status}: {outcome.error}")
    if life.way == "flush":
        if outcome.status not in (200, 400):
            raise EndError(f"a flush is answered with 200 or 400, not {outcome.status}")
        return "flushed" if outcome.status == 200 else "refused"
    finishes = {answer.finish for answer in outcome.answers}
    if life.way == "disconnect" and (None in finishes or not finishes):
        return "disconnected"
    if life.way == "abort" and finishes == {"abort"}:
        return "aborted"
    if len(outcome.answers) != life.question.samples:
        raise EndError(f"{len(outcome.answers)} answers instead of {life.question.samples}")
    for answer in outcome.answers:
        _check_finished(life, answer)
    _check_count(life, outcome.answers)
    return "finished"


def _check_finished(life: Life, answer: Answer) -> None:
    """Hold an answer that ran to its end against what was asked for, and its record against the answer."""
    if answer.finish != "length" and not (answer.finish == "stop" and life.question.may_stop):
        raise EndError(f"finish reason {answer.finish!r}")
    if answer.ids is not None:
        if answer.finish == "length" and len(answer.ids) != life.tokens:
            raise EndError(f"{len(answer.ids)} tokens instead of {life.tokens}")
        if not 0 < len(answer.ids) <= life.tokens:
            raise EndError(f"{len(answer.ids)} tokens of at most {life.tokens}")
    if (report := answer.report) is None:
        raise EndError("finished without the record of its cache (kv_policy)")
    question = life.question
    asked = {"policy": question.policy, "budget": question.budget, "period": question.period}
    if any(report[name] != value for name, value in asked.items()):
        raise EndError(f"asked for {asked}, and its record says { ({name: report[name] for name in asked}) }")
    if answer.ids is not None and isinstance(question.prompt, tuple):
        full = len(question.prompt) + len(answer.ids) - 1
        if report["full_end"] != full:
            raise EndError(f"{full} tokens have keys and values, and its record says {report['full_end']}")
    if report["retractions"] == 0:
        if report["resident_end"] != report["full_end"] - report["tokens_evicted"]:
            raise EndError(f"its record does not add up: {report}")
        compacted = report["evictions"] and not report["evictions_deferred"]
        if compacted and report["resident_end"] > question.budget + question.period:
            raise EndError(f"{report['resident_end']} tokens resident at the end")


def _check_count(life: Life, answers: Sequence[Answer]) -> None:
    """The server's own count of tokens, which the OpenAI APIs give for all samples together."""
    if life.question.api == "generate":
        wrong = [answer for answer in answers if answer.ids is None or answer.tokens != len(answer.ids)]
    elif all(answer.ids is not None for answer in answers):
        wrong = [] if answers[0].tokens == sum(len(answer.ids or ()) for answer in answers) else list(answers)
    else:
        most, exact = life.tokens * len(answers), all(answer.finish == "length" for answer in answers)
        counted = answers[0].tokens or 0
        wrong = [] if counted == most or (0 < counted < most and not exact) else list(answers)
    if wrong:
        raise EndError(f"the server counts {wrong[0].tokens} tokens, and there are others")


def first_difference(answer: Answer, alone: Answer) -> int | None:
    """Where an answer leaves the one that its request got alone; None if it does not.

    A token, or a character where only the text is known. One that was cut off is compared as far as it goes, and one
    that asked for more tokens as far as the other goes.
    """
    ended = answer.finish in ("length", "stop")
    mine: Sequence[Any] = answer.text if answer.ids is None else answer.ids
    other: Sequence[Any] = alone.text if answer.ids is None else alone.ids or []
    if isinstance(mine, str) and not ended:
        mine = mine.rstrip("\ufffd")  # a character whose other tokens did not come
    for place, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            return place
    if (len(mine) < len(other) and ended) or (len(mine) > len(other) and alone.finish != "length"):
        return min(len(mine), len(other))
    return None


def explained_by_records(answer: Answer, alone: Answer) -> Comparison | None:
    """Why the two may differ, as far as their records tell."""
    records = [record for record in (answer.report, alone.report) if record is not None]
    if any(record["retractions"] for record in records):
        return "retracted"
    if any(record["evictions_deferred"] for record in records):
        return "deferred"
    return None


def evicted_late(mine: Sequence[int], alone: Sequence[int], length: int) -> bool:
    """Whether, of two runs, the first to differ in an eviction was this one, by evicting later or not at all.

    So a request that was cut off, and has no record, shows that it was retracted, or an eviction of it deferred.

    mine, alone : tokens computed before each eviction of a run.
    length : tokens computed before the first that differs; later evictions are the consequences.
    """
    for number, expected in enumerate(alone):
        found = mine[number] if number < len(mine) else None
        if expected > length:
            return False
        if found != expected:
            return found is None or found > expected
    return False


@dataclass(frozen=True)
class Gap:
    """How far apart two tokens were at the step where a life left the answer alone: in log-probability."""

    place: int
    value: float

    @property
    def is_tie(self) -> bool:
        return self.value < LOGPROB_GAP


def gap_at(best: Sequence[Sequence[tuple[float, int, str]]], alone: Answer, answer: Answer, place: int) -> Gap:
    """The gap between the token of the request alone and the one that the life had instead.

    best : of each step of the request alone, its two best tokens: (log-probability, id, text).
    place : what :func:`first_difference` found. Where only the text is known, the life's token is taken for the second
        best.
    """
    if answer.ids is None:
        texts = [step[0][2] for step in best]
        step = next((i for i in range(len(texts)) if len("".join(texts[: i + 1])) > place), len(texts))
        return Gap(step, best[step][0][0] - best[step][1][0] if step < len(best) else float("inf"))
    logprobs = {token: logprob for logprob, token, _ in best[place]} if place < len(best) else {}
    mine, other = answer.ids[place : place + 1], (alone.ids or [])[place : place + 1]
    if not mine or not other or not {*mine, *other} <= logprobs.keys():
        return Gap(place, float("inf"))
    return Gap(place, abs(logprobs[mine[0]] - logprobs[other[0]]))
