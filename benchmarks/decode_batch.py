"""One batch of the decoding benchmark: send it, read the clock, and say what was resident."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpolicy.sglang_plugin.arms import Arm
from kvpolicy.sglang_plugin.residency import Residency

STOCK = "stock"
STREAM_EVERY = 32  # tokens between two looks at the clock


@dataclass(frozen=True)
class Row:
    """One batch of requests up to a number of tokens; tokens are per layer and KV head, bytes over all of them.

    seconds : from the first token of the slowest request to the last of these.
    resident_mean, kv_bytes_mean : means over decode steps; those of the whole batch are compared with what the
        engine reports, those up to fewer tokens and those of stock follow from the same schedule.
    eviction_share : of `seconds`; the reported time is divided among rows in proportion to their evictions.
    """

    arm: str
    batch: int
    tokens: int
    budget: int | None
    period: int | None
    seconds: float
    tokens_per_second: float
    resident_mean: float
    resident_end: float
    kv_bytes_mean: float
    evictions: int
    eviction_share: float


class Timed(NamedTuple):
    """When a request reached each number of tokens, and its last chunk."""

    at: dict[int, float]
    last: dict[str, Any]


async def decode(engine: Any, prompts: list[list[int]], sampling: dict[str, Any], marks: list[int]) -> list[Timed]:
    """Decode a batch and look at the clock at the first token and at `marks`, multiples of STREAM_EVERY."""

    async def one(prompt: list[int]) -> Timed:
        at: dict[int, float] = {}
        chunk: dict[str, Any] = {}
        async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            now, done = time.perf_counter(), chunk["meta_info"]["completion_tokens"]
            at.setdefault(1, now)
            for mark in marks:
                if done >= mark:
                    at.setdefault(mark, now)
        return Timed(at, chunk)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def schedule(arm: Arm | None, prompt: int, tokens: int, budget: int, period: int) -> dict[str, float]:
    """Residency statistics of a request after `tokens` tokens, from the rule when it is compacted."""
    state, resident = Residency(), prompt
    state.prefilled(prompt)
    for step in range(tokens - 1):
        if arm is not None and step and arm.policy.due(resident, budget, period):
            kept = arm.policy.n_keep(resident, budget)
            state.evicted(resident, kept)
            resident = kept
        resident += 1
    state.advance(resident)
    return state.statistics()


def measure(engine: Any, arm: Arm | None, prompts: list[list[int]], args: argparse.Namespace) -> list[Row]:
    """Decode one batch with one arm, or with stock SGLang; a row for each number of tokens."""
    most = max(args.tokens)
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": most,
        "ignore_eos": True,
        "stream_interval": STREAM_EVERY,
    }
    if arm is not None:
        sampling["custom_params"] = {"kv_policy": arm.name}
    while not engine.flush_cache().success:
        time.sleep(0.1)
    timed = engine.loop.run_until_complete(decode(engine, prompts, sampling, args.tokens))
    reports = [response.last["meta_info"]["kv_policy"] for response in timed] if arm is not None else []
    spent, evictions = (sum(report[name] for report in reports) for name in ("eviction_seconds", "evictions"))
    rows = []
    for tokens in args.tokens:
        expected = schedule(arm, len(prompts[0]), tokens, args.budget, args.period)
        for report in reports if tokens == most else []:
            assert all(report[name] == expected[name] for name in ("evictions", "resident_mean", "resident_end")), (
                report
            )
        seconds = max(one.at[tokens] for one in timed) - max(one.at[1] for one in timed)
        due = len(prompts) * int(expected["evictions"])
        rows.append(
            Row(
                arm=STOCK if arm is None else arm.name,
                batch=len(prompts),
                tokens=tokens,
                budget=None if arm is None else args.budget,
                period=None if arm is None else args.period,
                seconds=round(seconds, 3),
                tokens_per_second=round(len(prompts) * (tokens - 1) / seconds, 2),
                resident_mean=round(expected["resident_mean"], 1),
                resident_end=expected["resident_end"],
                kv_bytes_mean=round(expected["resident_mean"] * args.bytes_per_token),
                evictions=due,
                eviction_share=round(spent * due / evictions / seconds, 4) if evictions else 0.0,
            )
        )
    return rows
