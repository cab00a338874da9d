"""Does the plugin hold when SGLang is used hard? Thousands of seeded requests at once against a real server.

Lives of requests (stress_lives.py) run over SGLang's APIs in a small pool: mixed lengths, shared prompts, streams, stop
strings, several samples, aborts, clients that leave, flushes, prompts in chunks, a full pool, forced retractions. Then:
the server lives, no slot is lost, each life ended as its kind should, and each answer is that of its request alone, or
the difference is explained. Exit status 1 if not. docs/stress.md tells how to read the table.

    python benchmarks/stress.py                       # 2,000 lives, at most 20 minutes
    python benchmarks/stress.py --quick               # 200
    python benchmarks/stress.py --seed 3 --only 17,23 # two lives of seed 3 again, with the whole of their requests
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions
from stress_lives import ARMS, BUDGET, PERIOD, Life, life_of
from stress_messages import request_of_life
from stress_run import Run
from stress_server import CHUNK, KINDS, POOL, tiny_model
from stress_table import EXPLAINED, cache_counts, table, tallies

ROOT = Path(__file__).parents[1]


def numbers(text: str) -> list[int]:
    """``N,N`` as a list."""
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=2000, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first life (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all lives (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=20, help="beside the starts (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="200 lives, or as many as the minutes suffice for")
    parser.add_argument("--only", type=numbers, metavar="N,N", help="these lives, printed with their requests")
    parser.add_argument("--servers", default=",".join(KINDS), help="kinds of server (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=24, help="lives at a time (default %(default)s)")
    parser.add_argument("--pool", type=int, default=POOL, help="max_total_tokens (default %(default)s)")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: a tiny random Qwen3, fp32)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "stress", help="folder of logs, traces and results")
    args = parser.parse_args()
    args.servers = tuple(kind for kind in KINDS if kind in args.servers.split(","))
    if not args.servers:
        parser.error(f"--servers must name some of {', '.join(KINDS)}")
    if args.quick:
        args.lives = 200
    return args


def results(run: Run, args: argparse.Namespace, asked: int, origin: dict[str, str]) -> dict[str, Any]:
    """All that is worth keeping of a run; `origin` are the conditions at its start."""
    kinds, traits = tallies(run.led)
    grave = [led for led in run.led if led.fault or (led.judgement is not None and led.judgement.details)]
    return {
        **origin,
        "model": run.model.name,
        "policies": "|".join(ARMS),
        **{"kv_budget": BUDGET, "kv_period": PERIOD, "pool": args.pool, "chunk": CHUNK},
        **{"seed": args.seed, "first": args.first, "concurrency": args.concurrency, "servers": args.servers},
        **{"lives_asked_for": asked, "lives_led": len(run.led), "questions_alone": run.asked_alone},
        "faults": run.faults,
        "log": dict(run.log),
        "loads": [asdict(load) for load in run.loads],
        "cache": cache_counts(run.led),
        "kinds": {name: tally.shown() for name, tally in kinds.items()},
        "traits": {name: tally.shown() for name, tally in traits.items()},
        "failures_and_differences": [led.shown() for led in grave],
    }


def verdict(run: Run, args: argparse.Namespace, asked: int) -> list[str]:
    """Sentences on all that makes the run fail; none if it holds."""
    command = f"python benchmarks/stress.py --seed {args.seed} --only"
    found = list(run.faults)
    for led in run.led:
        if led.end == "failed":
            found.append(f"life {led.life.number} ({led.life.kind}): {led.fault}; {command} {led.life.number}")
        elif led.judgement is not None and led.judgement.comparison == "unexplained":
            details = "; ".join(led.judgement.details)
            found.append(
                f"life {led.life.number} ({led.life.kind}, {led.life.question.policy}) answers otherwise than alone: "
                f"{details}; {command} {led.life.number}"
            )
    unjudged = sum(led.judgement is not None and led.judgement.comparison == "not judged" for led in run.led)
    late = [f"time was up: {len(run.led)} of {asked} lives were led"] if len(run.led) < asked else []
    late += [f"time was up: {unjudged} answers were not judged"] if unjudged else []
    for sentence in late:
        print(sentence)
    return found + ([] if args.quick else late)


def show(life: Life) -> None:
    """Print a life with the whole of its request."""
    path, body = request_of_life(life)
    print(json.dumps({**asdict(life), "question": asdict(life.question), "path": path, "body": body}))


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server goes too
    lives = [life_of(args.seed, number) for number in args.only or range(args.first, args.first + args.lives)]
    for life in lives if args.only else []:
        show(life)
    origin = conditions()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.model or tiny_model(args.out / "tiny-qwen3")
    run = Run(model, args.out, args.servers, args.pool, args.concurrency, 60 * args.minutes)
    run.lead(lives)
    for led in run.led if args.only else []:
        print(json.dumps({**led.shown(), "outcome": asdict(led.outcome)}))
    (args.out / "stress.json").write_text(json.dumps(results(run, args, len(lives), origin), indent=1) + "\n")
    console = Console()
    console.width = max(console.width, 230)
    console.print(table(run.led))
    failures = verdict(run, args, len(lives))
    explained = sum(led.judgement is not None and led.judgement.comparison in EXPLAINED for led in run.led)
    print(f"{len(run.led)} lives, {run.asked_alone} distinct requests alone, {explained} differences explained")
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
