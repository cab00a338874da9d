"""Reading the responses of one arm, from files as lm-eval writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.split import part_of
from kvpolicy.reports.ab.responses import Key, read_arm
from kvpolicy.reports.lmeval_output import OutputError
from tests.reports.ab.runs import TASK, digest, full, record, row, sample, write

LONE = {"responses": None}  # a task that logs metrics of a single response


def test_each_response_is_read_with_its_verdict_flags_and_cache(tmp_path: Path) -> None:
    rows = [row(), row("no_answer", truncated=True, looped=True, tokens=300), row("wrong", garbage=True)]
    records = [record(steps=200), record(steps=300), record(steps=90)]
    write(tmp_path, [sample(4, rows, records)], kv_policy="vase-dkv", kv_budget=64)
    arm = read_arm("small", tmp_path)
    assert arm.tasks == (TASK,)
    assert arm.asked[TASK] == {"pretrained": "org/model", "kv_policy": "vase-dkv", "kv_budget": 64}
    first, second, third = arm.of_task(TASK)
    assert [response.correct for response in (first, second, third)] == [True, False, False]
    assert [response.verdict for response in (first, second, third)] == ["correct", "no_answer", "wrong"]
    assert second.flags == {"truncated": True, "looped": True, "garbage": False, "unfinished_thinking": False}
    assert third.flags["garbage"] is True
    assert second.tokens == 300
    assert [response.record for response in (first, second, third)] == records
    assert second.key == Key(TASK, sample(4, rows)["doc_hash"], 1)
    assert second.identifier == "test/algebra/4.json"
    assert second.prompt_hash == digest("What is 4 + 1?")
    assert len({response.text_hash for response in (first, second, third)}) == 3
    assert json.loads(first.settings) == {"temperature": 0.6}  # without the seed, which is each response's own


def test_responses_come_in_the_order_of_their_keys_whatever_that_of_the_file(tmp_path: Path) -> None:
    samples = [sample(number, [row(), row()]) for number in (3, 1, 2)]
    write(tmp_path / "a", samples)
    write(tmp_path / "b", samples[::-1])
    orders = [list(read_arm(name, tmp_path / name).responses) for name in "ab"]
    assert orders[0] == orders[1] == sorted(orders[0])
    assert [key.repeat for key in orders[0]] == [0, 1] * 3


def test_a_document_that_stands_twice_is_one_problem_with_more_repeats(tmp_path: Path) -> None:
    write(tmp_path, [sample(1, [row()]), sample(1, [row("wrong")], doc_id=9), sample(2, [row()])])
    keys = list(read_arm("arm", tmp_path).responses)
    assert len({key.doc_hash for key in keys}) == 2
    assert sorted(key.repeat for key in keys) == [0, 0, 1]


def test_several_responses_to_one_request_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, [sample(1, [row(), row("wrong")], filtered_resps=[["one", "two"]])])
    first, second = read_arm("arm", tmp_path).of_task(TASK)
    assert (first.correct, second.correct) == (True, False)
    assert first.text_hash == digest("one")


@pytest.mark.parametrize(("score", "correct"), [(1, True), (0, False), (1.0, True)])
def test_a_task_without_verdicts_has_its_score(tmp_path: Path, score: float, correct: bool) -> None:
    write(tmp_path, [sample(1, [row()], [full()], **LONE, exact_match=score, truncated=1)])
    (response,) = read_arm("arm", tmp_path).of_task(TASK)
    assert (response.correct, response.verdict, response.tokens) == (correct, None, None)
    assert response.flags == {"truncated": True, "looped": None, "garbage": None, "unfinished_thinking": None}
    assert response.record == full()


def test_a_verdict_goes_before_a_score_and_no_record_is_none(tmp_path: Path) -> None:
    write(tmp_path, [sample(1, [row("unparseable")], exact_match=1.0)])
    (response,) = read_arm("arm", tmp_path).of_task(TASK)
    assert not response.correct
    assert response.record is None


def test_unknown_flags_are_none_and_not_false(tmp_path: Path) -> None:
    write(tmp_path, [sample(1, [row(truncated=None, tokens=None)])])
    (response,) = read_arm("arm", tmp_path).of_task(TASK)
    assert response.flags["truncated"] is None
    assert response.tokens is None


def test_text_that_is_no_unicode_is_read(tmp_path: Path) -> None:
    write(tmp_path, [sample(1, [row()], filtered_resps=["half of an emoji: \ud83d"])])
    assert read_arm("arm", tmp_path).of_task(TASK)[0].correct


def test_a_part_of_the_split(tmp_path: Path) -> None:
    write(tmp_path, [sample(number, [row()]) for number in range(40)])
    parts = {part: read_arm("arm", tmp_path, part).responses for part in ("dev", "confirm")}
    assert len(parts["dev"]) + len(parts["confirm"]) == 40
    for part, responses in parts.items():
        assert responses
        assert {part_of(str(response.identifier)) for response in responses.values()} == {part}


def test_a_part_without_problems_and_documents_without_ids_are_refused(tmp_path: Path) -> None:
    confirm = next(number for number in range(99) if part_of(f"test/algebra/{number}.json") == "confirm")
    write(tmp_path / "one", [sample(confirm, [row()])])
    with pytest.raises(OutputError, match=r"arm x: none of the problems in .* is in the dev part"):
        read_arm("x", tmp_path / "one", "dev")
    write(tmp_path / "two", [sample(1, [row()], doc={"question": "1 + 1"})])
    with pytest.raises(OutputError, match=f"arm x: the documents of {TASK} have no id"):
        read_arm("x", tmp_path / "two", "dev")
    assert len(read_arm("x", tmp_path / "two").responses) == 1


@pytest.mark.parametrize(
    ("logged", "message"),
    [
        (sample(1, [row(), row()], responses=[row()]), "logs 1 verdicts for 2 responses"),
        (sample(1, [row(), row()], kv_policy=[record()]), "logs 1 kv_policy records for 2 responses"),
        (sample(1, [row(), row()], kv_policy=record()), "logs 1 kv_policy records for 2 responses"),
        (sample(1, [row(), row()], **LONE), "logs one exact_match for 2 responses; run a kvp_ task"),
        (
            sample(1, [row()], **LONE, exact_match=0.5),
            "exact_match of a response must be 0 or 1 to be compared, got 0.5",
        ),
    ],
)
def test_a_sample_that_does_not_speak_of_each_response_is_refused(
    tmp_path: Path, logged: dict[str, Any], message: str
) -> None:
    write(tmp_path, [logged])
    with pytest.raises(OutputError, match=f"{TASK}: .*{message}"):
        read_arm("arm", tmp_path)


def test_a_task_without_any_score_is_refused(tmp_path: Path) -> None:
    logged = sample(1, [row()], **LONE)
    del logged["exact_match"]
    write(tmp_path, [logged])
    with pytest.raises(OutputError, match="logs neither responses nor exact_match or acc"):
        read_arm("arm", tmp_path)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    for model in ("org/one", "org/two"):
        write(tmp_path, [sample(1, [row()])], model=model)
    with pytest.raises(OutputError, match=rf"holds {TASK} of several models \(org/one, org/two\)"):
        read_arm("arm", tmp_path)


def test_lm_eval_itself_writes_what_is_read(tmp_path: Path) -> None:
    loggers = pytest.importorskip("lm_eval.loggers")
    tracker = loggers.EvaluationTracker(output_path=str(tmp_path))
    tracker.general_config_tracker.model_source = "sglang"
    tracker.general_config_tracker.model_name = "org/model"
    tracker.general_config_tracker.model_name_sanitized = "org__model"
    logged = sample(1, [row(), row("wrong")], [record(), record(steps=50)])
    logged["arguments"] = [tuple(each.values()) for each in logged["arguments"].values()]
    config = {"model_args": {"kv_policy": "vase-dkv"}}
    tracker.save_results_aggregated({"config": config, "model_name": "org/model"}, {"kvp_aime24": [logged]})
    tracker.save_results_samples("kvp_aime24", [logged])
    arm = read_arm("arm", tmp_path)
    assert arm.asked == {"kvp_aime24": {"kv_policy": "vase-dkv"}}
    first, second = arm.of_task("kvp_aime24")
    assert (first.correct, second.correct) == (True, False)
    assert second.record == record(steps=50)
    assert json.loads(second.settings) == {"temperature": 0.6}
