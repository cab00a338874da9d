"""The CPU platform's own attention must say what SGLang's says, and be the one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness

TOKENS = 60


def mixed(prompts: list[list[int]]) -> list[list[int]]:
    """Six prompts of 1 to 250 tokens; three begin alike."""
    return [*prompts, prompts[2] + prompts[1] * 2, prompts[2] + prompts[0], prompts[0][:1], prompts[1] * 3 + prompts[2]]


def answers(running: Any, prompts: list[list[int]]) -> list[list[dict[str, Any]]]:
    """Cold in one batch, warm in one batch, and some of them while their beginnings are in the cache."""
    runs = [harness.greedy(running, prompts, TOKENS) for _ in range(2)]
    harness.flush(running)
    return [*runs, harness.greedy(running, prompts[2:3], TOKENS), harness.greedy(running, prompts[::-1], TOKENS)]


def test_it_runs_by_default_and_says_what_torch_native_says(
    tiny: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    runs, used = {}, {}
    for name, settings in {"default": {}, "torch_native": {"attention_backend": "torch_native"}}.items():
        probe = tmp_path / f"{name}.jsonl"
        environment = {"KVPOLICY_TEST_PROBE": str(probe), "KVPOLICY_TEST_PREFIX": "0"}
        with harness.engine(tiny, environment, chunked_prefill_size=64, **settings) as running:
            runs[name] = answers(running, mixed(prompts))
        used[name] = {line["attention"] for line in harness.probe_lines(probe)}
    assert used == {"default": {"CPUAttentionBackend"}, "torch_native": {"TorchNativeAttnBackend"}}
    cached = [[answer["meta_info"]["cached_tokens"] for answer in run] for run in runs["default"]]
    assert sum(cached[0]) < sum(cached[3]) < sum(cached[1])
    assert cached == [[answer["meta_info"]["cached_tokens"] for answer in run] for run in runs["torch_native"]]
    for ours, native in zip(runs["default"], runs["torch_native"], strict=True):
        assert [answer["output_ids"] for answer in ours] == [answer["output_ids"] for answer in native]
