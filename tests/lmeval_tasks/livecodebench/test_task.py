"""The task as stock lm-eval loads it from the printed include path, and runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.metrics import mean
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.dummy import DummyLM

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.grading.verdict import Verdict
from kvpolicy.lmeval_tasks.livecodebench import scoring, task
from kvpolicy.lmeval_tasks.livecodebench.grade import grade_code
from kvpolicy.lmeval_tasks.livecodebench.task import CodeTask
from kvpolicy.lmeval_tasks.sandbox.outcome import SandboxError
from tests.lmeval_tasks.livecodebench import toys
from tests.lmeval_tasks.livecodebench.toys import SOLUTIONS, block
from tests.lmeval_tasks.reasoning import problems

NAME = "kvp_livecodebench_v6"
# In the order of the file: right, wrong on a private test, no code.
RESPONSES = {
    "toy_a": block(SOLUTIONS["toy_a"]),
    "9001": block("class Solution:\n pairs = lambda *_: [[0, 2]]"),
    "toy_c": "?",
}
WAYS = ["wrong_answer", "runtime_error", "time_limit", "memory", "output_limit", "compile_error"]


class MetaText(str):
    """A text as the plugin hands it to lm-eval."""

    meta_info: dict[str, Any]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOLICY_DATA", str(toys.write(tmp_path)))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _results: None)


def load(**metadata: Any) -> Any:
    return problems.load(NAME, **metadata)[NAME]


def test_documents_hold_no_private_tests() -> None:
    loaded = load()
    assert isinstance(loaded, CodeTask)
    documents = list(loaded.eval_docs)
    assert [document["id"] for document in documents] == ["toy_a", "9001", "toy_c"]
    for document, row in zip(documents, toys.ROWS, strict=True):
        assert row["private_test_cases"] not in json.dumps(document)
        assert loaded.doc_to_target(document) == document["answer"]
        assert row["question_content"] in loaded.doc_to_text(document)


def test_it_is_a_reasoning_task_in_all_else() -> None:
    loaded = load(subset=1, repeats=3)
    assert loaded.config.dataset_path == "livecodebench/code_generation_lite"
    assert loaded.config.num_fewshot == 0
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_gen_toks": 32768, "until": []}
    assert loaded.config.generation_kwargs == settings
    loaded.build_all_requests()
    assert [request.idx for request in loaded.instances] == [0, 1, 2]


def test_metrics_are_those_of_all_tasks_and_the_ways_to_fail() -> None:
    loaded = load()
    rates = [*(str(verdict) for verdict in Verdict), "truncated", "looped", "garbage", "unfinished_thinking", *WAYS]
    rates[0] = "exact_match"
    assert loaded.aggregation().keys() == {*rates, "response_tokens", "kv_policy", "responses"}
    assert all(loaded.aggregation()[rate] is mean for rate in rates)
    assert [rate for rate in rates if loaded.higher_is_better()[rate]] == ["exact_match"]
    assert [str(verdict) for verdict in scoring.DETAILS] == WAYS


def test_a_failed_private_test_counts() -> None:
    """Of the document alone the public tests are known, and this program passes them."""
    loaded = load()
    document = list(loaded.eval_docs)[1]
    measured = loaded.process_results(document, [RESPONSES["9001"]])
    assert (measured["exact_match"], measured["wrong"], measured["wrong_answer"]) == (0, 1, 1)
    assert grade_code(RESPONSES["9001"], document).grade.correct


def test_metrics_of_several_responses() -> None:
    loaded = load()
    document = next(iter(loaded.eval_docs))
    cut = MetaText(block("print(1)"))
    cut.meta_info = {"finish_reason": {"type": "length"}, "completion_tokens": 7}
    whole = MetaText(RESPONSES["toy_a"])
    whole.meta_info = {"finish_reason": {"type": "stop"}, "completion_tokens": 9}
    crash = MetaText(block("1 / 0"))
    crash.meta_info = whole.meta_info
    nothing = MetaText("x")
    nothing.meta_info = whole.meta_info
    measured = loaded.process_results(document, [cut, whole, crash, nothing])
    rates = {name: value for name, value in measured.items() if isinstance(value, float) and value}
    assert rates == {
        "exact_match": 0.25,
        "wrong": 0.5,
        "wrong_answer": 0.25,
        "runtime_error": 0.25,
        "no_answer": 0.25,
        "truncated": 0.25,
        "response_tokens": 8.5,
    }
    rows = measured["responses"]
    assert [row["code_verdict"] for row in rows] == ["wrong_answer", "correct", "runtime_error", "no_code"]
    assert [row["failed_test"] for row in rows] == [0, None, 0, None]
    assert rows[2]["error"] == "ZeroDivisionError: division by zero"
    assert rows[1]["answer"] == SOLUTIONS["toy_a"]
    assert measured.keys() <= loaded.aggregation().keys()


def test_a_whole_run() -> None:
    class Solver(DummyLM):  # type: ignore[misc]
        tokenizer = None

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            return [RESPONSES[request.doc["id"]] for request in requests]

    evaluated = simple_evaluate(Solver(), tasks=[NAME], task_manager=problems.manager(), bootstrap_iters=10)
    results = evaluated["results"][NAME]
    for metric in ("exact_match", "wrong", "wrong_answer", "no_answer"):
        assert results[f"{metric},none"] == pytest.approx(1 / 3)
    assert results["responses,none"] == 3
    logged = json.dumps(evaluated["samples"][NAME], default=str)
    assert not any(row["private_test_cases"] in logged for row in toys.ROWS)


def test_split_and_subset() -> None:
    parts = [[document["id"] for document in load(split=split).eval_docs] for split in ("dev", "confirm")]
    assert sorted(parts[0] + parts[1]) == sorted(SOLUTIONS)
    assert len(list(load(subset=2).eval_docs)) == 2
    with pytest.raises(TaskError, match="3 problems"):
        load(subset=4)


def test_refused_where_programs_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise SandboxError("Nothing here can isolate programs.")

    monkeypatch.setattr(task, "choose", refuse)
    with pytest.raises(TaskError, match=r"^Nothing here can isolate programs\.$"):
        load()


def test_public_tests_alone_are_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("WARNING")  # an engine that ran in this process may have raised it
    load()
    assert "public tests only" not in caplog.text
    (tmp_path / toys.FILE).write_text(json.dumps(toys.DOUBLES | {"private_test_cases": ""}) + "\n")
    loaded = load()
    assert "public tests only" in caplog.text
    assert loaded.process_results(next(iter(loaded.eval_docs)), [RESPONSES["toy_a"]])["exact_match"] == 1
