"""Rows cycle between budget and budget + period, slots are really freed, positions stay true."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import harness
import pytest

BUDGET, PERIOD = 64, 16
TOKENS = 200
PROMPT_LENGTHS = (20, 47, 90)
WHICH = pytest.mark.parametrize("which", range(3), ids=["prompt20", "prompt47", "prompt90-over-budget"])


class Run(NamedTuple):
    """Responses of three requests that ran one after the other, and the probe's line for each decode step."""

    responses: list[dict]
    lines: list[dict]


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def run(
    request: pytest.FixtureRequest, tiny: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Three requests (prompts of 20, 47 and 90 tokens) alone, one after the other: responses and probe lines."""
    probe = tmp_path_factory.mktemp("probe") / "steps.jsonl"
    environment = {"KVPOLICY_TEST_PROBE": str(probe), "KVPOLICY_TEST_PREFIX": "8"}
    settings = {"kv_policy": "vase-dkv", "kv_budget": BUDGET, "kv_period": PERIOD}
    with harness.engine(tiny, environment, **settings, disable_overlap_schedule=not request.param) as running:
        responses = [harness.greedy(running, [prompt], TOKENS)[0] for prompt in prompts]
    return Run(responses, harness.probe_lines(probe))


def steps_of(lines: list[dict], which: int) -> list[dict]:
    """The decode steps of one request; they ran one after the other, so each starts where positions break off."""
    starts = [i for i, line in enumerate(lines) if i == 0 or line["positions"][0] != lines[i - 1]["positions"][0] + 1]
    return lines[starts[which] : starts[which] + TOKENS - 1]


@WHICH
def test_token_t_is_rotated_with_position_t(which: int, run: Run) -> None:
    prompt = PROMPT_LENGTHS[which]
    positions = [line["positions"] for line in steps_of(run.lines, which)]
    assert positions == [[prompt + i] for i in range(TOKENS - 1)]


@WHICH
def test_resident_tokens_cycle_from_budget_to_budget_plus_period(which: int, run: Run) -> None:
    """A step sees what was kept plus its own new token; a long prompt is cut before its second step."""
    expected, resident = [], PROMPT_LENGTHS[which]
    for step in range(TOKENS - 1):
        # Before the first decode step the prefill's result, and with it the prompt, may not be in the tree yet.
        if resident >= BUDGET + PERIOD and step >= 1:
            resident = BUDGET
        resident += 1
        expected.append(resident)
    assert [line["resident"][0] for line in steps_of(run.lines, which)] == expected


@WHICH
def test_the_report_is_what_the_probe_saw(which: int, run: Run) -> None:
    prompt = PROMPT_LENGTHS[which]
    resident = [line["resident"][0] for line in steps_of(run.lines, which)]
    report = run.responses[which]["meta_info"]["kv_policy"]
    assert report["decode_steps"] == len(resident)
    assert report["resident_mean"] == pytest.approx(sum(resident) / len(resident))
    assert report["resident_peak"] == max(prompt, *resident)
    assert report["resident_end"] == resident[-1]
    assert report["tokens_evicted"] == prompt + TOKENS - 1 - resident[-1]
    assert report["kv_bytes_per_token"] == 2 * 4 * 2 * 32 * 4
    assert report["kv_bytes_mean"] == pytest.approx(report["resident_mean"] * 2048)
    assert report["full_end"] == prompt + TOKENS - 1


def test_evicted_slots_return_to_the_pool(run: Run) -> None:
    steps = steps_of(run.lines, 0)
    free = [line["free"] for line in steps]
    for i in range(1, len(steps)):
        if steps[i]["resident"][0] == BUDGET + 1 and steps[i - 1]["resident"][0] == BUDGET + PERIOD:
            freed = free[i] - free[i - 1] + 1
            # At its first eviction the request leaves its prompt to the radix tree and replaces those slots.
            assert freed in (PERIOD, PERIOD - PROMPT_LENGTHS[0])
    assert free[-1] > free[0] - 2 * (BUDGET + PERIOD)
