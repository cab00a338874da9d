"""How much cache an arm held, counted step by step, and when two arms held the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.reports.ab.memory import ArmMemory, MemoryMatch, iso_cache, match, memory_of, within_tolerance
from kvpolicy.reports.ab.responses import read_arm
from kvpolicy.reports.lmeval_output import OutputError
from tests.reports.ab.runs import BYTES, TASK, full, record, row, sample, write


def memory(folder: Path, records: list[dict[str, Any] | None]) -> ArmMemory:
    samples = [sample(i, [row()], None if each is None else [each]) for i, each in enumerate(records)]
    write(folder, samples)
    return memory_of(read_arm("arm", folder), TASK)


def test_every_decode_step_counts_once(tmp_path: Path) -> None:
    """The cache at each step of a short and a long response, added up here step by step."""
    held, evicted = [], 20
    for steps, budget in ((30, 1000), (500, 64)):
        tokens = 20
        for _ in range(steps):
            tokens = 64 if tokens >= budget + 16 else tokens
            tokens += 1
            held.append(tokens)
        evicted = tokens
    found = memory(tmp_path, [record(steps=30), record(steps=500)])
    assert found.decode_steps == 530
    assert found.resident_mean == pytest.approx(sum(held) / 530)
    assert found.kv_bytes_mean == pytest.approx(BYTES * sum(held) / 530)
    assert found.kv_bytes_full_mean == pytest.approx(BYTES * (sum(range(21, 51)) + sum(range(21, 521))) / 530)
    assert found.kv_bytes_peak == BYTES * max(held)
    assert found.kv_bytes_end == pytest.approx(BYTES * (50 + evicted) / 2)
    plain_mean = (held[0] + held[29]) / 4 + sum(held[30:]) / 1000
    assert found.resident_mean != pytest.approx(plain_mean, rel=0.05)


def test_what_is_held_beside_the_cache(tmp_path: Path) -> None:
    beside = {"query_window_bytes": 300, "token_state_bytes": 50, "page_summary_bytes": 7, "hidden_change_bytes": 1}
    found = memory(tmp_path, [record(steps=100, **beside), full(steps=300)])
    assert found.beside_bytes == pytest.approx(358 * 100 / 400)


def test_responses_without_record_are_counted_and_left_out(tmp_path: Path) -> None:
    found = memory(tmp_path, [None, full(steps=9), None])
    assert (found.responses, found.without_record, found.decode_steps) == (3, 2, 9)
    assert found.resident_mean == pytest.approx(25)


def test_an_arm_without_records_or_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=f"{TASK}: no response of arm arm carries a kv_policy record"):
        memory(tmp_path / "1", [None, None])
    with pytest.raises(OutputError, match="all responses of arm arm ended with their first token"):
        memory(tmp_path / "2", [record(steps=0)])


@pytest.mark.parametrize(
    ("ratio", "matched"),
    [(1.0, True), (1.0199, True), (1.0201, False), (1 / 1.0199, True), (1 / 1.0201, False), (3.0, False)],
)
def test_two_percent_either_way(ratio: float, matched: bool) -> None:
    assert within_tolerance(ratio) is matched
    assert MemoryMatch(ratio, 1.0).matched is matched
    assert MemoryMatch(ratio, 1.0).label == f"{'' if matched else 'un'}matched, mean cache {ratio:.3f} times as large"


def test_the_second_arm_is_divided_by_the_first(tmp_path: Path) -> None:
    small = memory(tmp_path / "1", [record(steps=400)])
    whole = memory(tmp_path / "2", [full(steps=400, query_window_bytes=10_000)])
    found = match(whole, small)
    assert found.ratio == pytest.approx(small.resident_mean / whole.resident_mean)
    assert found.with_beside == pytest.approx(small.kv_bytes_mean / (whole.kv_bytes_mean + 10_000))
    assert not found.matched
    assert match(small, small).matched


def test_packed_bytes_count_and_not_tokens(tmp_path: Path) -> None:
    """Twice the tokens at half the bytes is the same cache."""
    plain, packed = record(prompt=0, steps=100, budget=10**6), record(prompt=0, steps=201, budget=10**6)
    packed |= {name: value / 2 for name, value in packed.items() if name.startswith("kv_bytes")}
    found = match(memory(tmp_path / "1", [plain]), memory(tmp_path / "2", [packed]))
    assert found.ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("held", "tokens"),
    [
        pytest.param(record(prompt=79), 79, id="a prompt that is not due"),
        pytest.param(record(prompt=80), 64, id="a prompt that is cut at once"),
        pytest.param(record(prompt=500), 64, id="a long prompt"),
        pytest.param(full(prompt=500), 500, id="the whole cache"),
        pytest.param(record(prompt=500, steps=0, evictions=0), 500, id="a response without decode steps"),
        pytest.param(record(prompt=10, full_end=150), 1, id="a retracted response"),
    ],
)
def test_cache_when_generation_starts(tmp_path: Path, held: dict[str, Any], tokens: int) -> None:
    found = memory(tmp_path, [held, full(prompt=100)])
    assert found.after_prefill_bytes == pytest.approx(BYTES * (tokens + 100) / 2)


def test_arms_that_start_alike_and_end_unlike(tmp_path: Path) -> None:
    """One cuts the prompt and then lets the cache grow, one keeps it small."""
    once = record(prompt=500, steps=600, resident_mean=364.5, kv_bytes_mean=BYTES * 364.5, evictions=1)
    always = record(prompt=500, steps=600)
    found = iso_cache(memory(tmp_path / "1", [always]), memory(tmp_path / "2", [once]))
    assert found.after_prefill == 1.0
    assert found.mean == pytest.approx(364.5 / always["resident_mean"])
    assert found.misleading
    assert not iso_cache(memory(tmp_path / "3", [always]), memory(tmp_path / "4", [always])).misleading
    unlike = iso_cache(memory(tmp_path / "5", [always]), memory(tmp_path / "6", [full(prompt=500, steps=600)]))
    assert not unlike.misleading  # nobody would call these equal
