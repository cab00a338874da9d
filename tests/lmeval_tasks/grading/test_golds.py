"""Gold answers grade correct against themselves, and wrong against one another: a sample, and all of the data sets."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.grading.math import grade_math
from kvpolicy.lmeval_tasks.grading.verdict import Verdict
from kvpolicy.lmeval_tasks.grading.worker import WORKER
from kvpolicy.lmeval_tasks.gsm8k_sample.task import DATA as GSM8K_SAMPLE

pytestmark = pytest.mark.usefixtures("_math_verify")

SAMPLE = Path(__file__).with_name("math_sample.jsonl")
WRAPPINGS = [r"\boxed{%s}", r"So the answer is $\boxed{%s}$.", r"**\boxed{%s}**", "\\[\\boxed{ %s }\\]", r"\fbox{%s}"]
GOLDS = ["%s", "$%s$", r"\boxed{%s}"]
Row = dict[str, Any]

# Different problems whose answers are the same, but for a unit, a variable, a base or the order of a list.
SAME = [
    {"x=5", "5"},
    {"1,-2", "-2,1"},
    {"40_9", "40"},
    {"204_5", "204"},
    {r"\frac{1}{4}", r"\frac14"},
    {r"10,\!080", "10080"},
    {r"2 \sqrt{5}", r"2\sqrt{5}"},
    {r"15\mbox{ cm}^2", "15"},
    {r"\$36", "36"},
    *({rf"{degrees}^\circ", degrees} for degrees in ("30", "36", "55", "90", "106", "120")),
]


@pytest.fixture(scope="module")
def _math_verify() -> None:
    pytest.importorskip("math_verify")


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def data_set(name: str) -> list[Row]:
    folder = os.environ.get("KVPOLICY_DATA")
    if not folder:
        pytest.skip("KVPOLICY_DATA does not name a folder with the data sets")
    path = Path(folder) / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return rows_of(path)


def failures(rows: Iterable[Row], **task: Any) -> Iterator[tuple[str, str, str, Verdict]]:
    for row in rows:
        for wrapping, gold in itertools.product(WRAPPINGS, GOLDS):
            grade = grade_math(wrapping % row["answer"], gold % row["answer"], truncated=False, **task)
            if grade.verdict is not Verdict.CORRECT:
                yield row["id"], wrapping % row["answer"], gold, grade.verdict


def solution_failures(rows: Iterable[Row], **task: Any) -> Iterator[tuple[str, str | None, str, Verdict]]:
    for row in rows:
        grade = grade_math(row["solution"], row["answer"], truncated=False, **task)
        if grade.verdict is not Verdict.CORRECT:
            yield row["id"], grade.answer, row["answer"], grade.verdict


def unread(answers: Iterable[str]) -> Iterator[str]:
    """Gold answers that cannot be read, and so would equal nothing but their own spelling."""
    for answer in answers:
        if WORKER.ask(answer, "137.5") is Verdict.UNPARSEABLE:
            yield answer


def confused(answers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, Verdict]]:
    """Pairs of different answers that do not grade as wrong."""
    for gold, answer in answers:
        grade = grade_math(rf"\boxed{{{answer}}}", gold, truncated=False)
        if grade.verdict is not Verdict.WRONG and {gold, answer} not in SAME:
            yield gold, answer, grade.verdict


def test_the_sample_against_itself() -> None:
    rows = rows_of(SAMPLE)
    assert len(rows) == 60
    assert list(failures(rows)) == []
    assert list(solution_failures(rows)) == []
    assert list(unread(row["answer"] for row in rows)) == []


def test_the_sample_against_one_another() -> None:
    answers = [row["answer"] for row in rows_of(SAMPLE)]
    assert list(confused(random.Random(0).sample(list(itertools.permutations(answers, 2)), 700))) == []


def test_the_sample_of_gsm8k() -> None:
    rows = [json.loads(line) for line in GSM8K_SAMPLE.read_text(encoding="utf-8").splitlines()]
    for numeric in (False, True):
        assert list(failures(rows, numeric=numeric)) == []
    assert list(solution_failures(rows, numeric=True)) == []


@pytest.mark.parametrize(
    ("name", "size"), [("math500", 500), ("aime24", 30), ("aime25", 30), ("aime26", 30), ("hmmt25", 30)]
)
def test_a_data_set_against_itself(name: str, size: int) -> None:
    rows = data_set(name)
    assert len(rows) == size
    assert list(failures(rows)) == []
    assert list(unread(row["answer"] for row in rows)) == []
    assert list(solution_failures(row for row in rows if r"\boxed" in row.get("solution", ""))) == []


def test_gsm8k_against_itself() -> None:
    rows = data_set("gsm8k")
    assert len(rows) == 1319
    for numeric in (False, True):
        assert list(failures(rows, numeric=numeric)) == []
    assert list(solution_failures(rows, numeric=True)) == []


def test_the_data_sets_against_one_another() -> None:
    names = ("math500", "aime24", "aime25", "aime26", "hmmt25")
    answers = sorted({row["answer"] for name in names for row in data_set(name)})
    pairs = random.Random(0).sample(list(itertools.permutations(answers, 2)), 4000)
    assert list(confused(pairs)) == []
