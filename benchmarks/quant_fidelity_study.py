"""What quant_fidelity.py runs: formats and prompts, checked before any model is loaded."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ablation_study import Problem, Refused, read_problems, tokenized
from default_model import smollm2

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning.documents import FOLDER, Source, load
from kvpolicy.lmeval_tasks.reasoning.options import Options
from kvpolicy.policies.options import parse_options
from kvpolicy.quant.cache_format import CacheFormat
from kvpolicy.sglang_plugin.config import config_from
from kvpolicy.sglang_plugin.errors import KVPolicyError

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "lmeval_tasks/gsm8k_sample/gsm8k_sample.jsonl"
# As the task kvp_gsm8k reads it.
GSM8K = Source("openai/gsm8k", "main", "test", "gsm8k.jsonl", prefix="gsm8k-test", answer_after="####")
FULL = "full"
OPTIONS = {"group": "kv_quant_group", "protect": "kv_protect", "keys": "kv_quant_keys"}
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
MOST_PROMPTS = 64  # where nobody says how many


class Format(NamedTuple):
    """A way to store the cache.

    name : as --formats has it; arguments : those of the engine; stored : fitted to the model, None for the full cache.
    """

    name: str
    arguments: dict[str, Any]
    stored: CacheFormat | None


class Study(NamedTuple):
    """What is run."""

    args: argparse.Namespace
    formats: list[Format]
    problems: list[Problem]
    prompts: list[list[int]]
    head_dim: int

    @property
    def settings(self) -> dict[str, Any]:
        """What rows must agree in to be of one table."""
        args = self.args
        return {
            "model": Path(args.model).name,
            "dtype": args.dtype,
            "prompts": len(self.prompts),
            "prompts_sha256": digest(self.prompts),
            "token_limit": args.tokens,
            "period": args.period,
            "batch": args.batch,
            "memory_fraction": args.memory,
        }


def digest(tokens: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def prepare(args: argparse.Namespace) -> Study:
    """The study that the arguments describe; where they name no model, the small one is built and named.

    Raises
    ------
    Refused
        If it cannot be run.
    """
    for name, least in (("prompts", 2), ("tokens", 2), ("period", 1), ("batch", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise Refused(f"--{name} must be at least {least}, got {value}.")
    if not 0 < args.memory < 1:
        raise Refused(f"--memory must lie between 0 and 1, got {args.memory}.")
    formats = [parse_format(text, args.period) for text in args.formats]
    names = [each.name for each in formats]
    if len(set(names)) < len(names):
        raise Refused(f"--formats names one of them twice: {' '.join(names)}.")
    problems = read(args.prompts)
    if args.model is None:
        args.model = str(smollm2())
    prompts = tokenized(args.model, problems, args.tokens)
    head_dim, vocabulary = shape_of(args.model)
    check_disk(args.out.parent, 4 * len(prompts) * args.tokens * vocabulary)
    return Study(args, [fitted(each, head_dim) for each in formats], problems, prompts, head_dim)


def parse_format(text: str, period: int) -> Format:
    """``full``, or a name of `kvpolicy.quant.cache_format` with options: ``int4[group:32;keys:int8]``.

    Raises
    ------
    Refused
        If there is no such format.
    """
    name = "".join(text.split())
    kind, bracket, rest = name.partition("[")
    if bracket and not rest.endswith("]"):
        raise Refused(f"--formats {text!r} must end with ']': format[name:value;name:value].")
    try:
        options = parse_options(rest.removesuffix("]"))
    except ValueError:
        raise Refused(f"--formats {text!r}: options are written format[name:value;name:value], each once.") from None
    if unknown := options.keys() - OPTIONS:
        raise Refused(f"--formats {text!r} has no option {min(unknown)}; there are {', '.join(OPTIONS)}.")
    arguments = {OPTIONS[option]: value for option, value in options.items()}
    if kind != FULL:
        arguments["kv_quant"] = kind
    try:
        config = config_from({"kv_policy": FULL, "kv_period": period, **arguments})
    except KVPolicyError as error:
        raise Refused(f"--formats {text!r}: {error}") from None
    assert config is not None
    return Format(name, arguments, config.cache_format)


def fitted(chosen: Format, head_dim: int) -> Format:
    """The format with its group chosen for the model, or `Refused`."""
    try:
        return chosen._replace(stored=chosen.stored and chosen.stored.fitted(head_dim))
    except ValueError as error:
        raise Refused(f"--formats {chosen.name!r}: {error}.") from None


def read(wanted: int | None) -> list[Problem]:
    """So many problems: those of the GSM8K sample, then those of gsm8k.jsonl in the folder that KVPOLICY_DATA names.

    Raises
    ------
    Refused
        If there are fewer, or the file cannot be read.
    """
    found = {problem.question.strip(): problem for problem in read_problems(SAMPLE, None)}
    if folder := os.environ.get(FOLDER):
        if not (Path(folder) / GSM8K.file).is_file():
            raise Refused(
                f"{FOLDER}={folder} holds no file {GSM8K.file}; put it there, or unset {FOLDER} to measure on the "
                f"{len(found)} problems of the sample alone."
            )
        try:
            documents = load(GSM8K, Options())
        except TaskError as error:
            raise Refused(str(error)) from None
        for document in documents:
            question = document["problem"].strip()
            found.setdefault(question, Problem(document["id"], question, document["answer"]))
    if wanted is not None and wanted > len(found):
        raise Refused(
            f"--prompts {wanted} is too many, there are {len(found)} problems; "
            f"with {FOLDER}=<folder> those of <folder>/{GSM8K.file} are used too."
        )
    return list(found.values())[: MOST_PROMPTS if wanted is None else wanted]


def shape_of(model: str) -> tuple[int, int]:
    """Channels of a head, and tokens of the vocabulary."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim), int(config.vocab_size)


def check_disk(folder: Path, needed: int) -> None:
    """Raise `Refused` unless the log-probabilities of all steps fit where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    if (free := shutil.disk_usage(folder).free) < needed:
        raise Refused(
            f"the log-probabilities of all steps take {needed / 2**30:.1f} GiB beside --out, but there are only "
            f"{free / 2**30:.1f} GiB free; ask for less with --prompts or --tokens, or name another --out."
        )
