"""The trace of a request against a simulation with one list of positions per head."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpolicy.sglang_plugin.trace import Trace


def traced(seed: int, layers: int, heads: int, prefill: int) -> tuple[Trace, list[list[list[list[int]]]], list[int]]:
    """A trace of random evictions, the positions after each of them, and the true lengths at them."""
    rng = random.Random(seed)
    trace, true_len = Trace(prefill, layers, heads), prefill
    resident = [[list(range(prefill)) for _ in range(heads)] for _ in range(layers)]
    rounds, lengths = [], []
    for _ in range(4):
        appended = rng.randint(0, 17)
        for head in (head for layer in resident for head in layer):
            head.extend(range(true_len, true_len + appended))
        true_len += appended
        tokens = len(resident[0][0])
        kept = rng.randint(1, tokens)
        keep = [[sorted(rng.sample(range(tokens), kept)) for _ in range(heads)] for _ in range(layers)]
        trace.evicted(torch.tensor(keep), true_len)
        resident = [
            [[positions[i] for i in chosen] for positions, chosen in zip(*pair, strict=True)]
            for pair in zip(resident, keep, strict=True)
        ]
        rounds.append(copy.deepcopy(resident))
        lengths.append(true_len)
    return trace, rounds, lengths


@pytest.mark.parametrize(
    ("layers", "heads", "prefill"),
    [
        pytest.param(1, 1, 1, id="one head and one token"),
        pytest.param(2, 3, 63, id="63 tokens"),
        pytest.param(3, 1, 111, id="111 tokens of one head"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_written_trace_holds_true_positions(tmp_path: Path, layers: int, heads: int, prefill: int, seed: int) -> None:
    trace, rounds, lengths = traced(seed, layers, heads, prefill)
    trace.write(str(tmp_path), "request")
    with np.load(tmp_path / "request.npz") as file:
        assert sorted(file.files) == ["kept_0", "kept_1", "kept_2", "kept_3", "true_len"]
        assert file["true_len"].tolist() == lengths
        assert file["true_len"].dtype == np.int64
        for i, expected in enumerate(rounds):
            assert file[f"kept_{i}"].tolist() == expected
            assert file[f"kept_{i}"].dtype == np.int32


def test_the_folder_is_made_and_nothing_partial_is_left_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    trace, _, _ = traced(0, 1, 1, 8)
    trace.write(str(folder), "a")
    trace.write(str(folder), "a")
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
    trace, _, _ = traced(0, 1, 1, 8)
    trace.write(str(tmp_path / "traces"), rid)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npz")] == [f"traces/{name}"]


def test_a_failing_write_is_logged_and_leaves_the_finished_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace, _, _ = traced(0, 1, 1, 8)
    trace.write(str(tmp_path), "a")
    before = (tmp_path / "a.npz").read_bytes()

    def fail(file: object, **_arrays: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", fail)
    for rid in ("a", "b"):
        trace.write(str(tmp_path), rid)
        assert f"the trace of request {rid} is lost: no space left on device" in caplog.text
    assert (tmp_path / "a.npz").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
