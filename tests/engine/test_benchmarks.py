"""The benchmarks that start engines, in their quick form: all is measured, and says where its numbers come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import harness


def test_the_quick_decoding_benchmark_measures_stock_and_policies(tiny: Path, tmp_path: Path) -> None:
    """On a tiny model: what is tested is that everything is measured, not how fast it is."""
    rows_file = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        harness.ROOT / "benchmarks" / "decode.py",
        "--quick",
        "--policies",
        "vase-dkv|vase-attnv",
        "--dtype",
        "float32",
    ]
    result = subprocess.run(
        [str(part) for part in [*command, "--model", tiny, "--out", rows_file]],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    arms = ["stock", "vase-dkv", "vase-attnv"]
    measured = {(row["arm"], row["batch"], row["tokens"]): row for row in rows}
    assert list(measured) == [(arm, batch, tokens) for batch in (1, 4) for arm in arms for tokens in (64, 128)]
    for (arm, batch, tokens), row in measured.items():
        stock = measured["stock", batch, tokens]
        assert row["tokens_per_second"] > 0
        assert {"commit", "device", "torch", "sglang", "model", "dtype"} <= row.keys()
        if arm == "stock":
            assert (row["evictions"], row["eviction_share"]) == (0, 0)
        else:
            assert row["evictions"] >= batch
            assert 0 < row["eviction_share"] < 1
            assert row["resident_mean"] < stock["resident_mean"]
            assert row["kv_bytes_mean"] < stock["kv_bytes_mean"]
    assert all(arm in result.stdout for arm in arms)


def test_the_capacity_benchmark_lets_more_requests_in_with_a_policy(tiny: Path, tmp_path: Path) -> None:
    """512 slots hold two full caches of 64 to 128 + 128 tokens, and all four requests of 48 + 16."""
    command = [sys.executable, harness.ROOT / "benchmarks" / "capacity.py", "--model", tiny, "--out", tmp_path]
    small = ["--requests", "4", "--tokens", "128", "--pool", "512", "--budget", "48", "--period", "16"]
    result = subprocess.run(
        [str(part) for part in [*command, *small]],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    stock, policy = [json.loads(line) for line in (tmp_path / "capacity.jsonl").read_text().splitlines()]
    assert (stock["in_flight_most"], policy["in_flight_most"]) == (2, 4)
    assert stock["retractions"] == policy["retractions"] == 0
    assert 0 < policy["pool_used_most"] < stock["pool_used_most"] <= 1
    assert {"commit", "device", "torch", "sglang", "model", "dtype"} <= policy.keys()
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
    assert "vase-dkv 48+16" in result.stdout
