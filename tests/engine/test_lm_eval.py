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


pytestmark = pytest.mark.alone


def test_the_literal_command_needs_no_argument_of_ours_but_policy_and_budget(smollm2: Path, tmp_path: Path) -> None:
    """lm-eval passes device=cuda and turns chunked prefill off; nothing in the command makes up for it.

    What a request may choose comes from lm-eval's generation arguments.
    """
    command = [
        *(BIN / "lm_eval", "run", "--model", "sglang", "--include_path", harness.ROOT / "lmeval_tasks"),
        *("--model_args", f"pretrained={smollm2},kv_policy=vase-dkv,kv_budget=100", "--tasks", "kvp_gsm8k_sample"),
        *("--limit", "1", "--log_samples", "--output_path", tmp_path),
        *(
            "--gen_kwargs",
            json.dumps({"max_gen_toks": 150, "custom_params": {"kv_budget": 90, "kv_period": 16, "kv_seed": 5}}),
        ),
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
    assert (sample["kv_policy"]["budget"], sample["kv_policy"]["seed"]) == (90, 5)
    assert sample["kv_policy"]["evictions"] >= 1
    summary = subprocess.run([BIN / "kvpolicy", "cache", tmp_path], capture_output=True, text=True, check=False)
    assert summary.returncode == 0, summary.stderr
    assert "budget 90, period 16, seed 5" in summary.stdout


def test_a_cache_in_low_bits_needs_one_argument(smollm2: Path, tmp_path: Path) -> None:
    """Without a policy; the request's own period says how many of its newest tokens stay unpacked."""
    command = [
        *(BIN / "lm_eval", "run", "--model", "sglang", "--include_path", harness.ROOT / "lmeval_tasks"),
        *("--model_args", f"pretrained={smollm2},kv_quant=range-int4,max_running_requests=4"),
        *("--tasks", "kvp_gsm8k_sample", "--limit", "1", "--log_samples", "--output_path", tmp_path),
        *("--gen_kwargs", json.dumps({"max_gen_toks": 40, "custom_params": {"kv_period": 16}})),
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
    (file,) = tmp_path.rglob("samples_*.jsonl")
    (sample,) = [json.loads(line) for line in file.read_text().splitlines()]
    record = sample["kv_policy"]
    assert (record["policy"], record["kv_quant"], record["kv_quant_group"]) == ("full", "range-int4", 64)
    assert 0.05 < record["protected_end"] < 0.8
    assert 16 * record["kv_bytes_per_token"] == pytest.approx(
        record["bits_per_element"] * record["kv_bytes_per_token_full"]
    )
    assert record["kv_bytes_end"] < 0.75 * record["kv_bytes_full_end"]
    summary = subprocess.run([BIN / "kvpolicy", "cache", tmp_path], capture_output=True, text=True, check=False)
    assert summary.returncode == 0, summary.stderr
    assert "kv_quant range-int4" in summary.stdout
