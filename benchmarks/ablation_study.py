"""What ablation.py runs: problems, prompts, arms and budgets, checked before any model is loaded."""

from __future__ import annotations

import argparse
import json
from decimal import InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.lmeval_tasks import answers

# In the words of the task kvp_gsm8k_sample.
INSTRUCTION = (
    "Question: {question}\nReason step by step, explain each step in a full sentence, "
    "and put the final number within \\boxed{{}}.\nAnswer:"
)


class Refused(ValueError):
    """Something that cannot be run; the message is one sentence."""


class Problem(NamedTuple):
    """One problem whose answer is a number."""

    id: str
    question: str
    answer: str


class Cell(NamedTuple):
    """One arm at one budget; the full cache has none."""

    arm: str
    budget: int | None


class Study(NamedTuple):
    """What is run; the full cache is the first of the cells."""

    args: argparse.Namespace
    cells: list[Cell]
    problems: list[Problem]
    prompts: list[list[int]]

    def parameters(self, cell: Cell, problem: int, repeat: int = 0) -> dict[str, Any]:
        """The `kv_` parameters of a request. Its seed differs between problems and repeats, not between arms."""
        budget = cell.budget or max(self.args.budgets)
        return {"kv_policy": cell.arm, "kv_budget": budget, "kv_seed": 10_000 * repeat + problem}

    @property
    def batch(self) -> int:
        """The largest number of requests that are sent at once."""
        problems = len(self.problems) * len(self.cells)
        free = problems * max(1, self.args.samples) if "free" in self.args.parts else 0
        kl = min(self.args.group, len(self.problems)) * len(self.cells) if "kl" in self.args.parts else 0
        return max(free, kl)


def prepare(args: argparse.Namespace) -> Study:
    """The study that the arguments describe.

    Raises
    ------
    Refused
        If it cannot be run.
    """
    for name, least in (("limit", 1), ("period", 1), ("tokens", 2), ("samples", 0), ("group", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise Refused(f"--{name} must be at least {least}, got {value}.")
    if args.output.exists():
        raise Refused(f"--output {args.output} exists already, and rows are never overwritten; name another file.")
    cells = _cells(args)
    problems = read_problems(args.problems, args.limit)
    return Study(args, cells, problems, tokenized(args.model, problems, args.tokens))


def _cells(args: argparse.Namespace) -> list[Cell]:
    from kvpolicy.sglang_plugin.config import KVPolicyConfig
    from kvpolicy.sglang_plugin.errors import KVPolicyError

    for name, values in (("arms", args.arms), ("budgets", args.budgets)):
        if len(set(values)) < len(values):
            raise Refused(f"--{name} names one of them twice: {' '.join(map(str, values))}.")
    arms = ["full", *(arm for arm in args.arms if arm != "full")]
    try:
        for budget in args.budgets:
            KVPolicyConfig("|".join(arms), budget=budget, period=args.period)
    except KVPolicyError as error:
        raise Refused(str(error)) from None
    return [Cell("full", None), *(Cell(arm, budget) for arm in arms[1:] for budget in args.budgets)]


def read_problems(path: Path, limit: int | None) -> list[Problem]:
    """The first `limit` problems of a JSON-lines file with `id`, `question` or `problem`, and `answer`.

    Raises
    ------
    Refused
        If there are none, or one of them is not of this form, or its answer is no number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--problems {path} cannot be read: {error}.") from None
    problems = [_problem(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    if not problems:
        raise Refused(f"--problems {path} is empty.")
    return problems


def _problem(line: str, place: str) -> Problem:
    try:
        row = json.loads(line)
        question = row["question"] if "question" in row else row["problem"]
        problem = Problem(str(row["id"]), str(question), str(row["answer"]))
        answers.is_correct("", problem.answer)  # reads it as a number
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{place} is no JSON object with id, question (or problem) and answer.") from None
    except InvalidOperation:
        raise Refused(
            f"{place}: its answer {problem.answer!r} is no number, and only numbers are graded here."
        ) from None
    return problem


def tokenized(model: str, problems: list[Problem], tokens: int) -> list[list[int]]:
    """The problems as prompts of a chat model, with room for so many tokens of an answer.

    Raises
    ------
    Refused
        If there is no such model, it has no chat template, or its context is too short.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer, config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        raise Refused(
            f"--model {model} is neither a checkpoint folder nor a model that the hub gives; one is built by: "
            "python examples/smollm2_checkpoint.py out/models/SmolLM2-135M-Instruct"
        ) from None
    if tokenizer.chat_template is None:
        raise Refused(f"--model {model} has no chat template, and only chat models are asked here.")
    prompts: list[list[int]] = []
    for problem in problems:
        chat = [{"role": "user", "content": INSTRUCTION.format(question=problem.question)}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
    longest = max(map(len, prompts)) + tokens
    if longest > config.max_position_embeddings:
        raise Refused(
            f"--tokens {tokens} is too much: with the longest prompt that makes {longest} tokens, but the context of "
            f"{model} is {config.max_position_embeddings}."
        )
    return prompts
