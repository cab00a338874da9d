"""Two ranks, each with its own KV heads, on the CPU over gloo: the same tokens kept, the same output.

Sampled answers too: the two engines are two runs, and a seed gives the same answer in both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

from kvpolicy.reports.trace_file import load_trace

TOKENS = 120
# epikv chooses one set for all heads, but by hidden states, which every rank has whole.
POLICIES = "vase-dkv|vase-attnv|random|epikv[band_a:1;band_b:2]"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank is bound to a core of its own")
def test_two_ranks_keep_and_say_what_one_does(tiny: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    responses: dict[int, list[dict[str, Any]]] = {}
    for ranks, cores in ((1, "0,1"), (2, "0|1")):
        settings = {"kv_policy": POLICIES, "kv_budget": 64, "kv_period": 16, "kv_trace": str(tmp_path)}
        environment = {"SGLANG_CPU_OMP_THREADS_BIND": cores}
        with harness.engine(tiny, environment, **settings, tp_size=ranks) as running:
            responses[ranks] = [
                response
                for i, name in enumerate(POLICIES.split("|"))
                for sampling in ({}, {"temperature": 0.7})
                for response in harness.greedy(
                    running, prompts[1:2], TOKENS, custom_params={"kv_policy": name, "kv_seed": i}, **sampling
                )
            ]
    for one, two in zip(responses[1], responses[2], strict=True):
        # Each rank has all hidden states, so their taps take twice the bytes; all else is divided among the ranks.
        hidden = 2 * harness.report(one)["hidden_change_bytes"]
        assert harness.report(two) == harness.report(one) | {"hidden_change_bytes": hidden}
        assert two["output_ids"] == one["output_ids"]
        whole = load_trace(tmp_path / f"{one['meta_info']['id']}.npz")
        halves = [load_trace(tmp_path / f"{two['meta_info']['id']}.tp{rank}.npz") for rank in range(2)]
        assert whole.evictions >= 4
        for half in halves:
            assert half.true_len.tolist() == whole.true_len.tolist()
        for i in range(whole.evictions):
            parts = np.concatenate([half.kept(i) for half in halves], axis=1)
            np.testing.assert_array_equal(parts, whole.kept(i))
