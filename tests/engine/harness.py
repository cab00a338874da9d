"""Helpers of the engine tests: checkpoints, engines, prompts. A test has one engine alive at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent / "support"
MODELS = ROOT / "out" / "models"

# Number of the process that runs these tests, where several share them.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

# SGLang's own checks for leaked and doubly freed slots, at every step.
CHECKS = {
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
ENVIRONMENT = {**CHECKS, "PYTHONPATH": str(SUPPORT), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


def smollm2() -> Path:
    """The SmolLM2-135M-Instruct checkpoint, built at first use."""
    target = MODELS / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, ROOT / "examples" / "smollm2_checkpoint.py", target], check=True)
    return target


def tiny_qwen3(target: Path, tokenizer: Path, layers: int = 4, **config_values: Any) -> Path:
    """A random fp32 Qwen3 with grouped queries (8 query and 2 KV heads) and a real tokenizer.

    The weights are wide enough that greedy output depends on the whole context and does not repeat.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        **{"initializer_range": 0.15, **config_values},
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(target)
    words.save_pretrained(target)
    return target


@contextmanager
def engine(model: Path, environment: dict[str, str] | None = None, **arguments: Any) -> Iterator[Any]:
    """A running SGLang engine with all memory checks on; its processes are gone at exit."""
    added = {**ENVIRONMENT, **(environment or {})}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))
    try:
        import sglang

        defaults = {
            "device": "cuda",
            "dtype": "float32",
            "max_total_tokens": 8192,
            "log_level": "error",
            "sleep_on_idle": True,
            "port": 30_000 + 2000 * _WORKER,  # engines derive the ports between their processes from it
        }
        running = sglang.Engine(model_path=str(model), **{**defaults, **arguments})
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    try:
        yield running
    finally:
        running.shutdown()


def greedy(running: Any, prompts: list[list[int]], tokens: int, **parameters: Any) -> list[dict[str, Any]]:
    """Generate `tokens` tokens greedily for all prompts in one batch, never stopping early."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **parameters}
    return running.generate(input_ids=prompts, sampling_params=sampling)


def per_request(
    running: Any, prompts: list[list[int]], choices: list[dict[str, Any]], tokens: int, **parameters: Any
) -> list[dict[str, Any]]:
    """Like :func:`greedy`, in one batch, with `custom_params` for each prompt."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **parameters}
    return running.generate(
        input_ids=prompts, sampling_params=[{**sampling, "custom_params": choice} for choice in choices]
    )


def report(response: dict[str, Any]) -> dict[str, Any]:
    """What a response says of its cache, without the time that evictions took."""
    record: dict[str, Any] = response["meta_info"]["kv_policy"]
    return {name: value for name, value in record.items() if name != "eviction_seconds"}


def flush(running: Any) -> None:
    """Flush the radix cache; SGLang refuses while a step is still in flight, so ask for up to ten seconds."""
    for _ in range(100):
        if running.flush_cache().success:
            return
        time.sleep(0.1)
    raise AssertionError("the scheduler never became idle")


def probe_lines(path: Path) -> list[dict[str, Any]]:
    """The decode steps that the probe plugin recorded."""
    return [json.loads(line) for line in path.read_text().splitlines()]
