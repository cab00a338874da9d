"""How long does one eviction of one request take, per policy?

Reads, scores and compacts a request in a pool of SmolLM2-135M's shape (30 layers, 3 KV heads of 64) or
Qwen3-4B's (36 layers, 8 of 128), outside any engine: selection and data movement alone. Its tokens lie in random slots,
and 64 of them are new in every round. Each policy is timed as the plugin runs it, for all layers together, and then in
a plain loop over the layers. Prints two JSON rows per policy with the conditions they were measured under. This is the
path of CPUs; kernel_speed.py times that of GPUs.

    python benchmarks/eviction_round.py --shape smollm2 --tokens 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvpolicy.kernels.compact import PagedTokens, compact_layers
from kvpolicy.kernels.fill_places import fill_places
from kvpolicy.policies.base import Candidates, Noise, Policy
from kvpolicy.sglang_plugin.arms import Arm, parse_arms
from kvpolicy.sglang_plugin.observation import Observation
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import residency_of

sys.path.insert(0, str(Path(__file__).parent))  # also where Python does not put it there (-P, PYTHONSAFEPATH)

from conditions import conditions

SHAPES = {"smollm2": (30, 3, 64, 9), "qwen3-4b": (36, 8, 128, 32)}  # layers, KV heads, head size, query heads
PERIOD = 64


@dataclass(frozen=True)
class Request:
    """One with `kept` + `PERIOD` resident tokens, in a pool of twice as many slots.

    pool : keys and values, bf16 ``[S, H, D]`` per layer.
    row : its slots, in no order.
    queries : ``[L, H_q, PERIOD, D]``.
    """

    pool: tuple[list[torch.Tensor], list[torch.Tensor]]
    row: torch.Tensor
    queries: torch.Tensor
    kept: int

    @classmethod
    def random(cls, shape: str, kept: int, device: torch.device) -> Request:
        layers, heads, head_dim, query_heads = SHAPES[shape]
        torch.manual_seed(0)
        resident = kept + PERIOD
        buffers = [torch.randn(2 * resident, heads, head_dim, device=device).bfloat16() for _ in range(2 * layers)]
        row = torch.randperm(2 * resident, device=device)[:resident]
        queries = torch.randn(layers, query_heads, PERIOD, head_dim, device=device).bfloat16()
        return cls((buffers[:layers], buffers[layers:]), row, queries, kept)

    def append(self) -> None:
        """New tokens in the last slots of the row, where the last eviction left some."""
        new = self.row[self.kept :]
        for buffers in self.pool:
            for buffer in buffers:
                buffer[new] = torch.randn(PERIOD, *buffer.shape[1:], device=buffer.device).bfloat16()

    def pools(self) -> Any:
        """What the plugin's observation asks SGLang's pools for."""
        keys, values = self.pool
        bytes_per_token = float(2 * len(keys) * keys[0][0].nbytes)
        numbers = tuple(range(len(keys)))
        return SimpleNamespace(
            keys=keys,
            values=values,
            layers=numbers,
            device=self.row.device,
            packed=None,
            full_bytes_per_token=bytes_per_token,
        )

    def taps(self) -> Any:
        """What it asks the windows of queries for."""
        return SimpleNamespace(newest=lambda _row, _true_len, count, layers: self.queries[layers, :, -count:])

    def candidates(self, policy: Policy, layers: slice) -> Candidates:
        needs = policy.needs(PERIOD)
        keys, values = (PagedTokens(buffers[layers], self.row) for buffers in self.pool)
        return Candidates(
            (len(keys.buffers), keys.shape[1], len(self.row)),
            keys if needs.keys else None,
            values if needs.values else None,
            self.queries[layers, :, -needs.queries :] if needs.queries else None,
        )


def together(request: Request, policy: Policy, eviction: int) -> None:
    """All layers at once, by the calls that the plugin's evictor makes."""
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0), origin_input_ids=())
    state = residency_of(req)
    state.published, state.evictions = 0, eviction
    settings = RequestSettings(Arm(policy.name, policy.name, "", policy), request.kept, PERIOD, seed=0)
    observation = Observation(request.pools(), request.taps(), None, first_head=0)
    keep = observation.select(req, request.row, request.kept, settings)
    compact_layers(request.pool, request.row, keep, request.row[: request.kept])


def in_a_loop(request: Request, policy: Policy, eviction: int) -> None:
    """The same, one layer after the other in plain indexing."""
    heads = torch.arange(request.pool[0][0].shape[1], device=request.row.device)
    destination = request.row[: request.kept, None]
    for layer, (keys, values) in enumerate(zip(*request.pool, strict=True)):
        noise = Noise(0, eviction, (layer,), request.row.device)
        one = request.candidates(policy, slice(layer, layer + 1))
        keep = policy.select(one, request.kept, PERIOD, noise)[0]
        if not policy.reads_order(PERIOD):
            keep = fill_places(keep)
        for buffer in (keys, values):
            buffer[destination, heads] = buffer[request.row[keep].T, heads]


VERSIONS: dict[str, Callable[[Request, Policy, int], None]] = {"together": together, "in a loop": in_a_loop}


def measure(request: Request, policy: Policy, rounds: int, version: str) -> list[float]:
    """Milliseconds of each round, after 3 that are not timed."""
    milliseconds = []
    for number in range(rounds + 3):
        request.append()
        if request.row.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        VERSIONS[version](request, policy, number)
        if request.row.is_cuda:
            torch.cuda.synchronize()
        milliseconds.append(1000 * (time.perf_counter() - start))
    return milliseconds[3:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="layers, KV heads and head size")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens kept; 64 more are resident (default 1024)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds, after 3 that are not (default 20)")
    parser.add_argument(
        "--policies",
        default="random|vase-dkv|vase-attnv|snapkv|curdkv",
        help="as kv_policy names them, of those that read keys, values and queries alone (default %(default)s)",
    )
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    request = Request.random(args.shape, args.tokens, device)
    row_conditions = conditions()
    for name, arm in parse_arms(args.policies, "").items():
        policy = arm.policy
        if policy.accumulates or policy.needs(PERIOD).positions or policy.needs(PERIOD).hidden_bands:
            parser.error(f"{name} reads more than keys, values and queries; select_round.py times its choice")
        versions = ["together"] if policy.spans_layers else list(VERSIONS)  # no loop, if a choice is of all layers
        for version in versions:
            milliseconds = measure(request, policy, args.rounds, version)
            fifths = statistics.quantiles(milliseconds, n=5)
            result = {
                "policy": name,
                "layers": version,
                "shape": args.shape,
                "resident": args.tokens + PERIOD,
                "kept": args.tokens,
                "ms_p20": round(fifths[0], 2),
                "ms_p50": round(statistics.median(milliseconds), 2),
                "ms_p80": round(fifths[3], 2),
            }
            print(json.dumps({**result, **row_conditions}), flush=True)


if __name__ == "__main__":
    main()
