"""How many requests does a pool serve at once, with a policy and without?

The same requests arrive together at stock SGLang and at an engine with a policy, one engine after the other, with the
same pool. All of them generate to the end of what they ask for. Per arm: requests in flight, retractions, tokens per
second, share of the pool in use; both over time in a plot. Rows are appended to capacity.jsonl.

    python benchmarks/capacity.py              # 16 requests of 1024 tokens in 6144 slots: about 4 minutes on two cores
    python benchmarks/capacity.py --requests 4 --tokens 128 --pool 512 --budget 48 --period 16
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from capacity_plot import draw
from capacity_watch import Moment, watched
from conditions import conditions
from number_tables import numbers_table, printed

ROOT = Path(__file__).parents[1]
STOCK = "stock SGLang"
LONGEST_PROMPT = 128


@dataclass(frozen=True)
class Row:
    """One arm's figures.

    in_flight_mean : requests in the running batch, mean over the time from the first to the last token.
    pool_used_mean, pool_used_most : shares of the pool's slots.
    retractions : of all requests together.
    """

    arm: str
    requests: int
    tokens: int
    pool: int
    in_flight_mean: float
    in_flight_most: int
    retractions: int
    seconds: float
    tokens_per_second: float
    pool_used_mean: float
    pool_used_most: float


Measured = tuple[Row, list[Moment]]


def measure(arm: str, settings: dict[str, Any], args: argparse.Namespace) -> Measured:
    """Start an engine with `settings`, and let all requests arrive at once."""
    import sglang

    numbers = random.Random(0)
    prompts = [
        numbers.choices(range(100, 40_000), k=numbers.randint(LONGEST_PROMPT // 2, LONGEST_PROMPT))
        for _ in range(args.requests)
    ]
    sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
    engine = sglang.Engine(
        model_path=str(args.model),
        device="cuda",
        dtype=args.dtype,
        log_level="error",
        max_total_tokens=args.pool,
        enable_metrics=True,
        decode_log_interval=8,  # the gauges are set as often
        **settings,
    )
    try:
        engine.generate(input_ids=[prompts[0][:8]], sampling_params={**sampling, "max_new_tokens": 4})
        with watched() as moments:
            start = time.perf_counter()
            answers = engine.generate(input_ids=prompts, sampling_params=sampling)
            seconds = time.perf_counter() - start
    finally:
        engine.shutdown()
    generated = sum(len(answer["output_ids"]) for answer in answers)
    if generated != args.requests * args.tokens:
        raise SystemExit(f"capacity.py: {arm} generated {generated} tokens instead of {args.requests * args.tokens}")
    busy = [moment for moment in moments if moment.running]
    row = Row(
        arm=arm,
        requests=args.requests,
        tokens=args.tokens,
        pool=args.pool,
        in_flight_mean=sum(moment.running for moment in busy) / len(busy),
        in_flight_most=int(max(moment.running for moment in busy)),
        retractions=sum(answer["meta_info"]["num_retractions"] for answer in answers),
        seconds=seconds,
        tokens_per_second=generated / seconds,
        pool_used_mean=sum(moment.used for moment in busy) / len(busy) / args.pool,
        pool_used_most=max(moment.used for moment in busy) / args.pool,
    )
    return row, moments


def in_a_process_of_its_own(measure: Callable[..., Measured], *args: Any) -> Measured:
    """A second engine of a process cannot register its metrics."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(measure, *args).result()


def table(rows: list[Row]) -> Table:
    first = rows[0]
    names = ("arm", "running", "most", "retracted", "seconds", "tokens/s", "of stock", "pool", "most")
    shown = numbers_table(f"{first.requests} requests of {first.tokens} tokens in a pool of {first.pool}", names)
    for row in rows:
        shown.add_row(
            row.arm,
            f"{row.in_flight_mean:.1f}",
            str(row.in_flight_most),
            str(row.retractions),
            f"{row.seconds:.1f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second / first.tokens_per_second:.2f}",
            f"{row.pool_used_mean:.0%}",
            f"{row.pool_used_most:.0%}",
        )
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: a random Qwen3 of 4 layers)")
    parser.add_argument("--dtype", default="float32", help="of weights and cache (default %(default)s)")
    parser.add_argument("--policy", default="vase-dkv", help="kv_policy (default %(default)s)")
    parser.add_argument("--budget", type=int, default=192, help="kv_budget (default %(default)s)")
    parser.add_argument("--period", type=int, default=64, help="kv_period (default %(default)s)")
    parser.add_argument("--pool", type=int, default=6144, help="slots of the KV pool (default %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="that arrive at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="that each generates (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "capacity", help="folder of rows and plot")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    policy = {"kv_policy": args.policy, "kv_budget": args.budget, "kv_period": args.period}
    arms = {STOCK: {}, f"{args.policy} {args.budget}+{args.period}": policy}
    args.out.mkdir(parents=True, exist_ok=True)
    console, rows, lines = Console(stderr=True), [], {}
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model = random_model(Path(folder))
        provenance = {**conditions(), "model": args.model.name, "dtype": args.dtype}
        for arm, settings in arms.items():
            with console.status(f"{arm}: engine, then {args.requests} requests of {args.tokens} tokens"):
                row, lines[arm] = in_a_process_of_its_own(measure, arm, settings, args)
            rows.append(row)
            with (args.out / "capacity.jsonl").open("a") as file:
                file.write(json.dumps({**asdict(row), **provenance}) + "\n")
    draw(lines, args.pool, args.out / "capacity.png")
    printed(table(rows))
    print(f"{args.out / 'capacity.png'} shows both over time")


def random_model(folder: Path) -> Path:
    """The random model of the engine tests: what is measured is memory and time, not words."""
    sys.path.append(str(ROOT / "tests" / "engine"))
    import harness

    return harness.tiny_qwen3(folder / "random-qwen3", harness.smollm2())


if __name__ == "__main__":
    main()
