"""How fast does SGLang decode with a policy, against stock SGLang?

Stock SGLang and an engine that has all policies run side by side, one batch of requests at a time, in turns, so that a
machine that changes its pace does so for all. A batch decodes to the largest number of tokens; the clock is also read
at the smaller ones, and each gives a row: tokens per second, resident tokens, KV bytes, and the share of the time that
went into evictions. Rows are appended to a file as they are measured.

    python benchmarks/decode.py                 # batch 1 and 8, 1024 and 2048 tokens: up to 40 minutes on two cores,
                                                # and a quarter of an hour more for every further policy
    python benchmarks/decode.py --quick         # batch 1 and 4, 64 and 128 tokens: 3 minutes
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpolicy.sglang_plugin.arms import parse_arms
from kvpolicy.sglang_plugin.errors import KVPolicyError

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions
from decode_batch import STOCK, STREAM_EVERY, Row, measure
from default_model import smollm2
from number_tables import numbers_table, printed

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "lmeval_tasks" / "gsm8k_sample" / "gsm8k_sample.jsonl"


def table(rows: list[Row]) -> Table:
    """The rows as a table, speeds also as a multiple of stock."""
    stock = {(row.batch, row.tokens): row.tokens_per_second for row in rows if row.arm == STOCK}
    names = ("arm", "batch", "tokens", "tokens/s", "of stock", "resident", "KV MiB", "in evictions")
    shown = numbers_table("Decoding", names)
    for row in rows:
        shown.add_row(
            row.arm,
            str(row.batch),
            str(row.tokens),
            f"{row.tokens_per_second:.1f}",
            f"{row.tokens_per_second / stock[row.batch, row.tokens]:.2f}",
            f"{row.resident_mean:.0f}",
            f"{row.kv_bytes_mean / 2**20:.1f}",
            f"{row.eviction_share:.1%}",
        )
    return shown


def read_prompts(model: Path, count: int, length: int = 96) -> list[list[int]]:
    """Different problems, cut or repeated to the same length, so that a batch decodes in step."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = [json.loads(line)["question"] for line in SAMPLE.read_text().splitlines()]
    return [(tokenizer.encode(problems[i % len(problems)]) * length)[:length] for i in range(count)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")], "metavar": "N,N"}
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--policies", default="vase-dkv", help="as kv_policy names them (default %(default)s)")
    parser.add_argument("--batches", default=[1, 8], help="requests at a time (default 1,8)", **numbers)
    parser.add_argument("--tokens", default=[1024, 2048], help="output tokens of each (default 1024,2048)", **numbers)
    parser.add_argument("--budget", type=int, default=512, help="kv_budget (default 512)")
    parser.add_argument("--period", type=int, default=64, help="kv_period (default 64)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache (default bfloat16)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "decode.jsonl", help="rows are appended to it")
    parser.add_argument("--quick", action="store_true", help="batch 1 and 4, 128 tokens, budget 64, period 32")
    args = parser.parse_args()
    try:
        for arm in parse_arms(args.policies, "").values():
            arm.check(64 if args.quick else args.budget, 32 if args.quick else args.period)
    except KVPolicyError as error:
        parser.error(str(error))
    if args.quick:
        args.batches, args.tokens, args.budget, args.period = [1, 4], [64, 128], 64, 32
    if any(tokens % STREAM_EVERY for tokens in args.tokens):
        parser.error(f"--tokens must be multiples of {STREAM_EVERY}, between which the clock is not read")
    if args.model is None:
        args.model = smollm2()
    return args


def main() -> None:
    args = arguments()
    import sglang

    prompts = read_prompts(args.model, max(args.batches))
    slots = max(args.batches) * (len(prompts[0]) + max(args.tokens) + 64)
    common = {
        "model_path": str(args.model),
        "device": "cuda",
        "dtype": args.dtype,
        "log_level": "error",
        "sleep_on_idle": True,  # the engine whose turn it is not leaves the processor alone
        "max_total_tokens": slots,
        "max_running_requests": max(args.batches),
    }
    engine = sglang.Engine(**common, kv_policy=args.policies, kv_budget=args.budget, kv_period=args.period)
    stock = sglang.Engine(**common)
    arms = [None, *parse_arms(args.policies, "").values()]
    rows: list[Row] = []
    provenance = {**conditions(), "model": args.model.name, "dtype": args.dtype}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    try:
        warm = engine.generate(input_ids=prompts[0], sampling_params={"max_new_tokens": 4})
        stock.generate(input_ids=prompts[0], sampling_params={"max_new_tokens": 4})
        args.bytes_per_token = warm["meta_info"]["kv_policy"]["kv_bytes_per_token"]
        with Progress(console=console) as progress, args.out.open("a") as file:
            task = progress.add_task("decoding", total=sum(args.batches) * len(arms))
            for batch in args.batches:
                for arm in arms:
                    progress.update(task, description=f"{STOCK if arm is None else arm.name}, batch {batch}")
                    measured = measure(stock if arm is None else engine, arm, prompts[:batch], args)
                    rows += measured
                    file.writelines(json.dumps({**asdict(row), **provenance}) + "\n" for row in measured)
                    file.flush()
                    progress.advance(task, batch)
    finally:
        engine.shutdown()
        stock.shutdown()
    printed(table(rows))


if __name__ == "__main__":
    main()
