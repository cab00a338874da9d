"""The parts of benchmarks/ablation.py that need no engine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablation_kl
import ablation_observer
from ablation_free import free_running
from ablation_observer import EVICTIONS, GREEDY, KL
from ablation_study import Cell, Problem, Refused, Study, prepare, read_problems
from ablation_table import free_table, kl_table, report

VOCABULARY = 50
PROMPTS = [[1, 2, 3], [4, 5]]
STOPS = (6, 4)  # tokens after which each prompt's greedy text ends


class FakeEngine:
    """Answers like an engine with a logit processor: one row of logits a step, the arm adding noise after step 2."""

    def __init__(self, steps_too_many: int = 1) -> None:
        self.steps_too_many = steps_too_many  # overlap scheduling runs one more than it needs
        self.disk: list[int] = []

    def logits(self, prompt: list[int], step: int, arm: str) -> torch.Tensor:
        rows = torch.randn(2, 10, VOCABULARY, generator=torch.Generator().manual_seed(sum(prompt)))
        return 3 * rows[0, step] + (rows[1, step] if arm == "evict" and step >= 2 else 0)

    def generate(self, ids: list[list[int]], parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
        texts: list[list[int]] = [[] for _ in ids]
        customs = [request["custom_params"] | {"__req__": None} for request in parameters]
        for step in range(max(request["max_new_tokens"] for request in parameters) + self.steps_too_many):
            for text, prompt, request, custom in zip(texts, ids, parameters, customs, strict=True):
                most = request["max_new_tokens"]
                stop = most if request.get("ignore_eos") else min(most, STOPS[PROMPTS.index(prompt)])
                if step < stop + self.steps_too_many:
                    arm = custom["kv_policy"]
                    row = self.logits(prompt, step, arm)[None].clone()
                    evictions = 0 if arm == "full" else step // 2
                    said = int(ablation_observer.observe(row, [custom], [evictions])[0].argmax())
                    if step < stop:
                        text.append(said)
        folder = Path(customs[0][ablation_observer.STEPS]).parent
        self.disk.append(sum(file.stat().st_size for file in folder.iterdir()))
        report = {"retractions": 0, "evictions": 1}
        return [{"output_ids": text, "meta_info": {"kv_policy": report}} for text in texts]


def cells(*arms: str) -> list[list[dict[str, Any]]]:
    return [[{"kv_policy": arm, "kv_seed": prompt} for prompt in range(len(PROMPTS))] for arm in arms]


def test_kl_is_that_of_torch() -> None:
    rows = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = torch.nn.functional.kl_div(rows[1], rows[0], log_target=True, reduction="sum")
    assert ablation_observer.kl(rows[0], rows[1]) == pytest.approx(float(expected), rel=1e-5)
    assert ablation_observer.kl(rows[0], rows[0]) == 0


@pytest.mark.parametrize("steps_too_many", [0, 1])
def test_arms_are_compared_on_the_text_of_the_full_cache(steps_too_many: int) -> None:
    engine = FakeEngine(steps_too_many)
    found = {
        (cell, prompt): row
        for cell, prompt, row in ablation_kl.measure(engine.generate, PROMPTS, cells("full", "evict"), 10)
    }
    assert len(found) == 4
    for prompt, steps in enumerate(STOPS):
        full, arm = found[0, prompt], found[1, prompt]
        assert (full["steps_all"], full["kl_all"], full["agree_all"]) == (steps, 0, 1)
        assert (full["steps_after"], full["kl_after"], full["agree_after"]) == (0, None, None)
        kls = []
        for step in range(steps):
            rows = [engine.logits(PROMPTS[prompt], step, name).log_softmax(-1) for name in ("full", "evict")]
            kls.append(ablation_observer.kl(rows[0], rows[1]))
        assert kls[:2] == [0, 0]
        assert arm["kl_all"] == pytest.approx(np.mean(kls))
        assert arm["kl_after"] == pytest.approx(np.mean(kls[2:]))
        assert arm["kl_once"] == pytest.approx(np.mean(kls[2:4]))
        assert (arm["steps_after"], arm["steps_once"]) == (steps - 2, 2)


def test_the_log_probabilities_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = FakeEngine()
    rows = ablation_kl.measure(engine.generate, PROMPTS, cells("full"), 10)
    assert next(rows) is not None
    assert list(tmp_path.iterdir()) != []
    list(rows)
    assert list(tmp_path.iterdir()) == []
    assert max(engine.disk) < 2 * (4 * 10 * VOCABULARY + 3000)


def test_a_step_that_is_counted_twice_is_noticed() -> None:
    class Chunked(FakeEngine):
        """Shows the logit processor a chunk of the prompt first."""

        def generate(self, ids: list[list[int]], parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for request in parameters:
                custom = request["custom_params"]
                ablation_observer.observe(torch.randn(1, VOCABULARY), [custom], [0])
            return super().generate(ids, parameters)

    with pytest.raises(AssertionError):
        list(ablation_kl.measure(Chunked().generate, PROMPTS, cells("full"), 10))


def test_a_missed_step_is_noticed() -> None:
    table = np.zeros((3, 3))
    table[:, GREEDY] = [7, 8, 9]
    ablation_kl.check(table, [7, 8, 9], table[:, GREEDY])
    with pytest.raises(AssertionError, match="not those of the text"):
        ablation_kl.check(table, [7, 8, 8], table[:, GREEDY])
    table[1] = np.nan
    with pytest.raises(AssertionError, match="missed a step"):
        ablation_kl.check(table, [7, 8, 9], np.array([7, 8, 9]))


def test_a_summary_splits_steps_by_evictions() -> None:
    table = np.zeros((4, 3))
    table[:, KL], table[:, GREEDY], table[:, EVICTIONS] = [0.0, 1.0, 2.0, 6.0], [1, 2, 3, 9], [0, 1, 1, 2]
    row = ablation_kl.summary(table, np.array([1, 2, 3, 4]))
    assert (row["kl_all"], row["kl_after"], row["kl_once"]) == (2.25, 3.0, 1.5)
    assert (row["agree_all"], row["agree_after"], row["agree_once"]) == (0.75, pytest.approx(2 / 3), 1.0)


def namespace(tmp_path: Path, **changed: Any) -> argparse.Namespace:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"id": 1, "question": "2 + 2?", "answer": "4"}) + "\n")
    defaults = {
        "model": str(tmp_path / "no-model"),
        "problems": problems,
        "limit": None,
        "arms": ["full", "random"],
        "budgets": [64],
        "period": 32,
        "tokens": 10,
        "samples": 0,
        "parts": ["free", "kl"],
        "group": 4,
        "output": tmp_path / "rows.jsonl",
    }
    return argparse.Namespace(**{**defaults, **changed})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"limit": 0}, "--limit must be at least 1"),
        ({"group": 0}, "--group must be at least 1"),
        ({"samples": -1}, "--samples must be at least 0"),
        ({"arms": ["rendom"]}, "did you mean 'random'"),
        ({"arms": ["random", "random"]}, "--arms names one of them twice"),
        ({"budgets": [64, 64]}, "--budgets names one of them twice"),
        ({"budgets": [64, 20]}, "leaves nothing to choose"),
        ({"problems": Path("nowhere.jsonl")}, "cannot be read"),
        ({"output": Path(__file__)}, "exists already"),
        ({}, "is neither a checkpoint folder nor a model"),
    ],
    ids=lambda value: next(iter(value), "model") if isinstance(value, dict) else "",
)
def test_what_cannot_run_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Refused, match=sentence) as refused:
        prepare(namespace(tmp_path, **changed))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "line 2 is no JSON object"),
        ("[]", "line 2 is no JSON object"),
        ('{"id": 1, "question": "?"}', "line 2 is no JSON object"),
        ('{"id": 1, "problem": "?", "answer": "p - q"}', "'p - q' is no number"),
    ],
)
def test_a_wrong_problem_is_refused_with_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"id": 1, "problem": "?", "answer": "1,000"}\n' + line + "\n")
    assert [problem.answer for problem in read_problems(path, 1)] == ["1,000"]
    with pytest.raises(Refused, match=sentence):
        read_problems(path, None)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").touch()
    with pytest.raises(Refused, match="is empty"):
        read_problems(tmp_path / "problems.jsonl", None)


def test_no_two_responses_of_an_arm_share_a_seed_and_all_arms_share_them(tmp_path: Path) -> None:
    study = Study(namespace(tmp_path, budgets=[64, 96]), [], [], [])
    places = [(problem, repeat) for problem in range(1319) for repeat in range(4)]
    seeds = [study.parameters(Cell("random", 64), *place)["kv_seed"] for place in places]
    assert len(set(seeds)) == len(places)
    assert seeds == [study.parameters(Cell("full", None), *place)["kv_seed"] for place in places]
    assert study.parameters(Cell("full", None), 0)["kv_budget"] == 96


def test_a_response_becomes_a_row(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    texts = ["The answer is 4.", "Wait, I am wrong.\n" * 9, "The answer is 5.", "!" * 200]

    class Engine:
        def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
            assert input_ids == [[1], [2, 3], [1], [2, 3]]
            sent.extend(sampling_params)
            report = dict.fromkeys(["evictions", "tokens_evicted", "retractions", "resident_mean", "full_mean"], 7)
            ends = ["stop", "length", "stop", "length"]
            meta = {"kv_policy": report, "completion_tokens": 3, "prompt_tokens": 2}
            return [
                {"text": text, "meta_info": {**meta, "finish_reason": {"type": end}}}
                for text, end in zip(texts, ends, strict=True)
            ]

    problems = [Problem("a", "2 + 2?", "4"), Problem("b", "3 + 3?", "6")]
    study = Study(namespace(tmp_path), [Cell("random", 64)], problems, [[1], [2, 3]])
    rows = list(free_running(Engine(), study, range(1, 3)))
    found = [[row[key] for key in ("problem", "repeat", "correct", "truncated", "looped", "garbage")] for row in rows]
    assert found == [
        ["a", 1, True, False, False, False],
        ["b", 1, False, True, True, False],
        ["a", 2, False, False, False, False],
        ["b", 2, False, True, True, True],
    ]
    assert all(request["temperature"] == 0.6 and request["top_p"] == 0.95 for request in sent)
    assert [request["custom_params"]["kv_seed"] for request in sent] == [10_000, 10_001, 20_000, 20_001]
    assert {request["custom_params"]["kv_policy"] for request in sent} == {"random"}


def test_tables() -> None:
    origin = {"model": "m", "dtype": "bfloat16", "period": 32, "token_limit": 9, "commit": "c"}
    origin |= {"sglang": "1", "torch": "2", "device": "x", "date": "today"}
    failing = {
        "truncated": False,
        "garbage": False,
        "tokens": 5,
        "evictions": 1,
        "resident_mean": 70.0,
        "full_mean": 80.0,
    }
    free = {"part": "free", "arm": "random", "budget": 64, "decoding": "greedy", "correct": True, **failing, **origin}
    rows: list[dict[str, Any]] = [{**free, "looped": looped} for looped in (True, False)]
    seen = {"evictions": 1, "steps_after": 2, "kl_all": 0.125, "kl_once": 0.5, "agree_after": 0.5, "agree_all": 0.75}
    unseen = {"evictions": 0, "steps_after": 0, "kl_all": 0.0, "kl_once": None, "kl_after": None, "agree_after": None}
    for problem, shift in enumerate((0.0, 0.25)):
        kl = {"part": "kl", "budget": 64, "problem": problem, **seen, **origin}
        rows += [{**kl, "arm": "random", "kl_after": 0.25 + shift}, {**kl, "arm": "evict", "kl_after": 0.75 + shift}]
        rows += [{**kl, "arm": "full", "budget": None, **unseen, "agree_all": 1.0}]
    assert "| random | 64 | greedy | 2/2 | 0/2 | 1/2 | 0/2 | 5.0 | 1.0 | 70.0 | 80.0 |" in free_table(rows[:2])
    table = kl_table(rows[2:])
    assert "| evict | 64 | 2/2 | 1.0 | 0.875 ± 0.12 | 0.5 ± 0 | 0.125 ± 0 | 0.5 ± 0 | 0.5 ± 0 |" in table
    assert "| random | 64 | 2/2 | 1.0 | 0.375 ± 0.12 | 0.5 ± 0 | 0.125 ± 0 | 0.5 ± 0 |  |" in table
    assert "| full again: the noise floor |  | 0/2 | 0.0 | 0 ± 0 | 0 ± 0 | 0 ± 0 | 1 ± 0 |  |" in table
    assert report(rows).endswith("sglang 1, torch 2; x; today")
    assert table not in report(rows[:2])
    assert table in report(rows)
