"""Grades of a problem's responses as lm-eval metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvpolicy.lmeval_tasks import response
from kvpolicy.lmeval_tasks.livecodebench.grade import grade_code
from kvpolicy.lmeval_tasks.livecodebench.verdict import CodeVerdict
from kvpolicy.lmeval_tasks.reasoning.scoring import metrics

# The other two are in the metrics of all tasks, as `exact_match` and `no_answer`.
DETAILS = tuple(verdict for verdict in CodeVerdict if verdict not in (CodeVerdict.CORRECT, CodeVerdict.NO_CODE))


def process_results(doc: Mapping[str, Any], results: Sequence[str], *, thinking: bool = False) -> dict[str, Any]:
    """Metrics of one problem: those of all tasks, and beside them the ways in which programs fail.

    These add up to `wrong`, as a program that fails a test in whatever way is a wrong answer.

    results : one text per sample.
    thinking : whether the responses start inside of thoughts, which the text itself does not show.
    """
    grades = [grade_code(text, doc, truncated=response.cut_off(text), thinking=thinking or None) for text in results]
    measured = metrics(results, [grade.grade for grade in grades])
    for verdict in DETAILS:
        measured[str(verdict)] = fmean(grade.verdict is verdict for grade in grades)
    for row, grade in zip(measured["responses"], grades, strict=True):
        row |= {"code_verdict": str(grade.verdict), "failed_test": grade.failed_test, "error": grade.error}
    return measured
