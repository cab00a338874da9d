"""What a round of the backends' benchmark makes of the clock, and what its table shows of the rounds."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import attention_backends
import decode_batch
from attention_backends import Row, measure, table

ROW = Row("a", 2, 100, 64, 0, 0, 9.0, 50.0, 40.0)


class Engine:
    """Moves the clock as tokens come: 2 seconds for a request's first token, 3 for 32 more, 5 for the last 31."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.now = asyncio.new_event_loop(), 100.0
        for module in (attention_backends, decode_batch):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    async def async_generate(self, input_ids: list[int], **_: Any) -> AsyncIterator[dict[str, Any]]:
        return self.stream()

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        for tokens, seconds in ((1, 2), (33, 3), (64, 5)):
            await asyncio.sleep(0)
            self.now += seconds
            yield {"meta_info": {"completion_tokens": tokens, "cached_tokens": 7}}


def test_a_round_is_timed_from_the_first_token_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measure(Engine(monkeypatch), "kvp_cpu", [[1] * 100], 64, 3)
    assert row == Row("kvp_cpu", 1, 100, 64, 3, 7, 2.0, round(8 / 63 * 1e3, 2), round(63 / 8, 2))
    engine = Engine(monkeypatch)
    both = measure(engine, "kvp_cpu", [[1] * 100] * 2, 64, 3)
    assert (both.first_token_seconds, both.cached) == (4.0, 14)  # one after the other
    assert both.tokens_per_second == round(2 * 63 / (engine.now - 104), 2)


def test_the_table_has_the_fastest_round_and_the_prefill_of_the_first() -> None:
    rows = [
        ROW,
        replace(ROW, round=1, first_token_seconds=0.5, step_milliseconds=48.0),
        replace(ROW, backend="b", first_token_seconds=8.0, step_milliseconds=30.0),
        replace(ROW, backend="b", round=1, first_token_seconds=0.4, step_milliseconds=24.0),
    ]
    console = Console(width=120, file=io.StringIO())
    console.print(table(rows))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["a", "2", "100 to 164", "9.0", "48.0", "40.0", "1.00"],
        ["b", "2", "100 to 164", "8.0", "24.0", "40.0", "2.00"],
    ]
