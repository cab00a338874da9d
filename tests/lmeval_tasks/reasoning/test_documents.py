"""Documents from JSONL folders and from a hub that is made up."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning.documents import Source, chosen, load, shuffled
from kvpolicy.lmeval_tasks.reasoning.options import Options

SOURCE = Source("org/data", None, "test", "data.jsonl", prefix="p")
CHOICES = Source(
    "org/choices",
    "diamond",
    "train",
    "choices.jsonl",
    id=("Record ID",),
    problem=("Question",),
    answer=("Correct Answer",),
    wrong_answers=("Incorrect Answer 1", "Incorrect Answer 2"),
)
ROW = {"id": "p-1", "problem": "1 + 1?", "answer": "2"}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load what a file holds: text, or rows."""

    def read_(content: str | list[Any], source: Source = SOURCE, **options: Any) -> list[dict[str, Any]]:
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / source.file).write_text(text, encoding="utf-8")
        return load(source, Options(**options))

    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    return read_


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `datasets.load_dataset` returns, or raises, and the arguments that it got."""
    state: dict[str, Any] = {"rows": [], "asked": []}

    def load_dataset(*arguments: Any, **keywords: Any) -> Any:
        state["asked"].append((arguments, keywords))
        if isinstance(state["rows"], Exception):
            raise state["rows"]
        return datasets.Dataset.from_list(state["rows"])

    monkeypatch.delenv("KVPOLICY_DATA", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return state


def test_other_fields_are_left_out_and_blank_lines_skipped(read: Any) -> None:
    text = f"\n{json.dumps(ROW | {'solution': 'long', 'level': 3})}\n\n"
    assert read(text) == [ROW]


def test_a_line_separator_inside_of_a_text_ends_no_row(read: Any) -> None:
    problem = "one\u2028two\x85three\x0cfour"
    content = json.dumps(ROW | {"problem": problem}, ensure_ascii=False) + "\n"
    assert read(content) == [ROW | {"problem": problem}]


@pytest.mark.parametrize(
    ("row", "identifier"),
    [
        pytest.param({"id": "p-7"}, "p-7", id="as it is"),
        pytest.param({"id": 7}, "p-7", id="a number"),
        pytest.param({"id": 0}, "p-0", id="zero"),
        pytest.param({"problem_idx": 7}, "p-7", id="another field"),
        pytest.param({"unique_id": "p/a", "id": 7}, "p/a", id="the first field counts"),
        pytest.param({}, "p-0", id="numbered"),
    ],
)
def test_a_problem_has_one_id_wherever_it_was_read(read: Any, hub: Any, row: Any, identifier: str) -> None:
    row = {"problem": "?", "answer": "1"} | row
    hub["rows"] = [row]
    assert [document["id"] for document in load(SOURCE, Options())] == [identifier]
    assert hub["asked"] == [(("org/data", None), {"split": "test"})]


def test_answers_are_texts_and_may_be_boxed_or_follow_a_mark(read: Any) -> None:
    assert read([ROW | {"answer": 2}]) == [ROW]
    assert read([ROW | {"answer": "$\\boxed{2}$"}]) == [ROW]
    assert read([ROW | {"answer": "\\frac{1}{2}"}]) == [ROW | {"answer": "\\frac{1}{2}"}]
    marked = Source("h", None, "test", "data.jsonl", answer_after="####")
    assert read([ROW | {"answer": "1 #### 3\n#### 2 "}], marked) == [ROW]
    assert read([ROW], marked) == [ROW]
    with pytest.raises(TaskError, match=r"data.jsonl, row 1 has nothing after #### in its answer\.$"):
        read([ROW | {"answer": "so ####"}], marked)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param("", r"data\.jsonl is empty; it must hold one JSON object a line\.$", id="empty"),
        pytest.param("{'id': 1}\n", r"data\.jsonl is not JSONL, one object a line: .*\.$", id="no JSON"),
        pytest.param("[1]\n", r"data\.jsonl, row 1 is no JSON object\.$", id="a list"),
        pytest.param(
            [ROW, {"id": 2, "text": "?"}],
            r"data\.jsonl, row 2 has no problem or question; its fields are id, text\.$",
            id="other fields",
        ),
        pytest.param([ROW | {"problem": " "}], r"row 1 has no problem or question; its fields", id="blank problem"),
        pytest.param([ROW | {"answer": None}], r"row 1 has no answer; its fields", id="no answer"),
        pytest.param([ROW, ROW], r"data\.jsonl holds two rows with the same id; each problem needs", id="twice"),
    ],
)
def test_a_wrong_file_is_refused(read: Any, content: Any, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        read(content)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.jsonl").write_bytes('{"id": 1, "problem": "é?", "answer": "1"}\n'.encode("latin-1"))
    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    with pytest.raises(TaskError, match=r"data\.jsonl is not JSONL, one object a line: 'utf-8' codec can't decode"):
        load(SOURCE, Options())


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    sentence = f"^KVPOLICY_DATA={tmp_path} holds no file data.jsonl; put it there, or unset KVPOLICY_DATA for the hub.$"
    with pytest.raises(TaskError, match=sentence):
        load(SOURCE, Options())


@pytest.mark.parametrize("error", [ConnectionError("offline.\nmore"), ValueError("no config"), FileNotFoundError("?")])
def test_a_hub_that_cannot_be_read_names_the_folder_as_a_way_out(hub: Any, error: Exception) -> None:
    hub["rows"] = error
    reason = str(error).partition("\n")[0].rstrip(".")
    with pytest.raises(TaskError) as caught:
        load(SOURCE, Options())
    assert str(caught.value) == (
        f"org/data could not be loaded ({reason}); "
        "with KVPOLICY_DATA=<folder> its problems are read from <folder>/data.jsonl instead."
    )


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"id": f"test/{number}.json"} for number in range(count)]


def md5(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode()).digest(), "big")


def test_the_parts_are_those_of_the_split_in_their_order() -> None:
    everything = numbered(200)
    dev = [document for document in everything if md5(document["id"]) % 5 < 2]
    assert chosen(everything, Options("dev"), "") == dev
    assert chosen(everything, Options("confirm"), "") == [each for each in everything if each not in dev]
    assert chosen(everything, Options(), "") == everything


def test_a_subset_depends_on_ids_alone_and_grows() -> None:
    everything = numbered(50)
    mixed = random.Random(0).sample(everything, 50)
    smaller: list[dict[str, Any]] = []
    for count in (1, 7, 50):
        subset = chosen(everything, Options(subset=count), "")
        assert len(subset) == count
        assert subset == [document for document in everything if document in subset]
        assert {each["id"] for each in chosen(mixed, Options(subset=count), "")} == {each["id"] for each in subset}
        assert all(document in subset for document in smaller)
        smaller = subset
    lowest = sorted(everything, key=lambda document: md5(document["id"]))[:7]
    assert chosen(everything, Options(subset=7), "") == [document for document in everything if document in lowest]


def test_a_subset_of_a_split_lies_in_the_split() -> None:
    subset = chosen(numbered(50), Options("confirm", 4), "")
    assert len(subset) == 4
    assert all(md5(document["id"]) % 5 >= 2 for document in subset)


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(TaskError, match=r"^the file has 3 problems; 4 or more are needed\.$"):
        chosen(numbered(3), Options(subset=4), "the file")
    lonely = next(document for document in numbered(50) if md5(document["id"]) % 5 >= 2)
    with pytest.raises(TaskError, match=r"^the file has 0 problems in split=dev; 1 or more are needed\.$"):
        chosen([lonely], Options("dev"), "the file")


def choice_row(number: int) -> dict[str, Any]:
    right = {"Record ID": f"r{number}", "Question": f"Question {number}?", "Correct Answer": "right"}
    return right | {"Incorrect Answer 1": "wrong", "Incorrect Answer 2": "worse"}


def test_choices_are_shuffled_by_the_question_alone(read: Any) -> None:
    rows = [choice_row(number) for number in range(300)]
    loaded = read(rows, CHOICES)
    for document in loaded:
        assert sorted(document["choices"]) == ["right", "worse", "wrong"]
        assert document["choices"]["ABC".index(document["answer"])] == "right"
    letters = Counter(document["answer"] for document in loaded)
    assert all(70 <= letters[letter] <= 130 for letter in "ABC")  # 100 expected, standard deviation 8
    assert len({tuple(document["choices"]) for document in loaded}) == 6
    turned = [row | {"Incorrect Answer 1": "worse", "Incorrect Answer 2": "wrong"} for row in reversed(rows)]
    assert read(turned, CHOICES) == loaded[::-1]


def test_a_wrong_answer_that_reads_like_the_right_one_does_not_take_its_letter() -> None:
    choices, letter = shuffled("?", "same", ["same", "other"])
    assert Counter(choices) == {"same": 2, "other": 1}
    assert choices["ABC".index(letter)] == "same"


def test_a_missing_choice_is_refused(read: Any) -> None:
    with pytest.raises(TaskError, match=r"choices\.jsonl, row 1 has no Incorrect Answer 2; its fields are"):
        read([choice_row(1) | {"Incorrect Answer 2": ""}], CHOICES)
