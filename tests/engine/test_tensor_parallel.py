"""Two ranks, each with its own KV heads, on the CPU over gloo: the same tokens kept, the same output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

TOKENS = 120


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank is bound to a core of its own")
def test_two_ranks_keep_and_say_what_one_does(tiny: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    responses: dict[int, list[dict[str, Any]]] = {}
    for ranks, cores in ((1, "0,1"), (2, "0|1")):
        settings = {"kv_policy": "vase-dkv", "kv_budget": 64, "kv_period": 16, "kv_trace": str(tmp_path)}
        environment = {"SGLANG_CPU_OMP_THREADS_BIND": cores}
        with harness.engine(tiny, environment, **settings, tp_size=ranks) as running:
            responses[ranks] = harness.greedy(running, prompts, TOKENS)
    for one, two in zip(responses[1], responses[2], strict=True):
        assert two["meta_info"]["kv_policy"] == one["meta_info"]["kv_policy"]
        assert two["output_ids"] == one["output_ids"]
        whole = np.load(tmp_path / f"{one['meta_info']['id']}.npz")
        halves = [np.load(tmp_path / f"{two['meta_info']['id']}.tp{rank}.npz") for rank in range(2)]
        assert len(whole["true_len"]) >= 4
        for name in whole.files:
            axis = 1 if name.startswith("kept") else 0
            parts = [half[name] for half in halves] if axis else [halves[0][name]]
            np.testing.assert_array_equal(np.concatenate(parts, axis=axis), whole[name])
