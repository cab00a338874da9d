"""The file of a trace: what is in it, its size, where it goes; tests/reports/test_trace_file.py reads it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvpolicy.kernels.value_range import value_range_reference
from kvpolicy.sglang_plugin.trace import QUANTILES, Trace, resident_value_range
from tests.reports.traces import simulate


def test_a_file_holds_bitmaps_of_what_each_eviction_took(tmp_path: Path) -> None:
    """One head, ten tokens, of which the first eviction takes 1 and 8; two are appended; the second takes 0 and 11."""
    trace = Trace(10, 1, 1)
    trace.evicted(torch.tensor([[[0, 2, 3, 4, 5, 6, 7, 9]]]), 10)
    trace.evicted(torch.tensor([[[1, 2, 3, 4, 5, 6, 7, 8]]]), 12)
    trace.write(str(tmp_path), "a", token_ids=[7] * 13, policy="random", budget=8, period=2, model="m")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert sorted(file.files) == ["about", "evicted_0", "evicted_1", "token_ids", "true_len", "value_range"]
        assert file["evicted_0"].tolist() == [[[0b01000000, 0b10000000]]]
        assert file["evicted_1"].tolist() == [[[0b10000000, 0b00010000]]]
        assert file["evicted_0"].dtype == np.uint8
        assert file["true_len"].tolist() == [10, 12]
        assert file["token_ids"].tolist() == [7] * 13
        assert file["value_range"].shape == (0,)
        assert json.loads(str(file["about"])) == {
            "format": "kvpolicy trace 2",
            "policy": "random",
            "options": "",
            "budget": 8,
            "period": 2,
            "prompt_len": 10,
            "model": "m",
            "quantiles": list(QUANTILES),
        }


def test_value_ranges_are_quantiles_of_kept_and_of_evicted_tokens(tmp_path: Path) -> None:
    trace = Trace(101, 1, 2)
    ranges = torch.stack([torch.arange(101.0), 200 - torch.arange(101.0)])[None]
    trace.evicted(torch.arange(40).expand(1, 2, 40), 101, ranges)
    trace.evicted(torch.arange(40).expand(1, 2, 40), 101, ranges[:, :, :40])
    trace.write(str(tmp_path), "a")
    with np.load(tmp_path / "a.npz") as file:
        recorded = file["value_range"]
    assert recorded.dtype == np.float16
    kept, evicted = recorded[0]
    assert kept.tolist() == [[[2, 20, 37], [163, 181, 198]]]
    assert evicted.tolist() == [[[43, 70, 97], [103, 130, 157]]]
    assert np.isnan(recorded[1, 1]).all(), "the second eviction took nothing"


def test_a_value_range_beyond_half_precision_is_the_largest_number(tmp_path: Path) -> None:
    trace = Trace(4, 1, 1)
    trace.evicted(torch.tensor([[[0, 1]]]), 4, torch.full((1, 1, 4), 1e6))
    trace.write(str(tmp_path), "a")
    with np.load(tmp_path / "a.npz") as file:
        assert np.unique(file["value_range"]).tolist() == [65504]


def test_value_ranges_are_of_the_tokens_in_a_row() -> None:
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(20, 3, 8, generator=generator).bfloat16() for _ in range(2)]
    row = torch.tensor([11, 3, 3, 19, 0])
    found = resident_value_range(buffers, row)
    assert found.dtype == torch.float32
    for layer in range(2):
        for head in range(3):
            assert torch.equal(found[layer, head], value_range_reference(buffers[layer][row, head]))


def test_a_trace_of_a_large_model_is_small(tmp_path: Path) -> None:
    """36 layers of 8 KV heads, 100 evictions of 64 random tokens at a budget of 4096: as lists, 472 million bytes."""
    generator = torch.Generator().manual_seed(0)
    layers, heads, budget, period = 36, 8, 4096, 64
    trace = Trace(budget, layers, heads)
    for number in range(100):
        ranges = torch.rand(layers, heads, budget + period, generator=generator)
        held = ranges.view(layers, heads, period, -1).argmin(dim=-1, keepdim=True) != torch.arange(1 + budget // period)
        keep = held.flatten(2).nonzero()[:, 2].view(layers, heads, budget)  # of 65 neighbours each one goes
        trace.evicted(keep, budget + (number + 1) * period, ranges)
    trace.write(str(tmp_path), "large", token_ids=range(budget + 100 * period))
    size = (tmp_path / "large.npz").stat().st_size
    print(f"{size} bytes")
    assert size < 4 * 2**20


def test_the_folder_is_made_and_nothing_partial_is_left_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    for _ in range(2):
        simulate(0, 1, 1, 8).write(folder, "a")
    assert [path.name for path in folder.iterdir()] == ["a.npz"]


@pytest.mark.parametrize(
    ("rid", "name"),
    [
        pytest.param("f00d", "f00d.npz", id="plain"),
        pytest.param("a.b", "a.b.npz", id="dot"),
        pytest.param("../../x", "..%2F..%2Fx.npz", id="a path out of the folder"),
        pytest.param("/etc/x", "%2Fetc%2Fx.npz", id="an absolute path"),
        pytest.param("ü 1", "%C3%BC%201.npz", id="not ASCII"),
    ],
)
def test_a_request_id_cannot_leave_the_folder(tmp_path: Path, rid: str, name: str) -> None:
    simulate(0, 1, 1, 8).write(tmp_path / "traces", rid)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npz")] == [f"traces/{name}"]


def test_a_failing_write_is_logged_and_leaves_the_finished_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(0, 1, 1, 8).write(tmp_path, "a")
    before = (tmp_path / "a.npz").read_bytes()
    again = [simulate(1, 1, 1, 8) for _ in range(2)]

    def fail(path: Path, _data: Any) -> None:
        path.touch()
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    for rid, simulation in zip(("a", "b"), again, strict=True):
        simulation.write(tmp_path, rid)
        assert f"the trace of request {rid} is lost: no space left on device" in caplog.text
    assert (tmp_path / "a.npz").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
