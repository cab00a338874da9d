"""Reading the problems, of our own and, where they are, those of LiveCodeBench."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.livecodebench import problems
from kvpolicy.lmeval_tasks.livecodebench.grade import grade_code
from kvpolicy.lmeval_tasks.livecodebench.private_tests import decode
from kvpolicy.lmeval_tasks.livecodebench.prompt import prompt
from kvpolicy.lmeval_tasks.livecodebench.verdict import CodeVerdict
from tests.lmeval_tasks.livecodebench import toys
from tests.lmeval_tasks.livecodebench.solutions import PROGRAMS
from tests.lmeval_tasks.livecodebench.toys import DOUBLES, FILE, PAIRS, block

HUB = "livecodebench/code_generation_lite", "test6.jsonl"
DATA = os.environ.get("KVPOLICY_DATA")

needs_data = pytest.mark.skipif(
    DATA is None or not Path(DATA, FILE).is_file(), reason=f"KVPOLICY_DATA names no folder with {FILE}"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    return toys.write(tmp_path)


def write(folder: Path, *rows: Any) -> None:
    (folder / FILE).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


def test_rows_of_the_hub(folder: Path) -> None:
    documents, private, where = problems.load(*HUB, FILE)
    assert where == str(folder / FILE)
    assert [document["id"] for document in documents] == ["toy_a", "9001", "toy_c"]
    first, second, _ = documents
    assert first == {
        "id": "toy_a",
        "title": "Doubles",
        "problem": DOUBLES["question_content"],
        "starter_code": "",
        "platform": "atcoder",
        "difficulty": "easy",
        "contest_date": "2025-02-01T00:00:00",
        "public_test_cases": [{"input": "4", "output": "8"}, {"input": "0\n", "output": "0\n"}],
        "function": "",
        "answer": "2 public tests and the private ones",
    }
    assert second["function"] == "pairs"
    assert {name: len(decode(text)) for name, text in private.items()} == {"toy_a": 2, "9001": 1, "toy_c": 1}


def test_rows_of_the_other_form(folder: Path) -> None:
    row = {
        "id": "toy_a",
        "title": "Doubles",
        "problem": DOUBLES["question_content"],
        "public_test_cases": json.loads(DOUBLES["public_test_cases"]),
        "answer": None,
        "version": "v6",
        **{name: DOUBLES[name] for name in ("starter_code", "platform", "difficulty", "contest_date", "metadata")},
    }
    expected = problems.load(*HUB, FILE)[0][0]
    write(folder, row)
    (document,), private, _ = problems.load(*HUB, FILE)
    assert document == expected | {"answer": "2 public tests"}
    assert private == {}


BROKEN = {
    "no JSON": (["{"], "line 1 is no LiveCodeBench problem"),
    "no object": ([[1]], "line 1 is no LiveCodeBench problem"),
    "a field is missing": ([DOUBLES, {k: v for k, v in PAIRS.items() if k != "starter_code"}], "line 2.*starter_code"),
    "no public tests field": ([{k: v for k, v in DOUBLES.items() if k != "public_test_cases"}], "public_test_cases"),
    "a test without output": ([DOUBLES | {"public_test_cases": '[{"input": "1"}]'}], "output"),
    "metadata is no JSON": ([DOUBLES | {"metadata": "func"}], "line 1 is no LiveCodeBench problem"),
    "no tests at all": ([DOUBLES | {"public_test_cases": "[]", "private_test_cases": ""}], "line 1 has no tests"),
    "twice the same id": ([DOUBLES, DOUBLES], "same id"),
    "no Unicode": (["\udcff"], "line 1 is no LiveCodeBench problem"),
}


@pytest.mark.parametrize(("rows", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_with_the_line(folder: Path, rows: list[Any], message: str) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / FILE).write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    with pytest.raises(TaskError, match=message):
        problems.load(*HUB, FILE)


def test_a_missing_file_is_refused(folder: Path) -> None:
    (folder / FILE).unlink()
    with pytest.raises(TaskError, match=r"holds no file livecodebench_v6\.jsonl; put it there"):
        problems.load(*HUB, FILE)


def test_the_hubs_file_is_read_without_its_loading_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(*names: str, **keywords: str) -> str:
        asked.append((names, keywords))
        return str(folder / FILE)

    monkeypatch.delenv("KVPOLICY_DATA")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert len(problems.load(*HUB, FILE)[0]) == 3
    assert asked == [(HUB, {"repo_type": "dataset"})]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str, **__: str) -> str:
        raise OSError("no network.\nDetails …")

    monkeypatch.delenv("KVPOLICY_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(TaskError) as refused:
        problems.load(*HUB, FILE)
    assert "could not be loaded (no network); with KVPOLICY_DATA=" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_prompts(folder: Path) -> None:
    stdin, functional, _ = (prompt(document) for document in problems.load(*HUB, FILE)[0])
    for text, row in ((stdin, DOUBLES), (functional, PAIRS)):
        assert row["question_content"] in text
        assert text.endswith("Put the whole program into one ```python block at the end of your answer.")
    assert "standard input" in stdin
    assert "standard input" not in functional
    assert f"```python\n{PAIRS['starter_code'].rstrip()}\n```" in functional
    assert not any(test["output"] in stdin for test in decode(DOUBLES["private_test_cases"]))


@needs_data
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_problems_of_livecodebench(name: str, right: bool) -> None:
    documents = {document["id"]: document for document in problems.load(*HUB, FILE)[0]}
    grade = grade_code(block(PROGRAMS[name][not right]), documents[name])
    assert grade.verdict is (CodeVerdict.CORRECT if right else CodeVerdict.WRONG_ANSWER), grade


@needs_data
def test_all_problems_of_livecodebench_can_be_read() -> None:
    documents, private, _ = problems.load(*HUB, FILE)
    assert len(documents) == 175
    assert private.keys() <= {document["id"] for document in documents}
    for document in documents:
        # A functional problem has a starter code with the function's name in it, another has neither.
        assert bool(document["function"]) is bool(document["starter_code"])
        assert f"def {document['function']}(" in document["starter_code"] or not document["function"]
        assert document["platform"] == ("leetcode" if document["function"] else "atcoder")
