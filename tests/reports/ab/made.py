"""Arms of a comparison that are made up, and a stand-in for lm-eval that makes them when it is run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpolicy.lmeval_tasks.split import part_of
from tests.reports.ab.runs import BYTES, DATE, Row, full, record, row, sample, write

ROOT = Path(__file__).resolve().parents[3]
FORMAT = {
    "kv_quant": "range-int4",
    "kv_quant_group": 64,
    "kv_quant_keys": "none",
    "kv_protect": 0.05,
    "bits_per_element": 6.5,
    "kv_bytes_per_token_full": BYTES,
    "protected_end": 0.06,
    "protected_rows_denied": 0,
}


def steps_of(problem: int, repeat: int) -> int:
    """Decode steps of a response, the same under each arm."""
    return 40 + 40 * (problem % 11) + 5 * repeat


def completed(kv: dict[str, Any]) -> dict[str, Any]:
    """A record with what the engine adds of time and of the end of the whole cache."""
    return kv | {"eviction_seconds": 0.25 if kv["evictions"] else 0.0, "kv_bytes_full_end": BYTES * kv["full_end"]}


def whole(prompt: int, steps: int) -> dict[str, Any]:
    """The record of an uncompressed response."""
    return completed(full(prompt, steps))


def evicting(budget: int) -> Callable[[int, int], dict[str, Any]]:
    """Records of an evicting policy."""
    return lambda prompt, steps: completed(record(prompt, steps, budget))


def packed(prompt: int, steps: int, share: float = 0.4) -> dict[str, Any]:
    """The record of a response in low bits: the same tokens, and a share of the bytes."""
    kv = whole(prompt, steps)
    stored = {name: share * value for name, value in kv.items() if name.startswith("kv_bytes") and "full" not in name}
    return kv | stored | FORMAT


def samples_of(
    verdicts: Sequence[Sequence[str]],
    records: Callable[[int, int], dict[str, Any]] | None,
    numbers: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Documents, each with its responses' verdicts."""
    made = []
    for number, of_problem in zip(numbers or range(len(verdicts)), verdicts, strict=True):
        steps = [steps_of(number, repeat) for repeat in range(len(of_problem))]
        rows: list[Row] = [row(verdict, tokens=n + 1) for verdict, n in zip(of_problem, steps, strict=True)]
        made.append(sample(number, rows, None if records is None else [records(20, n) for n in steps]))
    return made


def main(argv: Sequence[str]) -> int:
    """Do as lm-eval: read its arguments, note them in $AB_CALLS, and save results; fail for the arm of $AB_FAIL."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    for name in ("model", "model_args", "tasks", "include_path", "metadata", "batch_size", "output_path", "samples"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--gen_kwargs")
    parser.add_argument("--log_samples", action="store_true")
    parser.add_argument("--apply_chat_template", action="store_true")
    args = parser.parse_args(argv)
    with Path(os.environ["AB_CALLS"]).open("a", encoding="utf-8") as calls:
        calls.write(json.dumps(list(argv)) + "\n")
    arguments = dict(each.split("=", 1) for each in args.model_args.split(","))
    metadata = dict(each.split("=", 1) for each in args.metadata.split(","))
    print("starting\rRunning: 50%\rRunning: 100%")
    if arguments.get("kv_budget") == os.environ.get("AB_FAIL") and "AB_FAIL" in os.environ:
        print("Traceback (most recent call last):\n  File x\nRuntimeError: out of memory\nleaked objects")
        return 3
    for task in args.tasks.split(","):
        _save(Path(args.output_path), task, arguments, metadata, json.loads(args.samples or "{}").get(task))
    return 0


def _save(
    folder: Path, task: str, arguments: dict[str, str], metadata: dict[str, str], chosen: list[int] | None
) -> None:
    numbers = [n for n in range(400) if metadata["split"] in ("all", part_of(f"test/algebra/{n}.json"))]
    numbers = numbers[: int(metadata.get("subset", 12))]
    numbers = numbers if chosen is None else [numbers[each] for each in chosen]
    records = packed if "kv_quant" in arguments else evicting(int(arguments.get("kv_budget", 0)))
    records = whole if arguments == {**arguments, "kv_policy": "full"} and "kv_quant" not in arguments else records
    hard = 3 if "kv_budget" in arguments else 5
    verdicts = [
        ["wrong" if (n + k) % hard == 0 else "correct" for k in range(int(metadata.get("repeats", 1)))] for n in numbers
    ]
    write(folder, samples_of(verdicts, records, numbers), task=task, model=arguments["pretrained"], **arguments)
    saved = folder / arguments["pretrained"].replace("/", "__") / f"results_{DATE}.json"
    results = json.loads(saved.read_text(encoding="utf-8"))
    results |= {"total_evaluation_time_seconds": "12.5", "task_hashes": {task: "abc"}, "chat_template_sha": "def"}
    found = [path.name for path in saved.parent.glob("samples_*")]
    names = [name.removeprefix("samples_").removesuffix(f"_{DATE}.jsonl") for name in found]
    results |= {
        "configs": {name: {} for name in names},
        "n-samples": {name: {"effective": len(numbers)} for name in names},
    }
    saved.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
