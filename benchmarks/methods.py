"""Every method on the same problems through lm-eval, in one engine.

SGLang is started once with all methods named; lm-eval's own model object then evaluates the task once per method, and
each request chooses its method (`custom_params`). Printed and written as JSON lines: correct answers, how the responses
failed, and what happened to the cache. The default model is small and mostly wrong: it shows that every method runs
and evicts, not which is better.

    python benchmarks/methods.py                                       # SmolLM2, 8 problems of the GSM8K sample
    python benchmarks/methods.py --model Qwen/Qwen3-4B --budget 1024 --period 64 --tokens 8192 --limit 200
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpolicy.lmeval_tasks.failures import garbage, looped
from kvpolicy.sglang_plugin.arms import parse_arms
from kvpolicy.sglang_plugin.errors import KVPolicyError

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions
from default_model import smollm2
from methods_arms import small_arms
from number_tables import numbers_table

ROOT = Path(__file__).parents[1]
TASK = "kvp_gsm8k_sample"


def row_of(arm: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What one method's responses say."""
    texts = [sample["resps"][0][0] for sample in samples]
    records = [sample["kv_policy"] for sample in samples]
    count = len(samples)
    return {
        "arm": arm,
        "responses": count,
        "correct": sum(sample["exact_match"] for sample in samples),
        "truncated": sum(sample["truncated"] for sample in samples),
        "looped": sum(map(looped, texts)),
        "garbage": sum(map(garbage, texts)),
        "compacted": sum(record["evictions"] > 0 for record in records),
        "evictions": sum(record["evictions"] for record in records),
        "resident_mean": sum(record["resident_mean"] for record in records) / count,
        "resident_peak": max(record["resident_peak"] for record in records),
        "held_share": sum(record["kv_bytes_mean"] / record["kv_bytes_full_mean"] for record in records) / count,
        "tokens_read_mean": sum(record.get("tokens_read_mean", record["resident_mean"]) for record in records) / count,
        "seconds_evicting": sum(record["eviction_seconds"] for record in records),
        "retractions": sum(record["retractions"] for record in records),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("correct", "truncated", "looped", "garbage", "compacted", "evictions")
    shown = numbers_table("Methods", ("arm", *columns, "resident", "read", "of the bytes"))
    for row in rows:
        counts = (f"{row[name]}/{row['responses']}" if name != "evictions" else str(row[name]) for name in columns)
        measured = (f"{row['resident_mean']:.0f}", f"{row['tokens_read_mean']:.0f}", f"{row['held_share']:.0%}")
        shown.add_row(row["arm"].partition("[")[0] if len(row["arm"]) > 40 else row["arm"], *counts, *measured)
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--arms", help="as kv_policy names them (default: every method, fitted to small budgets)")
    parser.add_argument(
        "--statistics", type=Path, help="of kvpolicy calibrate, for the default arms (default: made of its text)"
    )
    parser.add_argument("--budget", type=int, default=128, help="kv_budget (default %(default)s)")
    parser.add_argument("--period", type=int, default=32, help="kv_period (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=320, help="of a response, at most (default %(default)s)")
    parser.add_argument("--limit", type=int, default=8, help="problems (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of weights and cache (default %(default)s)")
    parser.add_argument("--pool", type=int, default=16384, help="max_total_tokens (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "methods.jsonl", help="rows are appended to it")
    args = parser.parse_args()
    if args.model is None:
        args.model = str(smollm2())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.statistics is None and args.arms is None:
        args.statistics = args.out.with_suffix(".safetensors")
        command = ["calibrate", "--model", args.model, "--out", args.statistics, "--dtype", args.dtype, "--force"]
        subprocess.run([sys.executable, "-m", "kvpolicy.cli", *map(str, command)], check=True)
    args.arms = args.arms or "|".join(small_arms(args.statistics))
    try:
        for arm in parse_arms(args.arms, "").values():
            arm.check(args.budget, args.period)
    except KVPolicyError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = arguments()
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.sglang_causallms import SGLangLM
    from lm_eval.tasks import TaskManager

    arms = list(parse_arms(args.arms, ""))
    policies: dict[str, Any] = {"kv_policy": args.arms, "kv_budget": args.budget, "kv_period": args.period}
    model = SGLangLM(
        args.model,
        batch_size=args.batch,
        dtype=args.dtype,
        log_level="error",
        max_total_tokens=args.pool,
        max_running_requests=args.batch,
        disable_decode_cuda_graph=True,  # methods that read a part of the cache are not captured
        **policies,
    )
    tasks = TaskManager(include_path=str(ROOT / "lmeval_tasks"))
    provenance = {**conditions(), "model": Path(args.model).name, **policies, "tokens": args.tokens}
    rows: list[dict[str, Any]] = []
    try:
        with Progress(console=Console(stderr=True)) as progress, args.out.open("a") as file:
            for arm in progress.track(arms, description="methods"):
                choice = {"max_gen_toks": args.tokens, "custom_params": {"kv_policy": arm}}
                evaluated = simple_evaluate(
                    model,
                    tasks=[TASK],
                    limit=args.limit,
                    gen_kwargs=choice,
                    apply_chat_template=True,
                    task_manager=tasks,
                    bootstrap_iters=0,
                    verbosity="ERROR",
                )
                rows.append(row_of(arm, evaluated["samples"][TASK]))
                file.write(json.dumps({**rows[-1], **provenance, "kv_policy": arm}) + "\n")
                file.flush()
    finally:
        model.model.shutdown()
    console = Console()
    console.width = max(console.width, 120)
    console.print(table(rows))


if __name__ == "__main__":
    main()
