"""The task as lm-eval loads it, without an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.lmeval_tasks import response
from kvpolicy.lmeval_tasks.command import run

NAME = "kvp_gsm8k_sample"


class MetaText(str):
    """A text that carries `meta_info`, as the plugin hands it to lm-eval."""

    meta_info: dict[str, Any]


def text_of(text: str, finish: str, record: dict[str, Any] | None) -> MetaText:
    carrying = MetaText(text)
    carrying.meta_info = {"finish_reason": {"type": finish}} | ({} if record is None else {"kv_policy": record})
    return carrying


@pytest.fixture(scope="module")
def include_path() -> str:
    printed = subprocess.run(
        [sys.executable, "-m", "kvpolicy.cli", "tasks"], check=True, capture_output=True, text=True, cwd="/"
    )
    return printed.stdout.strip()


@pytest.fixture(scope="module")
def task(include_path: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    tasks = pytest.importorskip("lm_eval.tasks")
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    try:
        # lm-eval hands the model's arguments to the task as metadata.
        manager = tasks.TaskManager(
            include_path=include_path, include_defaults=False, metadata={"pretrained": "model", "kv_policy": "full"}
        )
        return manager.load([NAME])["tasks"][NAME]
    finally:
        os.chdir(before)


def test_command_prints_a_folder_of_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None) == 0  # type: ignore[arg-type]
    (line,) = capsys.readouterr().out.splitlines()
    assert list(Path(line).glob("**/gsm8k_sample.yaml"))


def test_documents(task: Any) -> None:
    assert len(task.eval_docs) == 24
    assert [doc["id"] for doc in task.eval_docs] == [f"gsm8k-test-{i}" for i in range(24)]
    assert all(doc["solution"].endswith(f"#### {doc['answer']}") for doc in task.eval_docs)


def test_prompt_and_generation(task: Any) -> None:
    prompt = task.doc_to_text(task.eval_docs[0])
    assert prompt.startswith("Question: Janet")
    assert prompt.endswith("within \\boxed{}.\nAnswer:")
    assert task.config.num_fewshot == 0
    generation = task.config.generation_kwargs
    assert generation["temperature"] == 0.0
    assert generation["max_gen_toks"] >= 300


def test_metrics_of_a_response_of_the_plugin(task: Any) -> None:
    record = {"kv_bytes_mean": 1.0, "kv_bytes_full_mean": 4.0}
    metrics = task.process_results(task.eval_docs[0], [text_of("So \\boxed{18}", "stop", record)])
    assert metrics["exact_match"] == 1
    assert metrics["truncated"] == 0
    assert metrics["kv_policy"] == record


@pytest.mark.parametrize("answer", ["The answer is 18.", "#### 18", "which makes 18"])
def test_a_small_model_need_not_box_its_answer(task: Any, answer: str) -> None:
    assert task.process_results(task.eval_docs[0], [answer])["exact_match"] == 1


def test_a_truncated_response_without_a_marked_answer_has_none(task: Any) -> None:
    metrics = task.process_results(task.eval_docs[0], [text_of("she has 18", "length", None)])
    assert {name for name, value in metrics.items() if value == 1} == {"no_answer", "truncated"}


def test_plain_text_of_another_backend_has_no_cache_metrics(task: Any) -> None:
    metrics = task.process_results(task.eval_docs[0], ["she has 18"])
    assert metrics["exact_match"] == 1
    assert metrics.keys() & {"kv_policy", "truncated", "response_tokens"} == set()


def test_aggregation_is_the_mean_share_and_has_no_stderr(task: Any) -> None:
    metrics = pytest.importorskip("lm_eval.api.metrics")
    records = [
        {"kv_bytes_mean": 1.0, "kv_bytes_full_mean": 4.0},
        {"kv_bytes_mean": 3.0, "kv_bytes_full_mean": 4.0},
        {"kv_bytes_mean": 0.0, "kv_bytes_full_mean": 0.0},  # aborted before its prefill
    ]
    aggregate = task.aggregation()["kv_policy"]
    assert aggregate is response.mean_held_share
    assert aggregate(records) == pytest.approx((0.25 + 0.75 + 1.0) / 3)
    assert aggregate([records[:2], records[2:]]) == pytest.approx((0.5 + 1.0) / 2)
    assert metrics.stderr_for_metric(aggregate, bootstrap_iters=10) is None
    assert task.higher_is_better()["kv_policy"] is False
    assert task.higher_is_better()["exact_match"] is True
