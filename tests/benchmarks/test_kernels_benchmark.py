"""benchmarks/kernel_speed.py: what it refuses, what its rows say; its rounds choose what the policies choose."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernel_speed
from kernel_cases import OPERATIONS, Case, Workload, plain_name
from kernel_gate import refusal
from kernel_rounds import ROUNDS, choose, evict
from kernel_speed import TINY, main, measured, needed, rows
from kernel_timing import LARGEST_COPY, Speed, Times

from kvpolicy.kernels.compact import compact, gather_layers
from kvpolicy.kernels.fill_places import fill_places
from kvpolicy.policies.base import Candidates, Noise
from tests.kernels.interpreting import interpreted

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GREEN = "def test_a():\n    pass\n"
SKIPPED = "import pytest\n\n\n@pytest.mark.skip(reason='nothing to run on')\ndef test_a():\n    pass\n"
ON_GPU = "import pytest\n\n\n@pytest.mark.gpu\ndef test_a():\n    pass\n"


def no_refusal(name: str, *, gpu: bool) -> str | None:
    return None


def test_without_a_cuda_device_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^kernel_speed.py: a bandwidth needs a CUDA device, and there is none .*\.$"):
        main([])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("gpu", [False, True], ids=["interpreted", "on a GPU"])
def test_nothing_is_printed_unless_all_tests_are_green(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def last_is_red(name: str, *, gpu: bool) -> str | None:
        asked.append((name, gpu))
        return "compact is red" if name == "compact" else None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(kernel_speed, "refusal", last_is_red)
    with pytest.raises(SystemExit, match=r"^kernel_speed.py: compact is red\.$"):
        main([] if gpu else ["--interpret"])
    assert asked == [(name, gpu) for name in OPERATIONS if plain_name(name) == name]
    assert capsys.readouterr().out == ""


def test_the_parts_of_a_round_must_be_green_too() -> None:
    assert needed([], ["vase-dkv"]) == ["projected_energy", "keep_highest", "fill_places", "compact"]
    assert needed(["compact_staged", "keep_highest"], ["vase-dkv"]) == [
        "compact",
        "keep_highest",
        "projected_energy",
        "fill_places",
    ]
    assert set(needed([], list(ROUNDS))) == {plain_name(name) for name in OPERATIONS}


@pytest.mark.parametrize("name", needed(list(OPERATIONS), []))
def test_every_operation_has_tests(name: str) -> None:
    assert (BENCHMARKS.parent / "tests" / "kernels" / f"test_{name}_paged.py").exists()


@pytest.mark.parametrize(
    ("text", "gpu", "found"),
    [
        pytest.param(GREEN, False, None, id="green"),
        pytest.param(ON_GPU, True, None, id="green on the GPU"),
        pytest.param(GREEN.replace("pass", "assert False"), False, "1 of 1 are red", id="red"),
        pytest.param("import nothing_of_that_name\n", False, "1 of 1 are red", id="not importable"),
        pytest.param(SKIPPED, False, "none ran (pytest ended with 0)", id="all skipped"),
        pytest.param(GREEN, True, "none ran (pytest ended with 5)", id="none for a GPU"),
    ],
)
def test_an_operation_with_such_tests_is_timed_or_not(text: str, gpu: bool, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "test_op_of_ours.py").write_text(text)
    (tmp_path / "test_other.py").write_text("assert False\n")
    reason = refusal("op", gpu=gpu, folder=tmp_path)
    if found is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(f"the tests of op must be green before it is timed, but {found}; see python -m pytest")


def test_an_operation_without_tests_is_not_timed(tmp_path: Path) -> None:
    assert str(refusal("op", gpu=False, folder=tmp_path)).startswith("op has no tests (")


def test_the_interpreter_runs_all_rows_and_times_none() -> None:
    """In a process of its own, as the script runs; the tests of operations are run by the test below."""
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import kernel_speed;"
        "kernel_speed.refusal = lambda name, gpu: None; kernel_speed.main(['--interpret', '--commit', 'c0ffee'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    names = [*OPERATIONS, *ROUNDS]
    assert [(row.get("operation", row.get("round")), row["requests"]) for row in found] == [
        (name, requests) for requests in (1, 2) for name in names
    ]
    for row in found:
        assert row["interpreted"] is True
        assert row["bytes"] > 0
        assert (row["commit"], row["torch"]) == ("c0ffee", torch.__version__)
        assert {"device", "triton", "dtype", *TINY._fields} <= row.keys()
        assert not any(name.startswith(("ms_", "gb_s", "copy", "of_copy", "goal")) for name in row)


def test_the_tests_of_an_operation_are_run_first() -> None:
    script = [sys.executable, str(BENCHMARKS / "kernel_speed.py"), "--interpret", "--requests", "1"]
    done = subprocess.run([*script, "--operations", "value_range", "--policies"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert row["operation"] == "value_range"
    assert row["bytes"] == 4 * 2 * 2 * 16 * 32 + 8 * 32 + 4 * 2 * 2 * 32


def test_a_row_holds_bandwidth_and_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "device_times", lambda run, ms: Times(1.0, 2.0, 4.0))
    monkeypatch.setattr(kernel_speed, "copy_speed", lambda moved, device, ms: Speed(min(moved, LARGEST_COPY), 4000.0))
    row = measured(Case(6_000_000_000, lambda: None), torch.device("cpu"), 1)
    assert row == {
        "bytes": 6_000_000_000,
        "ms_p20": 1.0,
        "ms_p50": 2.0,
        "ms_p80": 4.0,
        "gb_s": 3000.0,
        "copy_bytes": 6_000_000_000,
        "copy_gb_s": 4000.0,
        "of_copy": 0.75,
        "ms_at_copy_speed": 1.5,
    }


@pytest.mark.parametrize(("of_copy", "ms", "met"), [(0.8, 3.0, True), (0.79, 3.01, False)])
def test_goals_stand_beside_what_was_measured(of_copy: float, ms: float, met: bool) -> None:
    work = Workload(TINY, 1, torch.device("cpu"))
    work.requests = 64

    def measure(case: Case) -> dict[str, Any]:
        return {"of_copy": of_copy, "ms_p50": ms}

    goals = {
        row.get("operation", row.get("round")): (row["goal"], row["met"])
        for row in rows(list(OPERATIONS), list(ROUNDS), work, measure)
        if "goal" in row
    }
    assert goals == {
        "value_range": ("of_copy >= 0.8", met),
        "compact": ("of_copy >= 0.8", met),
        "vase-dkv": ("ms_p50 <= 3.0", met),
    }


def test_only_rows_that_move_are_counted() -> None:
    work, tokens = Workload(TINY, 2, torch.device("cpu")), 2 * TINY.budget
    row, heads = TINY.head_dim * TINY.dtype.itemsize, TINY.layers * TINY.kv_heads
    read_anyway = 8 * (work.rows.total + tokens + heads * tokens)  # slots and indices
    moved = {
        name: (OPERATIONS[name](work).bytes - read_anyway) / (4 * row)
        for name in ("compact", "compact_staged", "compact_filled")
    }
    first_evicted = [
        next((i for i, place in enumerate(keep) if place != i), TINY.budget)
        for keep in work.keep.view(heads * 2, TINY.budget).tolist()
    ]
    assert moved["compact_staged"] == heads * tokens
    assert moved["compact_filled"] == heads * 2 * TINY.period
    assert moved["compact"] == sum(TINY.budget - first for first in first_evicted)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_chooses_and_moves_what_the_policy_chooses(name: str) -> None:
    pytest.importorskip("triton")
    policy = ROUNDS[name].policy
    work = Workload(TINY, 3, torch.device("cpu"))
    before = [[buffer.clone() for buffer in pool.buffers] for pool in (work.keys, work.values)]
    keep = []
    for i, row in enumerate(work.rows.slots.split(TINY.resident)):
        keys, values = (gather_layers(buffers, row) for buffers in before)
        candidates = Candidates((TINY.layers, TINY.kv_heads, TINY.resident), keys, values, work.queries[i])
        noise = Noise(int(work.seeds[i]), int(work.evictions[i]), work.layer_ids)
        keep.append(policy.select(candidates, TINY.budget, TINY.period, noise))
        order = keep[-1] if policy.reads_order(TINY.period) else fill_places(keep[-1])
        for buffers in before:
            for layer, buffer in enumerate(buffers):
                compact(buffer, row, order[layer], row[: TINY.budget])
    with interpreted():
        assert torch.equal(choose(policy, work).keep, torch.cat(keep, dim=-1))
        evict(policy, work)
    for pool, buffers in zip((work.keys, work.values), before, strict=True):
        for ours, theirs in zip(pool.buffers, buffers, strict=True):
            assert torch.equal(ours, theirs)


def test_no_benchmark_hides_an_installed_package() -> None:
    """Python finds a script's neighbours first: `kernels.py` here would be taken for the package that SGLang needs."""
    elsewhere = [path for path in sys.path if Path(path).resolve() != BENCHMARKS]
    stems = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert "kernel_speed" in stems
    assert [stem for stem in stems if importlib.machinery.PathFinder.find_spec(stem, elsewhere)] == []
    assert stems & sys.stdlib_module_names == set()
