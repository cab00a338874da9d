"""A shared prompt prefix is never written, and eviction does not keep a prompt out of the radix tree."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest

PREFIX = 40


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_prefix_shared_with_an_evicting_request_stays_bit_identical(
    overlap: bool, tiny: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    probe = tmp_path / "steps.jsonl"
    environment = {"KVPOLICY_TEST_PROBE": str(probe), "KVPOLICY_TEST_PREFIX": str(PREFIX)}
    first, second = (prompts[2][:PREFIX] + prompts[i] for i in (0, 1))
    settings = {"kv_policy": "vase-dkv", "kv_budget": 96, "kv_period": 16, "disable_overlap_schedule": not overlap}
    with harness.engine(tiny, environment, **settings) as running:
        alone = harness.greedy(running, [second], 12)[0]
        harness.flush(running)
        probe.unlink()
        evicting = harness.greedy(running, [first], 200)[0]
        beside = harness.greedy(running, [second], 12)[0]
        again = harness.greedy(running, [first], 200)[0]
        both = harness.greedy(running, [first, second], 150)
        rerun = harness.greedy(running, [first, second], 150)
    lines = harness.probe_lines(probe)
    digests = {line["digest"][0] for line in lines if line["positions"][0] == line["resident"][0] - 1}
    slots = {tuple(line["slots"][0]) for line in lines if line["positions"][0] == line["resident"][0] - 1}
    assert len(digests) == len(slots) == 1, "the prefix's slots or their content changed"
    assert evicting["meta_info"]["kv_policy"]["evictions"] >= 5
    assert beside["meta_info"]["kv_policy"]["evictions"] == 0
    assert beside["output_ids"] == alone["output_ids"]
    assert beside["meta_info"]["cached_tokens"] == PREFIX
    assert again["meta_info"]["cached_tokens"] == len(first) - 1
    assert again["output_ids"] == evicting["output_ids"]
    for response, prompt in zip(rerun, (first, second), strict=True):
        assert response["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert [r["output_ids"] for r in rerun] == [r["output_ids"] for r in both]


def test_a_prompt_in_chunks_is_cached_whole_before_it_is_compacted(
    overlap: bool, tiny: Path, prompts: list[list[int]]
) -> None:
    settings = {"kv_policy": "vase-dkv", "kv_budget": 48, "kv_period": 16, "disable_overlap_schedule": not overlap}
    prompt = prompts[2] + prompts[1]
    with harness.engine(tiny, chunked_prefill_size=32, **settings) as running:
        runs = [harness.greedy(running, [prompt, prompts[0]], 60) for _ in range(2)]
    assert all(response["meta_info"]["kv_policy"]["evictions"] >= 1 for run in runs for response in run)
    assert [response["meta_info"]["cached_tokens"] for response in runs[1]] == [len(prompt) - 1, len(prompts[0]) - 1]
