"""Ask the questions of stress.py one at a time, in an empty cache, and hold the lives' answers against these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from stress_judge import Comparison, evicted_late, explained_by_records, first_difference, gap_at
from stress_lives import Life, Question
from stress_messages import Answer, Outcome, read_whole, request_alone, request_of
from stress_server import Server

from kvpolicy.reports.trace_file import load_trace


@dataclass(frozen=True)
class Alone:
    """A question's answers when nothing else ran, and its prompt in tokens."""

    prompt_ids: list[int]
    answers: list[Answer]


@dataclass
class Judgement:
    """How one life's answers compare with those of its request alone; of several samples the gravest counts."""

    comparison: Comparison
    details: list[str] = field(default_factory=list)


# From the harmless to the grave.
GRAVITY: tuple[Comparison, ...] = (
    *("nothing came", "equal", "not judged", "near-tie", "deferred", "late eviction", "retracted", "unexplained"),
)


class Alones:
    """The answers to questions asked alone, on one server; each is asked once.

    traces : folders in which the servers, this one and earlier ones, left traces of lives.
    disturbed : whether their logs tell of retractions or deferred evictions; if not, no eviction may have come late.
    """

    def __init__(self, running: Server, traces: Iterable[Path], disturbed: bool) -> None:
        self._traces, self._disturbed = [*traces], disturbed
        self._http = httpx.Client(base_url=running.url, timeout=300)
        self.found: dict[int, Alone] = {}
        self.probes = 0

    def ask(self, questions: Iterable[Question], go_on: Callable[[], bool], done: Callable[[], None]) -> None:
        """Ask questions, one after the other, while `go_on` says so."""
        for question in questions:
            if not go_on():
                return
            self.found[question.number] = self._ask(question)
            done()

    def _ask(self, question: Question) -> Alone:
        prompt = question.prompt
        prompt_ids = self._prompt_ids(question) if isinstance(prompt, str) else list(prompt)
        self.flush()
        outputs = self._post(*request_alone(question, prompt_ids, f"alone-{question.number:07}"))
        return Alone(prompt_ids, read_whole_native(question, outputs).answers)

    def _prompt_ids(self, question: Question) -> list[int]:
        """The prompt that SGLang's chat API makes of a message."""
        path, body = request_of(question, tokens=1, stream=False, rid=f"prompt-{question.number:07}")
        ids: list[int] = self._post(path, body)["choices"][0]["prompt_token_ids"]
        return ids

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._http.post(path, json=body).raise_for_status().json()

    def flush(self) -> None:
        """Empty the cache; SGLang waits until the step in flight has ended."""
        self._http.post("/flush_cache", params={"timeout": 30}).raise_for_status()

    def judge(self, life: Life, outcome: Outcome) -> Judgement:
        """Compare a life's answers with those of its request alone; ask again for the gap where they differ."""
        alone, judged = self.found.get(life.question.number), Judgement("nothing came")
        if alone is None:
            return Judgement("not judged")
        for sample, (answer, other) in enumerate(zip(outcome.answers, alone.answers, strict=False)):
            if not (answer.ids or answer.text):
                continue
            comparison, detail = self._compare(life.question, alone, sample, answer, other)
            judged.comparison = max(judged.comparison, comparison, key=GRAVITY.index)
            judged.details += [detail] if detail else []
        return judged

    def _compare(
        self, question: Question, alone: Alone, sample: int, answer: Answer, other: Answer
    ) -> tuple[Comparison, str]:
        place = first_difference(answer, other)
        if place is None:
            return "equal", ""
        mine, expected = self._evictions(answer), self._evictions(other)
        where = f"sample {sample} differs at {place}; evictions at {mine}, alone at {expected}"
        if (reason := explained_by_records(answer, other)) is not None:
            return reason, where
        may_be_late = self._disturbed and answer.report is None and answer.ids is not None
        if may_be_late and evicted_late(mine, expected, len(alone.prompt_ids) + place):
            return "late eviction", where
        if question.temperature > 0:
            return "unexplained", where
        gap = gap_at(self._best(question, alone, sample, other), other, answer, place)
        return ("near-tie" if gap.is_tie else "unexplained"), f"{where}; gap {gap.value:.2g} at step {gap.place}"

    def _evictions(self, answer: Answer) -> list[int]:
        """Tokens computed before each eviction of an answer, of its trace; none if it has no trace."""
        for folder in self._traces:
            if answer.rid is not None and (file := folder / f"{answer.rid}.npz").exists():
                lengths: list[int] = load_trace(file).true_len.tolist()
                return lengths
        return []

    def _best(self, question: Question, alone: Alone, sample: int, other: Answer) -> list[list[tuple[float, int, str]]]:
        """The two best tokens of each step of the request alone, asked for once more."""
        self.flush()
        self.probes += 1
        name = f"probe-{question.number:07}-{self.probes:05}"
        outputs = self._post(*request_alone(question, alone.prompt_ids, name, probe=True))
        output = outputs[sample] if isinstance(outputs, list) else outputs
        if output["output_ids"] != other.ids:  # then its log-probabilities are those of another text
            return []
        best: list[list[tuple[float, int, str]]] = output["meta_info"]["output_top_logprobs"]
        return best


def read_whole_native(question: Question, response: Any) -> Outcome:
    """A response of the native API, over whichever API the question is asked by lives."""
    return read_whole(replace(question, api="generate"), response)
