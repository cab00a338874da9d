"""How near do the paged kernels come to the speed of a copy, and how long does a whole eviction round take?

One JSON line per operation, or per round of vase-dkv and vase-attnv, and number of due requests, in the shape of
Qwen3-4B's cache (36 layers, 8 KV heads of 128, bf16; requests are cut from 4096 + 64 tokens to 4096). GB/s are of the
bytes that an operation has to move (kernel_cases.py says which), beside those of a copy within the device of as many
bytes, in the same run. Nothing is printed unless the tests of all operations in question are green on this device.

    python benchmarks/kernel_speed.py                 # needs a CUDA device; 64 requests take 39 GB for keys and values
    python benchmarks/kernel_speed.py --interpret     # tiny, on the CPU, nothing timed: whether this script works

The file is not called kernels.py: the PyPI package of that name is imported by SGLang, and would be hidden by it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions
from kernel_cases import OPERATIONS, Case, Sizes, Workload, plain_name
from kernel_gate import refusal
from kernel_rounds import ROUNDS
from kernel_timing import copy_speed, device_times, gb_per_second

TINY = Sizes(layers=2, kv_heads=2, group=2, head_dim=16, budget=24, period=8, dtype=torch.float32)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEAST_OF_COPY = {"value_range": 0.8, "compact": 0.8}
MOST_MS = {("vase-dkv", 64): 3.0}

Measure = Callable[[Case], dict[str, Any]]


def rows(
    operations: Sequence[str], policies: Sequence[str], work: Workload, measure: Measure
) -> Iterator[dict[str, Any]]:
    """One per operation and round, with what was measured of it and whether that reaches its goal, if it has one."""
    sizes = {**work.sizes._asdict(), "dtype": str(work.sizes.dtype).removeprefix("torch.")}
    for name in operations:
        row = measure(OPERATIONS[name](work))
        if "of_copy" in row and name in LEAST_OF_COPY:
            row |= {"goal": f"of_copy >= {LEAST_OF_COPY[name]}", "met": row["of_copy"] >= LEAST_OF_COPY[name]}
        yield {"operation": name, "requests": work.requests, **sizes, **row}
    for name in policies:
        row = measure(ROUNDS[name].case(work))
        most = MOST_MS.get((name, work.requests))
        if "ms_p50" in row and most is not None:
            row |= {"goal": f"ms_p50 <= {most}", "met": row["ms_p50"] <= most}
        yield {"round": name, "requests": work.requests, **sizes, **row}


def measured(case: Case, device: torch.device, milliseconds: int) -> dict[str, Any]:
    """Times, bandwidth, and how long the same bytes take at the speed of a copy: no round that moves them is faster."""
    copy = copy_speed(case.bytes, device, milliseconds)
    times = device_times(case.run, milliseconds)
    speed = gb_per_second(case.bytes, times.p50)
    return {
        "bytes": case.bytes,
        **{f"ms_{quantile}": round(value, 4) for quantile, value in times._asdict().items()},
        "gb_s": round(speed, 1),
        "copy_bytes": copy.bytes,
        "copy_gb_s": round(copy.gb_s, 1),
        "of_copy": round(speed / copy.gb_s, 3),
        "ms_at_copy_speed": round(case.bytes / copy.gb_s / 1e6, 4),
    }


def interpreted(case: Case) -> dict[str, Any]:
    """Run once. The interpreter says nothing of speed, so nothing is timed."""
    case.run()
    return {"bytes": case.bytes, "interpreted": True}


def needed(operations: Sequence[str], policies: Sequence[str]) -> list[str]:
    """Operations whose tests must be green, each once."""
    parts = [*operations, *(part for name in policies for part in ROUNDS[name].operations)]
    return list(dict.fromkeys(plain_name(name) for name in parts))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--operations", nargs="*", default=list(OPERATIONS), choices=OPERATIONS, metavar="NAME")
    options.add_argument("--policies", nargs="*", default=list(ROUNDS), choices=ROUNDS, metavar="NAME")
    options.add_argument("--requests", type=int, nargs="+", help="due at once (default 1 16 64; interpreted 1 2)")
    options.add_argument("--layers", type=int, default=36)
    options.add_argument("--kv-heads", type=int, default=8)
    options.add_argument("--group", type=int, default=4, help="query heads of a KV head (default 4)")
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--budget", type=int, default=4096)
    options.add_argument("--period", type=int, default=64)
    options.add_argument("--dtype", choices=DTYPES, default="bf16")
    options.add_argument("--ms", type=int, default=400, help="of calls that are timed, per row (default 400)")
    options.add_argument("--commit", help="where the working tree is a copy without its .git: what rows say of it")
    options.add_argument("--interpret", action="store_true", help="tiny sizes under Triton's interpreter")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if not args.interpret and not torch.cuda.is_available():
        sys.exit("kernel_speed.py: a bandwidth needs a CUDA device, and there is none (--interpret needs none).")
    for name in needed(args.operations, args.policies):
        if (reason := refusal(name, gpu=not args.interpret)) is not None:
            sys.exit(f"kernel_speed.py: {reason}.")
    origin = conditions() | ({"commit": args.commit} if args.commit else {})
    measure: Measure
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel's module is imported
        device, sizes, measure = torch.device("cpu"), TINY, interpreted
    else:
        os.environ.pop("TRITON_INTERPRET", None)
        device = torch.device("cuda")
        shape = (args.layers, args.kv_heads, args.group, args.head_dim, args.budget, args.period)
        sizes = Sizes(*shape, DTYPES[args.dtype])

        def measure(case: Case) -> dict[str, Any]:
            return measured(case, device, args.ms)

    for requests in args.requests or ([1, 2] if args.interpret else [1, 16, 64]):
        wanted = sizes.pool_bytes(requests)
        if device.type == "cuda" and wanted > (free := torch.cuda.mem_get_info()[0]):
            sys.exit(
                f"kernel_speed.py: keys and values of {requests} requests take {wanted / 1e9:.0f} GB, and "
                f"{free / 1e9:.0f} GB are free; set --requests, --layers or --budget."
            )
        work = Workload(sizes, requests, device)
        for row in rows(args.operations, args.policies, work, measure):
            print(json.dumps({**row, **origin}), flush=True)
        del work


if __name__ == "__main__":
    main()
