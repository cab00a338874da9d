"""benchmarks/epikv_memory.py at small sizes: what it counts, and how that grows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import epikv_memory
from epikv_memory import Shape, attention_of, exponent, peak_bytes, rows, signals_of

SHAPE, CPU = Shape(4, 2, 4, 16), torch.device("cpu")
LENGTHS = (128, 256, 512, 1024)


def test_the_peak_is_the_most_that_is_held_at_once() -> None:
    def work() -> torch.Tensor:
        first = torch.zeros(1000, dtype=torch.uint8)
        second = torch.zeros(50_000, dtype=torch.uint8)
        del second
        third = torch.zeros(20_000, dtype=torch.uint8)
        return first if len(third) else third

    assert 51_000 <= peak_bytes(work, CPU) < 51_400  # rounded up to the allocator's steps


def test_signals_grow_with_the_length_and_attention_with_its_square() -> None:
    found = list(rows(SHAPE, LENGTHS, 1e9, CPU))
    fits = {row["method"]: row["exponent"] for row in found if "exponent" in row}
    assert fits == {"epikv": pytest.approx(1, abs=0.02), "attention": pytest.approx(2, abs=0.02)}
    peaks = {(row["method"], row["length"]): row["peak_bytes"] for row in found if "length" in row}
    assert peaks.keys() == {(method, length) for method in ("epikv", "attention") for length in LENGTHS}
    assert peaks["epikv", 1024] < peaks["attention", 1024]
    # At least what is there at the end: the matrix, and what the signals are computed from.
    assert peaks["attention", 1024] >= 2 * 4 * 1024**2
    assert peaks["attention", 1024] <= epikv_memory.BYTES_PER_ELEMENT * 4 * 1024**2
    assert peaks["epikv", 1024] >= 1024 * (2 * 4 + 4 * 2 * 8)


def test_a_matrix_beyond_the_limit_is_not_computed() -> None:
    found = list(rows(SHAPE, LENGTHS, epikv_memory.BYTES_PER_ELEMENT * 4 * 256**2, CPU))
    attention = {row["length"]: row for row in found if row["method"] == "attention" and "length" in row}
    assert [attention[length]["peak_bytes"] is None for length in LENGTHS] == [False, False, True, True]
    assert attention[1024]["matrix_bytes"] == 2 * 4 * 1024**2
    assert [row["lengths"] for row in found if "exponent" in row] == [list(LENGTHS), [128, 256]]
    assert not any("exponent" in row for row in rows(SHAPE, LENGTHS[:1], 0, CPU))


def test_what_is_measured_is_what_the_policy_and_a_model_compute() -> None:
    signals = signals_of(SHAPE, 100, CPU)()
    assert signals.shape == (100,)
    assert signals.unique().numel() > 90
    weights = attention_of(SHAPE, 60, CPU)()
    assert weights.shape == (4, 60, 60)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(4, 60), rtol=0, atol=0.02)


def test_the_exponent_of_a_power_law() -> None:
    assert exponent([(n, 7 * n**3) for n in (10, 20, 40, 80)]) == 3
    assert exponent([(n, 5 * n) for n in (10, 20)]) == 1


def test_rows_are_json_lines_with_their_conditions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(epikv_memory.SHAPES, "smollm2", SHAPE)
    epikv_memory.main(["--shapes", "smollm2", "--lengths", "256", "128"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["method"], row.get("length")) for row in printed] == [
        (method, length) for method in ("epikv", "attention") for length in (128, 256, None)
    ]
    assert all(row["shape"] == "smollm2" and {"commit", "device", "torch", "date"} <= row.keys() for row in printed)
