"""Many requests of several methods at once, more than the pool holds, some given up: nothing leaks."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import harness

POOL, BUDGET, PERIOD, REQUESTS = 3072, 64, 16, 64
ARMS = ("h2o", "epikv[band_a:1;band_b:2]", "thinkv[segment:16]", "tova", "lagkv-ratio[lag:16;sinks:4]")


def test_no_slot_is_lost_and_every_answer_is_whole(tiny: Path) -> None:
    """SGLang's own checks for leaked and doubly freed slots are on at every step, busy or idle."""
    rng = random.Random(5)
    shared = [rng.randrange(100, 40000) for _ in range(40)]
    with harness.engine(
        tiny, kv_policy="|".join(ARMS), kv_budget=BUDGET, kv_period=PERIOD, max_total_tokens=POOL
    ) as running:

        async def request(number: int) -> tuple[int, bool, dict[str, Any]]:
            tokens, given_up = rng.choice([1, 17, 60, 120, 200]), number % 8 == 3
            prompt = [
                *shared[: rng.choice([0, 20, 40])],
                *(rng.randrange(100, 40000) for _ in range(rng.randint(5, 90))),
            ]
            parameters = {
                "temperature": 0,
                "max_new_tokens": 2000 if given_up else tokens,
                "ignore_eos": True,
                "custom_params": {"kv_policy": ARMS[number % len(ARMS)], "kv_period": rng.choice([1, 5, PERIOD])},
            }
            await asyncio.sleep(rng.random() * 4)
            rid = f"stress-{number:03}"  # SGLang aborts all that begin with it
            task = asyncio.ensure_future(running.async_generate(input_ids=prompt, sampling_params=parameters, rid=rid))
            if given_up:
                await asyncio.sleep(rng.random() * 3)
                running.tokenizer_manager.abort_request(rid=rid)
            return tokens, given_up, await task

        async def all_requests() -> list[tuple[int, bool, dict[str, Any]]]:
            return await asyncio.gather(*map(request, range(REQUESTS)))

        answers = running.loop.run_until_complete(all_requests())
        for tokens, given_up, answer in answers:
            if given_up:
                assert answer["meta_info"]["finish_reason"]["type"] in ("abort", "length")
            else:
                assert len(answer["output_ids"]) == tokens
        compacted = [answer["meta_info"]["kv_policy"]["evictions"] > 0 for _, gone, answer in answers if not gone]
        assert sum(compacted) > REQUESTS // 3
        harness.flush(running)
        (state,) = running.get_server_info()["internal_states"]
        assert state["memory_usage"]["token_capacity"] == POOL
        (last,) = harness.greedy(running, [shared], 100, custom_params={"kv_policy": ARMS[0]})
        assert last["meta_info"]["kv_policy"]["evictions"] >= 2
