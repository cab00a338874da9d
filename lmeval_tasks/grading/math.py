"""Grade the answer to a mathematical problem: the same way for GSM8K, MATH, AIME, HMMT and letters of choices."""

from __future__ import annotations

from kvpolicy.lmeval_tasks.grading.compare import compare
from kvpolicy.lmeval_tasks.grading.extract import final_answer
from kvpolicy.lmeval_tasks.grading.verdict import Grade, Verdict, grade_of
from kvpolicy.lmeval_tasks.grading.worker import WORKER


class _NeedsAlgebra(Exception):
    pass


class _NoAlgebra:
    """Decides nothing itself: numbers, letters and names are compared without it."""

    def expressions(self, gold: str, answer: str) -> bool:
        raise _NeedsAlgebra

    def relations(self, gold: tuple[str, str], answer: tuple[str, str], *, inequality: bool) -> bool:
        raise _NeedsAlgebra


def grade_math(
    text: str, gold: str, *, truncated: bool | None, thinking: bool | None = None, numeric: bool = False
) -> Grade:
    r"""Compare the answer that a response gives with the gold one.

    Answers are equal if they mean the same: ½, ``0.5`` and ``\frac{2}{4}`` are. Decimals are exact, so ``0.333`` is not
    1/3. Units and labels are left out, unless they exclude each other as cents and dollars do. A set has no order, a
    tuple has one. An inequality is the interval of its solutions, and ``x = 5`` is 5.

    Only what needs computer algebra goes to the worker process, which is started when that is first the case.

    Parameters
    ----------
    gold
        Plain, ``$…$`` or ``\boxed{…}``.
    truncated
        Whether the response ended at the token limit, where that is known.
    thinking, numeric
        See :func:`~kvpolicy.lmeval_tasks.grading.extract.final_answer`.

    Raises
    ------
    GraderMissing
        If computer algebra is needed and math-verify is not installed.
    """
    found = final_answer(text, thinking=thinking, numeric=numeric, truncated=truncated)
    verdict = Verdict.NO_ANSWER if found.answer is None else _verdict(gold, found.answer)
    return grade_of(
        text,
        verdict,
        answer=found.answer,
        gold=gold,
        truncated=truncated,
        unfinished_thinking=found.unfinished_thinking,
    )


def _verdict(gold: str, answer: str) -> Verdict:
    try:
        return compare(gold, answer, _NoAlgebra())
    except _NeedsAlgebra:
        return WORKER.ask(gold, answer)
