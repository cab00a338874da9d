"""Does evicting tokens of large value range make a model loop, and does protecting them help? VaSE's claim, measured.

One SGLang engine serves all arms. Part `free`: every arm answers all problems freely; how often does it loop, run
into the token limit, end in garbage, answer correctly? Part `kl`: every arm is made to say what the full cache
said; how far does the next token's distribution move? Rows go to a JSON-lines file as they come, with the conditions
they were measured under, and are summed up in a Markdown table at the end (again: ablation_table.py FILE).

    python benchmarks/ablation.py --limit 8 --tokens 320
    python benchmarks/ablation.py --parts kl --budgets 192 --arms random 'vase-attnv[reserve:off]' vase-attnv
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Also under PYTHONSAFEPATH, and for the scheduler process, which inherits it.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from ablation_free import free_running
from ablation_kl import divergences
from ablation_study import Refused, Study, prepare
from ablation_table import report
from conditions import conditions

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "out/models/SmolLM2-135M-Instruct"
PROBLEMS = ROOT / "lmeval_tasks/gsm8k_sample/gsm8k_sample.jsonl"
ARMS = ["full", "vase-attnv", "vase-dkv", "random", "evict-large-range", "evict-small-range"]
DTYPE_HELP = "default bfloat16, as users serve; a CPU without AVX-512 takes three to four times as long for it"
MOST_REQUESTS = 128  # at once; SGLang queues the others


def arguments() -> argparse.Namespace:
    """The command line, with the name of the output filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(MODEL), help="folder or hub id of a chat model (default: the one of `make demo`)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help=DTYPE_HELP)
    add("--problems", type=Path, default=PROBLEMS, help="JSON lines: id, question (or problem), answer (a number)")
    add("--limit", type=int, metavar="N", help="only the first N problems (default: all)")
    add("--arms", nargs="+", default=ARMS, metavar="ARM", help=f"default {' '.join(ARMS)}; full is always run")
    add("--budgets", nargs="+", type=int, default=[128, 256], metavar="B", help="resident tokens (default 128 256)")
    add("--period", type=int, default=32, help="tokens until the next eviction (default 32)")
    add("--tokens", type=int, default=400, help="at most so many new tokens per response (default 400)")
    add("--samples", type=int, default=0, metavar="K", help="part free: also K samples per problem, T 0.6, top-p 0.95")
    add("--parts", nargs="+", choices=["free", "kl"], default=["free", "kl"], help="default both")
    add("--group", type=int, default=4, help="part kl: problems at a time; each takes 4 bytes * tokens * vocabulary")
    add("--output", type=Path, help="the rows; must not exist (default out/ablation/DATE-MODEL.jsonl)")
    args = parser.parse_args()
    default = Path("out/ablation") / f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(args.model).name}.jsonl"
    args.output = args.output or default
    return args


def start_engine(study: Study) -> Any:
    """An engine with a pool in which all requests of a batch fit at full length, so that none is retracted."""
    import sglang

    args, requests = study.args, min(study.batch, MOST_REQUESTS)
    return sglang.Engine(
        model_path=args.model,
        dtype=args.dtype,
        kv_policy="|".join(dict.fromkeys(cell.arm for cell in study.cells)),
        kv_budget=max(args.budgets),
        kv_period=args.period,
        enable_custom_logit_processor=True,
        max_running_requests=requests,
        max_total_tokens=(requests + 1) * (max(map(len, study.prompts)) + args.tokens + args.period),
        chunked_prefill_size=-1,  # a chunk is a step to the logit processor
        log_level="error",
        sleep_on_idle=True,
    )


def measured(engine: Any, study: Study, progress: Progress) -> Iterator[dict[str, Any]]:
    """All rows, part by part."""
    args = study.args
    if "free" in args.parts:
        kinds = [range(1)] + [range(1, args.samples + 1)] * (args.samples > 0)
        task = progress.add_task("free: all arms at once", total=len(kinds))
        for repeats in kinds:
            yield from free_running(engine, study, repeats)
            progress.advance(task)
    if "kl" in args.parts:
        task = progress.add_task("kl", total=len(study.problems))
        for first in range(0, len(study.problems), args.group):
            group = range(first, min(first + args.group, len(study.problems)))
            progress.update(task, description=f"kl: problems {group.start + 1} to {group.stop}")
            yield from divergences(engine, study, group)
            progress.advance(task, len(group))


def main() -> None:
    args = arguments()
    try:
        study = prepare(args)
    except Refused as error:
        sys.exit(f"ablation: {error}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {"model": Path(args.model).name, "dtype": args.dtype, "period": args.period, "token_limit": args.tokens}
    origin, rows = {**settings, **conditions()}, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    engine = start_engine(study)
    try:
        with args.output.open("x") as file, Progress(*columns, console=Console(stderr=True)) as progress:
            for row in measured(engine, study, progress):
                rows.append({**row, **origin})
                print(json.dumps(rows[-1]), file=file, flush=True)
    finally:
        engine.shutdown()
    print(report(rows))
    print(f"\nRows: {args.output}")


if __name__ == "__main__":
    main()
