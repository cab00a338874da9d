"""Arms that were asked the same questions, and measures of them, problem by problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from kvpolicy.reports.ab.bootstrap import FloatArray
from kvpolicy.reports.ab.responses import Arm, Response
from kvpolicy.reports.lmeval_output import OutputError

Measure = Callable[[Response], float | None]


@dataclass(frozen=True)
class Pairs:
    """Arms with the same keys in the same order. What they say of problem ``i`` of a task stands in row ``i`` for each.

    warnings : what makes a comparison less than it seems, one sentence each.
    """

    arms: tuple[Arm, ...]
    warnings: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, sorted."""
        return self.arms[0].tasks

    def arm(self, name: str) -> Arm:
        """The arm of this name.

        Raises
        ------
        OutputError
            If there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise OutputError(f"there is no arm {name}; the arms are {', '.join(arm.name for arm in self.arms)}.")

    def problems(self, task: str) -> tuple[str, ...]:
        """``doc_hash`` of the problems of a task, in the order of their rows."""
        return tuple(dict.fromkeys(response.key.doc_hash for response in self.arms[0].of_task(task)))

    def by_problem(self, arm: str, task: str, measure: Measure) -> FloatArray | None:
        """fp64 ``[problems]``: the mean of a measure over the responses to each problem; None if one lacks it.

        Repeats tell more of a problem, and nothing of other problems: what is compared is one number per problem.
        """
        means = []
        for _, responses in groupby(self.arm(arm).of_task(task), key=lambda response: response.key.doc_hash):
            values = [measure(response) for response in responses]
            if any(value is None for value in values):
                return None
            means.append(np.mean(np.array(values, dtype=np.float64)))
        return np.array(means, dtype=np.float64)


def correct(response: Response) -> float:
    """1 for a correct response, 0 for any other; its mean is accuracy."""
    return float(response.correct)


def flag(name: str) -> Measure:
    """1 for a response that has the flag, 0 for one that has not; see `ab_responses.FLAGS`."""
    return lambda response: None if (found := response.flags[name]) is None else float(found)


def verdict(name: str) -> Measure:
    """1 for a response of this verdict, 0 for one of another."""
    return lambda response: None if response.verdict is None else float(response.verdict == name)


def tokens(response: Response) -> float | None:
    """Length of the response."""
    return None if response.tokens is None else float(response.tokens)


def pair(arms: Sequence[Arm]) -> Pairs:
    """Check that all arms were asked the same.

    Raises
    ------
    OutputError
        If there are fewer than two arms or two of one name; if tasks, problems or responses of one are missing in
        another; or if a problem was put in other words, or has another gold answer.
    """
    names = [arm.name for arm in arms]
    if len(names) < 2 or len(set(names)) < len(names):
        raise OutputError(f"a comparison needs at least two arms of different names, got {', '.join(names) or 'none'}.")
    for first, second in pairwise(arms):
        _check_same_tasks(first, second)
        for task in first.tasks:
            _check_same_keys(task, first, second)
            _check_same(task, "prompts", lambda response: response.prompt_hash, first, second)
            _check_same(task, "gold answers", lambda response: response.target_hash, first, second)
    return Pairs(tuple(arms), tuple(_warnings(arms)))


def _check_same_tasks(first: Arm, second: Arm) -> None:
    for one, other in ((first, second), (second, first)):
        if missing := sorted(set(one.tasks) - set(other.tasks)):
            raise OutputError(f"arm {other.name} has not run {', '.join(missing)}, which arm {one.name} has.")


def _check_same_keys(task: str, first: Arm, second: Arm) -> None:
    counts = [Counter(response.key.doc_hash for response in arm.of_task(task)) for arm in (first, second)]
    in_second, in_first = len(counts[0].keys() - counts[1].keys()), len(counts[1].keys() - counts[0].keys())
    if in_first or in_second:
        raise OutputError(
            f"{task}: of {len(counts[0] | counts[1])} problems, {in_second} are missing in arm {second.name} and "
            f"{in_first} in arm {first.name}; run both on the same problems, and let both finish."
        )
    if differing := sum(counts[0][problem] != counts[1][problem] for problem in counts[0]):
        raise OutputError(
            f"{task}: for {differing} of {len(counts[0])} problems arms {first.name} and {second.name} have "
            f"different numbers of responses ({counts[0].total()} and {counts[1].total()} in all); "
            "run both with the same repeats."
        )


def _check_same(task: str, what: str, hash_of: Callable[[Response], str], first: Arm, second: Arm) -> None:
    keys = [response.key for response in first.of_task(task)]
    differing = {key.doc_hash for key in keys if hash_of(first.responses[key]) != hash_of(second.responses[key])}
    if differing:
        raise OutputError(
            f"{task}: the {what} of {len(differing)} of {len({key.doc_hash for key in keys})} problems differ between "
            f"arms {first.name} and {second.name}; "
            "run both with the same task, model, chat template and few-shot examples."
        )


def _warnings(arms: Sequence[Arm]) -> Iterable[str]:
    for task in arms[0].tasks:
        found = {response.settings for arm in arms for response in arm.of_task(task)}
        if len(found) > 1:
            yield f"{task}: the generation settings are not the same everywhere: {' and '.join(sorted(found))}."
        for arm in arms:
            repeated, copied = _copies(arm.of_task(task))
            if copied:
                yield (
                    f"{task}: for {copied} of {repeated} problems all responses of arm {arm.name} are the same text; "
                    "repeats that are copies add nothing."
                )


def _copies(responses: Sequence[Response]) -> tuple[int, int]:
    """How many problems have several responses, and for how many of them these are one text."""
    texts: dict[str, list[str]] = {}
    for response in responses:
        texts.setdefault(response.key.doc_hash, []).append(response.text_hash)
    repeated = [hashes for hashes in texts.values() if len(hashes) > 1]
    return len(repeated), sum(len(set(hashes)) == 1 for hashes in repeated)
