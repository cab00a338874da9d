"""Each task as stock lm-eval loads it from the printed include path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.metrics import mean, mean_stderr, stderr_for_metric

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.grading.verdict import Verdict
from kvpolicy.lmeval_tasks.reasoning.task import ReasoningTask
from kvpolicy.lmeval_tasks.split import part_of
from tests.lmeval_tasks.reasoning import problems
from tests.lmeval_tasks.reasoning.problems import COUNT, FILES, TASKS

REPEATS = {"kvp_gsm8k": 1, "kvp_math500": 1, "kvp_gpqa_diamond": 4}
HUBS = {
    "kvp_gsm8k": ("openai/gsm8k", "main", "test"),
    "kvp_math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "kvp_aime24": ("math-ai/aime24", None, "test"),
    "kvp_aime25": ("math-ai/aime25", None, "test"),
    "kvp_aime26": ("MathArena/aime_2026", None, "train"),
    "kvp_hmmt_feb25": ("MathArena/hmmt_feb_2025", None, "train"),
    "kvp_gpqa_diamond": ("Idavidrein/gpqa", "gpqa_diamond", "train"),
}
every_task = pytest.mark.parametrize("name", TASKS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    return problems.write(tmp_path)


def load(name: str, **metadata: Any) -> Any:
    return problems.load(name, **metadata)[name]


def requests(task: Any, **keywords: Any) -> list[Any]:
    task.build_all_requests(**keywords)
    return list(task.instances)


def number_in(doc: dict[str, Any]) -> int:
    """What the made-up problem adds to 100."""
    return int(doc["problem"].partition("+")[0].split("$")[-1].split()[-1])


def gold_of(doc: dict[str, Any]) -> str:
    if "choices" in doc:
        return "ABCD"[doc["choices"].index(f"{number_in(doc) + 100} newtons")]
    return str(number_in(doc) + 100)


@every_task
def test_documents_have_one_form(name: str) -> None:
    task = load(name)
    assert isinstance(task, ReasoningTask)
    docs = list(task.eval_docs)
    assert [doc["id"] for doc in docs] == [FILES[name][1].format(number) for number in range(COUNT)]
    for number, doc in enumerate(docs):
        assert number_in(doc) == number
        assert doc["answer"] == gold_of(doc)
        assert task.doc_to_target(doc) == doc["answer"]
        assert doc.keys() == {"id", "problem", "answer"} | ({"choices"} if name == "kvp_gpqa_diamond" else set())


@every_task
def test_the_hub_is_the_default(name: str) -> None:
    config = load(name).config
    assert (config.dataset_path, config.dataset_name, config.test_split) == HUBS[name]


@every_task
def test_a_right_answer_is_correct_and_a_wrong_one_is_not(name: str) -> None:
    task = load(name)
    for doc in task.eval_docs:
        assert task.process_results(doc, [f"So \\boxed{{{doc['answer']}}}."])["exact_match"] == 1
        other = "D" if doc["answer"] == "A" else "A"
        wrong = other if "choices" in doc else str(int(doc["answer"]) + 1)
        assert task.process_results(doc, [f"So \\boxed{{{wrong}}}."])["wrong"] == 1
        assert task.process_results(doc, ["I do not know."])["no_answer"] == 1


@every_task
def test_only_gsm8k_takes_a_number_that_is_not_boxed(name: str) -> None:
    task = load(name)
    doc = task.eval_docs[0]
    assert task.process_results(doc, [f"#### {doc['answer']}"])["exact_match"] == (name == "kvp_gsm8k")


@pytest.mark.parametrize("form", ["{0}", "({0})", "\\text{{{0}}}", "\\textbf{{{0}}}", "{0}) {1}", "\\text{{{0}) {1}}}"])
def test_a_letter_may_be_written_in_many_ways(form: str) -> None:
    task = load("kvp_gpqa_diamond")
    for doc in task.eval_docs:
        for letter, text in zip("ABCD", doc["choices"], strict=True):
            measured = task.process_results(doc, [f"So \\boxed{{{form.format(letter, text)}}}."])
            assert measured["exact_match"] == (letter == doc["answer"])
            assert measured["no_answer"] == 0


@every_task
def test_every_metric_has_an_aggregation_and_an_error_clustered_by_document(name: str) -> None:
    task = load(name)
    names = ["exact_match", *(str(verdict) for verdict in Verdict if verdict is not Verdict.CORRECT)]
    names += ["truncated", "looped", "garbage", "unfinished_thinking", "response_tokens"]
    assert task.aggregation().keys() == {*names, "kv_policy", "responses"}
    for metric in names:
        assert task.aggregation()[metric] is mean  # of the documents' means, with the standard error of a mean
        assert task.higher_is_better()[metric] is (metric == "exact_match")
    assert stderr_for_metric(mean, bootstrap_iters=1) is mean_stderr


@every_task
def test_sampling_is_that_of_thinking_models(name: str) -> None:
    task = load(name)
    assert task.config.num_fewshot == 0
    assert task.config.generation_kwargs == {
        "until": [],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_gen_toks": 32768,
    }
    assert task.config.repeats == REPEATS.get(name, 8)
    assert len(requests(task, limit=2)) == 2 * REPEATS.get(name, 8)


def test_a_task_runs_what_the_metadata_asks_for() -> None:
    task = load("kvp_aime25", repeats=3, subset=4, kv_policy="full", kv_seed=11)
    asked = requests(task)
    assert [(request.doc_id, request.idx, request.repeats) for request in asked] == [
        (number, repeat, 1) for number in range(4) for repeat in range(3)
    ]
    seeds = [request.arguments[1]["custom_params"]["kv_seed"] for request in asked]
    assert len(set(seeds)) == 12
    assert task.dump_config()["repeats"] == 3
    assert task.dump_config()["metadata"]["subset"] == 4
    again = load("kvp_aime25", repeats=2, kv_policy="vase-dkv", kv_seed=11)
    kept = {(request.doc["id"], request.idx): request.arguments[1] for request in requests(again)}
    for request, seed in zip(asked, seeds, strict=True):
        if request.idx < 2:  # whatever else is asked, and under each policy
            assert kept[request.doc["id"], request.idx]["custom_params"]["kv_seed"] == seed


def test_without_the_plugin_requests_are_plain() -> None:
    for request in requests(load("kvp_aime25")):
        assert request.arguments[1].keys() == {"until", "do_sample", "temperature", "top_p", "top_k", "max_gen_toks"}


def test_the_parts_divide_a_task() -> None:
    ids = {part: [doc["id"] for doc in load("kvp_math500", split=part).eval_docs] for part in ("all", "dev", "confirm")}
    assert ids["dev"]
    assert ids["confirm"]
    assert sorted(ids["dev"] + ids["confirm"]) == sorted(ids["all"])
    assert {part_of(identifier) for identifier in ids["dev"]} == {"dev"}


@pytest.mark.parametrize(
    ("metadata", "generation", "keywords", "sentence"),
    [
        pytest.param({}, {}, {"cache_requests": True}, "^--cache_requests would mix the requests of dif", id="cache"),
        pytest.param({}, {"max_new_tokens": 9}, {}, "^max_new_tokens of --gen_kwargs would be ignored", id="limit"),
        pytest.param({}, {"do_sample": False}, {}, "^do_sample is off, but", id="not greedy"),
        pytest.param({"repeats": 2}, {"temperature": 0.0}, {}, "^at temperature 0 the 2 samples", id="copies"),
        pytest.param({"context_length": 32768}, {}, {}, "^a prompt of up to .* exceed the context length", id="room"),
        pytest.param({"max_model_len": 9000}, {}, {}, "exceed the context length of 9000, and", id="room, other name"),
        pytest.param({"enable_thinking": False}, {}, {}, "^enable_thinking is for the model's chat", id="thinking"),
    ],
)
def test_a_run_that_would_not_be_what_it_says_is_refused(
    metadata: dict[str, Any], generation: dict[str, Any], keywords: dict[str, Any], sentence: str
) -> None:
    task = load("kvp_math500", **metadata)
    task.set_config("generation_kwargs", generation, update=True)  # as --gen_kwargs does
    with pytest.raises(TaskError, match=sentence):
        task.build_all_requests(**keywords)


@pytest.mark.parametrize("metadata", [{"split": "test"}, {"spilt": "dev"}, {"think_end_token": "</think>"}])
def test_wrong_metadata_is_refused_as_the_task_is_made(metadata: dict[str, Any]) -> None:
    with pytest.raises(TaskError):
        load("kvp_math500", **metadata)


def test_a_missing_file_is_refused_as_the_task_is_made(folder: Path) -> None:
    (folder / "aime26.jsonl").unlink()
    with pytest.raises(TaskError, match=r"holds no file aime26\.jsonl; put it there, or unset KVPOLICY_DATA"):
        load("kvp_aime26")


@pytest.mark.parametrize("name", ["kvp_math500", "kvp_gsm8k_sample"])
def test_a_missing_grader_is_noticed_as_the_task_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(TaskError, match=r"needs math-verify"):
        load(name)


def test_predictions_alone_are_not_graded() -> None:
    task = load("kvp_math500")
    task.override_metric("bypass")  # as --predict_only does
    assert task.process_results(task.eval_docs[0], ["\\boxed{100}"]).keys() == {"bypass"}


def test_the_group_holds_all_tasks() -> None:
    entry = problems.manager().task_index["kvp_reasoning"]
    assert entry.cfg["task"] == [*TASKS, "kvp_livecodebench_v6"]
