"""How long does a policy think? Observation and selection of one eviction round, per method, against vase-dkv.

No engine, no gathering, no compaction: a request of random tokens in the shape of Qwen3-4B's cache (36 layers, 8 KV
heads of 128 with 4 query heads each, bf16), cut from budget + period to budget. Methods take turns, so that a machine
that changes its pace does so for all. A method that takes more than five times as long as vase-dkv is marked, with the
reason that is known for it.

    python benchmarks/select_round.py                   # budgets 1024 and 4096, one thread
    python benchmarks/select_round.py --quick           # a small shape: seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpolicy.policies.base import Policy
from kvpolicy.policies.options import build
from kvpolicy.policies.registry import POLICIES

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions
from number_tables import numbers_table, printed
from select_request import Request, Shape, observed, random_statistics

ROOT = Path(__file__).parents[1]
QWEN3_4B, QUICK = Shape(36, 8, 4, 128), Shape(4, 2, 2, 16)
YARDSTICK = "vase-dkv"
MOST = 5.0
# Methods that may take longer than MOST times the yardstick, and why they must.
ATTENTION = "64 queries in each of 4 heads of a group are 256 dot products per key; the projection has 40 per token"
SLOW = {
    "vase-attnv": ATTENTION,
    "snapkv": ATTENTION,
    "h2o": ATTENTION,
    "raas": f"{ATTENTION}; and it takes a median of each row",
    "rkv": "every key looks for its newest similar one, among all tokens if there is none (--keys independent)",
}


@dataclass(frozen=True)
class Row:
    """One method at one budget. Times are of one request, all layers; a multiple is of the medians.

    keys : alike or independent, see :class:`Request`.
    """

    policy: str
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    keys: str
    period: int
    resident: int
    kept: int
    rounds: int
    ms_p20: float
    ms_p50: float
    ms_p80: float
    of_yardstick: float

    @property
    def note(self) -> str:
        """Empty for a method that is fast enough."""
        if self.of_yardstick <= MOST:
            return ""
        return f"over {MOST:g} times: {SLOW.get(self.policy, 'NO REASON KNOWN')}"


def methods(request: Request, budget: int, names: Sequence[str], folder: Path) -> dict[str, Policy]:
    """Those of `names` that would evict now, with their defaults; statistics of queries are random where needed."""
    statistics_of_queries = random_statistics(request.shape, folder)
    required = {
        "triattention": {"stats": str(statistics_of_queries)},
        "alpha": {"base": f"triattention[stats:{statistics_of_queries}]"},
    }
    found = {}
    for name in names:
        policy = build(POLICIES[name](), required.get(name, {}))
        if policy.due(request.resident, budget, request.period, evicted=request.evicted):
            policy.check(budget, request.period)
            policy.fit(request.shape.model())
            found[name] = policy
    return found


def one_round(
    policy: Policy, request: Request, budget: int, eviction: int, statistic: torch.Tensor | None
) -> tuple[float, int]:
    """Milliseconds of observation and selection, and how many tokens were kept."""
    seconds, kept, period = 0.0, 0, request.period
    n_keep = policy.n_keep(request.resident, budget, evicted=request.evicted)
    for candidates, noise in request.chunks(policy, eviction, statistic):
        start = time.perf_counter()
        keep = policy.select(observed(policy, candidates, period), n_keep, period, noise)
        if request.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        assert keep.shape[:2] == candidates.shape[:2], f"{policy.name}: {keep.shape = }, {candidates.shape = }"
        kept = keep.shape[-1]
    return 1000 * seconds, kept


def measure(
    request: Request, budget: int, names: Sequence[str], rounds: int, most_seconds: float, progress: Progress
) -> list[Row]:
    """Rows of one budget. A method that has used up `most_seconds` has no further turns after its first timed one."""
    with tempfile.TemporaryDirectory() as folder:
        measured = methods(request, budget, names, Path(folder))
        state = {name: request.statistic(policy) for name, policy in measured.items()}
        times: dict[str, list[float]] = {name: [] for name in measured}
        kept: dict[str, int] = {}
        spent = dict.fromkeys(measured, 0.0)
        task = progress.add_task(f"budget {budget}", total=(rounds + 1) * len(measured))
        for turn in range(rounds + 1):  # the first is not timed
            for name, policy in measured.items():
                progress.update(task, description=f"budget {budget}: {name}")
                if turn <= 1 or spent[name] < 1000 * most_seconds:
                    milliseconds, kept[name] = one_round(policy, request, budget, turn, state[name])
                    spent[name] += milliseconds
                    times[name] += [milliseconds] if turn else []
                progress.advance(task)
    yardstick = statistics.median(times[YARDSTICK])
    return [summary(name, times[name], kept[name], yardstick, request) for name in measured]


def summary(name: str, times: Sequence[float], kept: int, yardstick: float, request: Request) -> Row:
    fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else [times[0]] * 4
    median = statistics.median(times)
    return Row(
        name,
        *request.shape,
        "alike" if request.alike else "independent",
        request.period,
        request.resident,
        kept,
        len(times),
        round(fifths[0], 2),
        round(median, 2),
        round(fifths[3], 2),
        round(median / yardstick, 2),
    )


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table, and below it a line on each that takes long."""
    names = ("policy", "resident", "kept", "ms p20", "p50", "p80", f"of {YARDSTICK}")
    slow = {f"* {row.policy}: {row.note}": None for row in rows if row.note}
    caption = "\n".join(slow) or f"None takes more than {MOST:g} times as long as {YARDSTICK}."
    shown = numbers_table("Observation and selection of one round", names, caption)
    for row in rows:
        times = (f"{value:.1f}" for value in (row.ms_p20, row.ms_p50, row.ms_p80))
        mark = "*" if row.note else ""
        shown.add_row(row.policy, str(row.resident), str(row.kept), *times, f"{mark}{row.of_yardstick:.1f}")
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, metavar="NAME")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 4096], help="default 1024 4096")
    parser.add_argument("--period", type=int, default=64, help="tokens appended between evictions (default 64)")
    parser.add_argument("--keys", choices=("alike", "independent"), default="alike", help="independent: worst for rkv")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that is not (default 5)")
    parser.add_argument("--seconds", type=float, default=60, help="no more rounds of a method after these (default 60)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "select_round.jsonl", help="rows are appended to it")
    parser.add_argument("--quick", action="store_true", help="4 layers, 2 KV heads of 16, budget 320, two rounds")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device, shape = torch.device("cuda" if torch.cuda.is_available() else "cpu"), QWEN3_4B
    if args.quick:
        shape, args.budgets, args.rounds = QUICK, [320], 2
    names = [name for name in POLICIES if name in (YARDSTICK, *args.policies)]
    origin = conditions()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress, args.out.open("a") as file:
        for budget in args.budgets:
            request = Request(shape, budget + args.period, args.period, device, alike=args.keys == "alike")
            measured = measure(request, budget, names, args.rounds, args.seconds, progress)
            rows += measured
            file.writelines(json.dumps({**asdict(row), "note": row.note, **origin}) + "\n" for row in measured)
            file.flush()
    printed(table(rows))


if __name__ == "__main__":
    main()
