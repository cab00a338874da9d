"""Whole runs of stock lm-eval with its own SGLang model; only the engine behind it is made up."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.dummy import DummyLM

from kvpolicy.lmeval_tasks.errors import TaskError
from tests.lmeval_tasks.reasoning import problems
from tests.lmeval_tasks.reasoning.problems import TASKS
from tests.lmeval_tasks.reasoning.stock_sglang import CONTEXT, EOS, Reply, Tokenizer, model

FULL = {"kv_policy": "full"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOLICY_DATA", str(problems.write(tmp_path)))
    # A report on compilers and packages that lm-eval adds to the results takes it seconds.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _results: None)


def by_seed(prompt: str, settings: dict[str, Any]) -> str:
    """A response that depends on the prompt and the seed alone, right one time in two."""
    drawn = random.Random(f"{prompt}{settings['custom_params']['kv_seed']}")
    number = int(prompt.partition(" + ")[0].split()[-1].strip("$"))
    answer = drawn.choice("ABCD") if "\nA) " in prompt else str(number + 100 + drawn.randrange(2))
    return f"Sample {drawn.random()}: \\boxed{{{answer}}}"


class Dummy(DummyLM):  # type: ignore[misc]
    """lm-eval's model that always says the same, without the tokenizer that it would fetch from the hub."""

    tokenizer = None


def evaluate(lm: Any, tasks: Sequence[str], metadata: dict[str, Any] | None = None, **keywords: Any) -> Any:
    manager = problems.manager(**(FULL if metadata is None else metadata))
    return simple_evaluate(lm, tasks=list(tasks), task_manager=manager, **{"bootstrap_iters": 10, **keywords})


def texts_of(evaluated: Any, task: str) -> list[list[str]]:
    return [list(itertools.chain(*sample["resps"])) for sample in evaluated["samples"][task]]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs(name: str) -> None:
    evaluated = evaluate(Dummy(), [name], metadata={}, limit=2)
    results = evaluated["results"][name]
    assert results["no_answer,none"] == 1.0
    assert results["exact_match,none"] == 0.0
    assert len(evaluated["samples"][name]) == 2
    repeats = evaluated["configs"][name]["repeats"]
    assert results["responses,none"] == 2 * repeats
    assert [len(sample["responses"]) for sample in evaluated["samples"][name]] == [repeats, repeats]


def test_the_engine_is_sent_each_sample_with_its_own_seed() -> None:
    lm = model(by_seed)
    evaluate(lm, ["kvp_aime25"], FULL | {"repeats": 3}, apply_chat_template=True)
    (call,) = lm.model.calls  # batch_size=auto: all at once
    assert len(call) == 3 * problems.COUNT
    seeds = [settings.pop("custom_params")["kv_seed"] for _, settings in call]
    assert len(set(seeds)) == len(seeds)
    for prompt, settings in call:
        assert prompt.startswith("<|im_start|>user\nWhat is $")
        assert prompt.endswith(f"{EOS}\n<|im_start|>assistant\n")
        assert settings == {
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "max_new_tokens": 32768,
            "stop": [EOS],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="again"),
        pytest.param({"batch_size": 1}, id="one by one"),
        pytest.param({"batch_size": 4}, id="batches that part the samples of a problem"),
        pytest.param({"others": ["kvp_math500", "kvp_gpqa_diamond"]}, id="among other tasks"),
        pytest.param({"metadata": {"kv_policy": "vase-dkv", "kv_budget": 128}}, id="another policy"),
        pytest.param({"metadata": {"subset": 2, **FULL}}, id="fewer problems"),
    ],
)
def test_samples_differ_from_each_other_and_repeat_in_every_run(changes: dict[str, Any]) -> None:
    first = evaluate(model(by_seed), ["kvp_aime24"])
    kept = {sample["doc"]["id"]: sample["resps"] for sample in first["samples"]["kvp_aime24"]}
    for texts in texts_of(first, "kvp_aime24"):
        assert len(set(texts)) == 8
    lm = model(by_seed, batch_size=changes.get("batch_size", "auto"))
    second = evaluate(lm, ["kvp_aime24", *changes.get("others", [])], changes.get("metadata"))
    assert second["samples"]["kvp_aime24"]
    for sample in second["samples"]["kvp_aime24"]:
        assert sample["resps"] == kept[sample["doc"]["id"]]


def test_another_seed_gives_other_samples() -> None:
    runs = [evaluate(model(by_seed), ["kvp_aime24"], FULL | {"kv_seed": seed}) for seed in (0, 1)]
    texts = [set(itertools.chain(*texts_of(run, "kvp_aime24"))) for run in runs]
    assert texts[0].isdisjoint(texts[1])


def test_accuracy_is_a_mean_of_means_with_an_error_over_documents() -> None:
    evaluated = evaluate(model(by_seed), ["kvp_aime25"])
    shares = []
    for sample in evaluated["samples"]["kvp_aime25"]:
        right = [f"\\boxed{{{sample['target']}}}" in text for text in itertools.chain(*sample["resps"])]
        assert [row["verdict"] == "correct" for row in sample["responses"]] == right
        assert sample["exact_match"] == sum(right) / 8
        shares.append(sum(right) / 8)
    assert 0 < statistics.fmean(shares) < 1
    results = evaluated["results"]["kvp_aime25"]
    assert results["exact_match,none"] == pytest.approx(statistics.fmean(shares))
    assert results["exact_match_stderr,none"] == pytest.approx(statistics.stdev(shares) / math.sqrt(len(shares)))
    assert results["kv_policy,none"] == 0.5
    assert results["responses,none"] == 8 * problems.COUNT


def test_a_response_cache_keeps_no_sample_for_another(tmp_path: Path) -> None:
    """lm-eval answers equal requests from its cache, unless they sample."""
    runs = [
        evaluate(model(by_seed), ["kvp_aime24"], FULL | {"kv_seed": seed}, use_cache=str(tmp_path / "cache"))
        for seed in (0, 1)
    ]
    texts = [texts_of(run, "kvp_aime24") for run in runs]
    assert all(len(set(samples)) == 8 for samples in texts[0])
    assert texts[0] != texts[1]


def test_settings_of_the_command_line_reach_the_engine() -> None:
    lm = model(lambda *_: "\\boxed{100}")
    chosen = {"temperature": 0.0, "max_gen_toks": 50, "custom_params": {"kv_policy": "random", "kv_seed": 4}}
    evaluate(lm, ["kvp_math500"], {"subset": 1}, gen_kwargs=chosen)
    ((_, settings),) = lm.model.calls[0]
    assert settings["max_new_tokens"] == 50
    assert settings["temperature"] == 0.0
    assert settings["custom_params"]["kv_policy"] == "random"


def opened_and_cut(_prompt: str, _settings: dict[str, Any]) -> str:
    return "It may be \\boxed{100}, but let me check. " * 10


@pytest.mark.parametrize(
    ("tokenizer", "reply", "metadata", "unfinished"),
    [
        pytest.param(Tokenizer(opening="<think>\n"), opened_and_cut, {}, 1.0, id="the template opens the thinking"),
        pytest.param(Tokenizer(), opened_and_cut, {"enable_thinking": True}, 1.0, id="the run says that it thinks"),
        pytest.param(Tokenizer(), lambda *given: "<think>" + opened_and_cut(*given), {}, 1.0, id="the text says so"),
        pytest.param(Tokenizer(), opened_and_cut, {"enable_thinking": False}, 0.0, id="it does not think"),
        pytest.param(Tokenizer(), opened_and_cut, {}, 0.0, id="nobody says that it thinks"),
    ],
)
def test_thoughts_that_were_cut_off_are_no_answer(
    tokenizer: Tokenizer, reply: Reply, metadata: dict[str, Any], unfinished: float
) -> None:
    lm = model(reply, tokenizer)
    keywords = {"apply_chat_template": True, "gen_kwargs": {"max_gen_toks": 100}}
    evaluated = evaluate(lm, ["kvp_math500"], FULL | {"subset": 1} | metadata, **keywords)
    results = evaluated["results"]["kvp_math500"]
    assert results["unfinished_thinking,none"] == unfinished
    assert results["no_answer,none"] == unfinished
    assert results["truncated,none"] == 1.0
    ((prompt, _),) = lm.model.calls[0]
    assert prompt.endswith("</think>\n\n") == (metadata.get("enable_thinking") is False)


@pytest.mark.parametrize("arguments", [{}, {"context_length": 1000}, {"max_model_len": 1000}])
def test_a_prompt_that_would_be_cut_is_refused_before_anything_is_generated(arguments: dict[str, int]) -> None:
    lm = model(by_seed, **arguments)

    def prompt_of(max_gen_toks: int) -> str:
        """What the engine is sent; Tokenizer makes one token of each character."""
        metadata = FULL | {"subset": 1, "repeats": 1}
        evaluate(lm, ["kvp_aime25"], metadata, apply_chat_template=True, gen_kwargs={"max_gen_toks": max_gen_toks})
        ((prompt, settings),) = lm.model.calls.pop()
        assert settings["max_new_tokens"] == max_gen_toks
        return str(prompt)

    prompt = prompt_of(100)
    room = next(iter(arguments.values()), CONTEXT) - len(prompt)
    assert prompt_of(room) == prompt
    with pytest.raises(TaskError, match=f"^a prompt of {len(prompt)} tokens and max_gen_toks={room + 1} exceed"):
        prompt_of(room + 1)
    assert not lm.model.calls


def test_lm_eval_cuts_prompts_without_saying_so() -> None:
    """The reason for the refusal above; it can go if this ever fails."""
    lm = model(lambda *_: "", context_length=1000)
    context = "Which of these is kept? " * 50
    lm.generate_until([Instance("generate_until", {}, (context, {"until": [], "max_gen_toks": 100}), 0)])
    ((prompt, _),) = lm.model.calls[0]
    assert context.endswith(prompt)
    assert len(prompt) == 900
