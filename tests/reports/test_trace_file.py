"""Traces read back: the same tokens in every head as in a simulation that keeps lists; refusals of other files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kvpolicy.reports import trace_file
from kvpolicy.reports.trace_file import TraceError, load_trace
from kvpolicy.sglang_plugin import trace as written
from tests.reports.traces import simulate

sizes = pytest.mark.parametrize(
    ("layers", "heads", "prefill"),
    [
        pytest.param(1, 1, 1, id="one head and one token"),
        pytest.param(2, 3, 63, id="63 tokens"),
        pytest.param(3, 1, 111, id="111 tokens of one head"),
    ],
)
seeds = pytest.mark.parametrize("seed", range(3))


@sizes
@seeds
def test_a_trace_says_what_every_head_kept(tmp_path: Path, layers: int, heads: int, prefill: int, seed: int) -> None:
    simulation = simulate(seed, layers, heads, prefill)
    found = load_trace(simulation.write(tmp_path))
    assert (found.evictions, found.layers, found.heads) == (4, layers, heads)
    assert found.true_len.tolist() == simulation.true_len
    for i, expected in enumerate(simulation.kept):
        assert found.kept(i).tolist() == expected
        assert found.held(i).shape == (layers, heads, simulation.true_len[i])
    assert found.kept(-1).tolist() == simulation.kept[-1]
    with pytest.raises(IndexError):
        found.kept(4)


@sizes
@seeds
def test_shares_count_the_heads_that_hold_a_position(
    tmp_path: Path, layers: int, heads: int, prefill: int, seed: int
) -> None:
    simulation = simulate(seed, layers, heads, prefill)
    shares = load_trace(simulation.write(tmp_path)).shares()
    assert shares.shape == (4, simulation.true_len[-1])
    for i, (kept, length) in enumerate(zip(simulation.kept, simulation.true_len, strict=True)):
        every = [position for layer in kept for head in layer for position in head]
        assert shares[i, :length].tolist() == [every.count(p) / (layers * heads) for p in range(length)]
        assert np.isnan(shares[i, length:]).all()


def test_a_trace_says_what_it_is_of(tmp_path: Path) -> None:
    simulation = simulate(0, 2, 3, 20)
    found = load_trace(simulation.write(tmp_path))
    assert (found.policy, found.options, found.model) == ("random", "sinks:0", "org/model")
    assert (found.budget, found.period, found.prompt_len) == (24, 8, 20)
    assert found.token_ids.tolist() == list(range(1000, 1000 + simulation.true_len[-1] + 6))
    assert found.value_range is not None
    assert found.value_range.shape == (4, 2, 2, 3, 3)
    assert found.quantiles == (0.05, 0.5, 0.95)


def test_a_trace_without_value_ranges_and_text_is_read(tmp_path: Path) -> None:
    simulation = simulate(0, 1, 2, 20, ranges=False)
    simulation.trace.write(str(tmp_path), "bare")
    found = load_trace(tmp_path / "bare.npz")
    assert found.value_range is None
    assert (len(found.token_ids), found.policy, found.budget, found.prompt_len) == (0, "", 0, 20)
    assert found.kept(2).tolist() == simulation.kept[2]


def test_writer_and_reader_mean_the_same_format() -> None:
    assert written.FORMAT == trace_file.FORMAT


def old(path: Path) -> None:
    np.savez_compressed(path, true_len=np.array([9]), kept_0=np.zeros((1, 1, 4), dtype=np.int32))


def later(path: Path) -> None:
    np.savez(path, about=np.array(json.dumps({"format": "kvpolicy trace 9"})))


def another(path: Path) -> None:
    np.savez(path, weights=np.zeros(3))


def cut(path: Path) -> None:
    simulate(0, 2, 2, 400).write(path.parent, "whole")
    with zipfile.ZipFile(path.parent / "whole.npz") as whole, zipfile.ZipFile(path, "w") as lacking:
        for name in whole.namelist():
            if name != "evicted_2.npy":
                lacking.writestr(name, whole.read(name))


def flipped(path: Path) -> None:
    data = bytearray(simulate(0, 2, 2, 400).write(path.parent, "whole").read_bytes())
    data[100:140] = bytes(40)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        pytest.param(lambda path: None, "does not exist", id="nothing"),
        pytest.param(lambda path: path.mkdir(), "is a folder; name one of the .npz files in it", id="a folder"),
        pytest.param(lambda path: path.write_text("{}"), "is not a trace; kv_trace writes", id="text"),
        pytest.param(lambda path: path.write_bytes(b""), "is not a trace; kv_trace writes", id="an empty file"),
        pytest.param(another, "is not a trace; kv_trace writes", id="other arrays"),
        pytest.param(old, "was written by an older kvpolicy, as lists of positions; run again", id="old format"),
        pytest.param(later, "is a 'kvpolicy trace 9', and this kvpolicy reads 'kvpolicy trace 2'", id="later format"),
        pytest.param(cut, "cannot be read as a trace: .*evicted_2", id="an eviction is missing"),
        pytest.param(flipped, "cannot be read as a trace: ", id="damaged"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_sentence(tmp_path: Path, make: object, sentence: str) -> None:
    path = tmp_path / "x.npz"
    make(path)  # type: ignore[operator]
    with pytest.raises(TraceError, match=sentence) as caught:
        load_trace(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).count("\n") == 0
