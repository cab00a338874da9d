"""In the same memory a packed cache holds more tokens, by as much as a token takes less of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest

pytestmark = pytest.mark.alone

FRACTION = 0.05  # of main memory, for weights and cache


def measured(model: Path, **settings: Any) -> tuple[int, dict[str, Any]]:
    """How many tokens SGLang makes room for, and the report of a short response."""
    with harness.engine(model, max_total_tokens=None, mem_fraction_static=FRACTION, **settings) as running:
        (state,) = running.get_server_info()["internal_states"]
        (response,) = harness.greedy(running, [list(range(200, 220))], 4)
    return state["memory_usage"]["token_capacity"], harness.report(response)


def test_sglang_sizes_its_pool_by_the_smaller_token(tiny: Path) -> None:
    stock, plain = measured(tiny, kv_policy="full")
    packed, record = measured(tiny, kv_quant="range-int4", kv_quant_keys="int8", kv_quant_group=32)
    assert record["kv_bytes_per_token"] < 0.5 * plain["kv_bytes_per_token"]
    # What is free when the pool is made differs from start to start by some megabytes.
    assert packed * record["kv_bytes_per_token"] == pytest.approx(stock * plain["kv_bytes_per_token"], rel=0.03)
    assert packed > 2 * stock
