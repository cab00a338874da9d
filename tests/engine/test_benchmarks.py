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
