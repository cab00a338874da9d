"""How long does one eviction of one request take, per policy?

Gathers, scores and compacts a request in a pool of SmolLM2-135M's shape (30 layers, 3 KV heads of 64) or
Qwen3-4B's (36 layers, 8 of 128), outside any engine: selection and data movement alone. Prints one JSON row per
policy with the conditions it was measured under.

    python benchmarks/eviction_round.py --shape smollm2 --tokens 1024
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time

import torch

from kvpolicy.kernels.compact import compact, gather_rows
from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.policies.registry import POLICIES

SHAPES = {"smollm2": (30, 3, 64), "qwen3-4b": (36, 8, 128)}


def conditions() -> dict[str, str]:
    """Commit (with a mark for uncommitted changes), processor and versions."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "commit": described.stdout.strip() or "unknown",
        "device": f"{device}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="layers, KV heads and head size")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens kept; 64 more are resident (default 1024)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds, after 3 that are not (default 20)")
    args = parser.parse_args()

    layers, heads, head_dim = SHAPES[args.shape]
    period = 64
    resident = args.tokens + period
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    pool = torch.randn(2, layers, 2 * resident, heads, head_dim, device=device).bfloat16()
    row = torch.randperm(2 * resident, device=device)[:resident]
    row_conditions = conditions()
    for name, load in POLICIES.items():
        policy = load()()
        if not policy.due(resident, args.tokens, period):
            continue
        milliseconds = []
        for round_number in range(-3, args.rounds):
            start = time.perf_counter()
            needs, noise = policy.needs, Noise(0, round_number + 3, tuple(range(layers)), device)
            keys, values = (
                torch.stack([gather_rows(buffer, row) for buffer in buffers]) if needed else None
                for buffers, needed in zip(pool, (needs.keys, needs.values), strict=True)
            )
            keep = policy.select(Candidates((layers, heads, resident), keys, values), args.tokens, period, noise)
            for buffers in pool:
                for layer, buffer in enumerate(buffers):
                    compact(buffer, row, keep[layer], row[: args.tokens])
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_number >= 0:
                milliseconds.append(1000 * (time.perf_counter() - start))
        fifths = statistics.quantiles(milliseconds, n=5)
        result = {
            "policy": name,
            "shape": args.shape,
            "resident": resident,
            "kept": args.tokens,
            "ms_p20": round(fifths[0], 2),
            "ms_p50": round(statistics.median(milliseconds), 2),
            "ms_p80": round(fifths[3], 2),
        }
        print(json.dumps({**result, **row_conditions}), flush=True)


if __name__ == "__main__":
    main()
