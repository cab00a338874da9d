"""Grades of a document's responses as lm-eval metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

from kvpolicy.lmeval_tasks import response
from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.grading.math import grade_math
from kvpolicy.lmeval_tasks.grading.verdict import Grade, Verdict
from kvpolicy.lmeval_tasks.grading.worker import GraderMissing, check_installed

_FLAGS = ("truncated", "looped", "garbage", "unfinished_thinking")
T = TypeVar("T")


def check_grading() -> None:
    """Raise TaskError if answers could not be graded here, which is better known before they are generated."""
    try:
        check_installed()
    except GraderMissing as error:
        raise TaskError(str(error)) from error


def process_results(
    doc: Mapping[str, Any], results: Sequence[str], *, thinking: bool = False, numeric: bool = False
) -> dict[str, Any]:
    """Metrics of one document, whose gold answer is ``doc["answer"]``.

    results : one text per sample.
    thinking, numeric : see :func:`kvpolicy.lmeval_tasks.grading.extract.final_answer`.
    """
    grades = [
        grade_math(text, doc["answer"], truncated=response.cut_off(text), thinking=thinking or None, numeric=numeric)
        for text in results
    ]
    return metrics(results, grades)


def process_numeric_results(
    doc: Mapping[str, Any], results: Sequence[str], *, thinking: bool = False
) -> dict[str, Any]:
    """:func:`process_results` where the answer is a number, which may be marked otherwise than by a box."""
    return process_results(doc, results, thinking=thinking, numeric=True)


def metrics(results: Sequence[str], grades: Sequence[Grade]) -> dict[str, Any]:
    """What lm-eval logs of a document and averages over documents.

    ``exact_match`` is the share of correct responses, and each other verdict and flag the share of those that have
    it. ``response_tokens`` is their mean length. ``kv_policy`` holds the record of the cache, a list of them if there
    are several responses. ``responses`` holds a dictionary for each response, in the order of the samples. What not
    every text can tell is left out.
    """
    measured: dict[str, Any] = {"exact_match": _share([grade.correct for grade in grades])}
    for verdict in Verdict:
        if verdict is not Verdict.CORRECT:
            measured[str(verdict)] = _share([grade.verdict is verdict for grade in grades])
    for flag in _FLAGS:
        if values := _all_known(getattr(grade, flag) for grade in grades):
            measured[flag] = _share(values)
    lengths = [response.tokens_of(text) for text in results]
    if known := _all_known(lengths):
        measured["response_tokens"] = fmean(known)
    if records := _all_known(map(response.record_of, results)):
        measured["kv_policy"] = records if len(records) > 1 else records[0]
    measured["responses"] = [_row(grade, tokens) for grade, tokens in zip(grades, lengths, strict=True)]
    return measured


def _share(values: Sequence[bool]) -> float:
    """Share of True; of one value 0 or 1, so that logs of single responses hold whole numbers."""
    return fmean(values) if len(values) > 1 else int(values[0])


def _all_known(values: Iterable[T | None]) -> list[T] | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else None


def _row(grade: Grade, tokens: int | None) -> dict[str, Any]:
    flags = {flag: getattr(grade, flag) for flag in _FLAGS}
    return {"verdict": str(grade.verdict), "answer": grade.answer, **flags, "tokens": tokens}


def count_responses(items: Sequence[Sequence[Any]]) -> int:
    """lm-eval aggregation of ``responses``: how many there are."""
    return sum(map(len, items))
