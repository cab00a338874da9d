"""How much memory does a score take? EpiKV's signals of a whole text against the attention matrix of one layer.

EpiKV reads two numbers per token and, for its place in the text, one per layer and KV head: memory is linear in length.
A method that reads attention as eager attention leaves it holds query heads x length x length numbers, per layer.
Prints a JSON row per shape, method and length with the peak of bytes allocated while scoring, inputs of the score
included (PyTorch's allocator, by its profiler on the CPU or its counter on a GPU), and the exponent of length that fits
them. An attention matrix whose computation would exceed --limit is not computed: its row has the matrix's own bytes.

    python benchmarks/epikv_memory.py
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from kvpolicy.policies.base import Candidates
from kvpolicy.policies.epikv import EpiKV

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions


class Shape(NamedTuple):
    """Of a model's attention."""

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int


SHAPES = {"smollm2": Shape(30, 3, 9, 64), "qwen3-4b": Shape(36, 8, 32, 128)}
LENGTHS = tuple(2**power for power in range(9, 16))
# Of an element of the matrix at most while it is computed: logits in bf16 and in fp32, their softmax in fp32, the mask.
BYTES_PER_ELEMENT = 11
Work = Callable[[], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES), help="models' shapes")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens (default 512 to 32768)")
    parser.add_argument("--limit", type=float, default=2.0, metavar="GB", help="most to allocate (default 2)")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    origin = conditions()
    for name in args.shapes:
        for row in rows(SHAPES[name], sorted(args.lengths), args.limit * 1e9, device):
            print(json.dumps({"shape": name, **row, **origin}), flush=True)


def rows(shape: Shape, lengths: Sequence[int], limit: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """Of both methods: one row per length, then one with the exponent."""
    for method, prepare in (("epikv", signals_of), ("attention", attention_of)):
        measured = []
        for length in lengths:
            row: dict[str, Any] = {"method": method, "length": length, "peak_bytes": None}
            if method == "attention":
                row["matrix_bytes"] = 2 * shape.query_heads * length**2
            if method == "epikv" or BYTES_PER_ELEMENT * shape.query_heads * length**2 <= limit:
                row["peak_bytes"] = peak_bytes(prepare(shape, length, device), device)
                measured.append((length, row["peak_bytes"]))
            yield row
        if len(measured) > 1:
            yield {"method": method, "lengths": [length for length, _ in measured], "exponent": exponent(measured)}


def signals_of(shape: Shape, length: int, device: torch.device) -> Work:
    """EpiKV's signals of `length` resident tokens; what it reads is made anew, and so is counted."""
    policy = EpiKV()

    def work() -> torch.Tensor:
        change = torch.rand(2, length, device=device)
        positions = torch.arange(length, device=device).repeat(shape.layers, shape.kv_heads, 1)
        shown = (shape.layers, shape.kv_heads, length)
        candidates = Candidates(shown, positions=positions, hidden_change=change, true_len=length)
        return policy.signals(candidates)

    return work


def attention_of(shape: Shape, length: int, device: torch.device) -> Work:
    """One layer's attention matrix, softmax in fp32; queries and keys are there in any case, and are not counted."""
    size = (shape.query_heads, length, shape.head_dim)
    queries, keys = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    queries /= math.sqrt(shape.head_dim)

    def work() -> torch.Tensor:
        later = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
        logits = (queries @ keys.transpose(1, 2)).masked_fill_(later, -torch.inf)
        return logits.softmax(dim=-1, dtype=torch.float32).to(logits.dtype)

    return work


def peak_bytes(work: Work, device: torch.device) -> int:
    """The most bytes that are allocated at one moment of `work`, beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    assert changes, "the profiler saw no allocation"
    held = peak = 0
    for event in sorted(changes, key=lambda event: float(event["ts"])):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def exponent(measured: Sequence[tuple[int, int]]) -> float:
    """Of length, fitted by least squares to the logarithms of ``(length, bytes)``."""
    x, y = torch.tensor(measured, dtype=torch.float64).log().T
    x, y = x - x.mean(), y - y.mean()
    return round(float((x @ y) / (x @ x)), 3)


if __name__ == "__main__":
    main()
