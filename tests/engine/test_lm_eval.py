"""The main job: stock lm-eval on a real model and real problems, every response held to its budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest

BIN = Path(sys.executable).parent


@pytest.mark.usefixtures("smollm2")
def test_the_demo_evaluates_and_says_what_happened_to_the_cache(tmp_path: Path) -> None:
    settings = {"PYTHON": str(BIN), "LIMIT": "2", "MAX_TOKENS": "180", "OUT": str(tmp_path)}
    environment = {**os.environ, **harness.CHECKS, **settings}
    environment.pop("MODEL", None)
    result = subprocess.run(
        [harness.ROOT / "examples" / "demo.sh"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "exact_match" in result.stdout
    assert "compacted at least once" in result.stdout
    (file,) = tmp_path.rglob("samples_kvp_gsm8k_sample_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        record = sample["kv_policy"]
        assert record["policy"] == "vase-dkv"
        assert record["evictions"] >= 1
        assert record["resident_end"] <= 128 + 32
        assert record["tokens_evicted"] == record["full_end"] - record["resident_end"]
        assert record["kv_bytes_mean"] < record["kv_bytes_full_mean"]
    (numbers,) = tmp_path.rglob("cache.json")
    (task,) = json.loads(numbers.read_text())["tasks"]
    assert task["evictions"] == sum(sample["kv_policy"]["evictions"] for sample in samples)


def test_the_literal_command_needs_no_argument_of_ours_but_policy_and_budget(smollm2: Path, tmp_path: Path) -> None:
    """lm-eval passes device=cuda and turns chunked prefill off; nothing in the command makes up for it."""
    command = [
        *(BIN / "lm_eval", "run", "--model", "sglang", "--include_path", harness.ROOT / "lmeval_tasks"),
        *("--model_args", f"pretrained={smollm2},kv_policy=vase-dkv,kv_budget=100", "--tasks", "kvp_gsm8k_sample"),
        *("--limit", "1", "--gen_kwargs", "max_gen_toks=150", "--log_samples", "--output_path", tmp_path),
    ]
    result = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **harness.CHECKS},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stderr.count("serving on the CPU") == 1
    (file,) = tmp_path.rglob("samples_*.jsonl")
    (sample,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert sample["kv_policy"]["budget"] == 100
    assert sample["kv_policy"]["evictions"] >= 1
