"""benchmarks/quant_fidelity.py with engines that are none: what it compares, counts, writes and runs again."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import quant_fidelity
import quant_fidelity_study
from quant_fidelity_measure import interval
from quant_fidelity_study import parse_format
from quant_fidelity_table import add_row, read_rows, table

from tests.benchmarks import fidelity_engine
from tests.benchmarks.fidelity_engine import (
    CAPACITY,
    HEAD_DIM,
    NOISE,
    VOCABULARY,
    FakeEngine,
    logits_of,
    prompt_of,
    stop_of,
)

TOKENS, PROMPTS = 9, 3
NAMES = list(NOISE)


class Bench:
    """The benchmark, run on fake engines."""

    def __init__(self, out: Path) -> None:
        self.out, self.engines, self.shift = out, list[FakeEngine](), 0
        self.broken: str | None = None

    @contextmanager
    def running(self, study: Any, chosen: Any) -> Iterator[FakeEngine]:
        assert study.args.tokens == TOKENS
        self.engines.append(FakeEngine(chosen, self.shift))
        if chosen.name == self.broken:
            raise RuntimeError("no memory")
        yield self.engines[-1]
        self.engines[-1].shutdown()

    def run(self, *formats: str, **options: Any) -> list[str]:
        """The formats whose engines were started, the reference's first."""
        started = len(self.engines)
        more = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        argv = ["--model", "a/model", "--out", str(self.out), "--tokens", str(TOKENS), "--prompts", str(PROMPTS)]
        quant_fidelity.main([*argv, "--batch", "2", *more, "--formats", *formats])
        return [engine.chosen.name for engine in self.engines[started:]]

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["format"]: row for row in read_rows(self.out)}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    processor = ModuleType("ablation_processor")
    processor.TeacherForcing = SimpleNamespace(to_str=lambda: "a processor")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ablation_processor", processor)
    monkeypatch.setattr(quant_fidelity_study, "shape_of", lambda _model: (HEAD_DIM, VOCABULARY))
    monkeypatch.setattr(
        quant_fidelity_study, "tokenized", lambda _model, problems, _tokens: [*map(prompt_of, range(len(problems)))]
    )
    monkeypatch.setattr(quant_fidelity, "conditions", lambda: dict.fromkeys(("commit", "device", "date"), "c") | LIBS)
    made = Bench(tmp_path / "out" / "rows.jsonl")
    monkeypatch.setattr(quant_fidelity, "running", made.running)
    return made


LIBS = {"sglang": "1", "torch": "2"}


def expected(name: str, number: int) -> tuple[list[bool], list[float]]:
    """Of a prompt's decode steps: does the format agree, and the divergence, by PyTorch's own function."""
    prompt = prompt_of(number)
    agrees, kls = [], []
    for step in range(1, stop_of(prompt, TOKENS)):
        full, other = (logits_of(prompt, step, each).log_softmax(-1) for each in ("full", name))
        agrees.append(bool(full.argmax() == other.argmax()))
        kls.append(float(torch.nn.functional.kl_div(other, full, log_target=True, reduction="sum")))
    return agrees, kls


def test_each_format_is_compared_step_by_step_on_the_text_of_the_full_cache(bench: Bench) -> None:
    assert bench.run(*NAMES) == ["full", *NAMES]
    assert all(engine.batches == [2, 1] and engine.down for engine in bench.engines)
    assert list(bench.rows) == NAMES
    for name, row in bench.rows.items():
        found = [expected(name, number) for number in range(PROMPTS)]
        kls = [kl for _, each in found for kl in each]
        assert row["steps"] == len(kls) == 0 + 2 + (TOKENS - 1)
        assert row["agreed"] == sum(sum(agrees) for agrees, _ in found)
        assert row["agreement"] == row["agreed"] / row["steps"]
        assert row["kl_mean"] == pytest.approx(np.mean(kls), rel=1e-4, abs=1e-9)
        assert row["kl_p99"] == pytest.approx(np.percentile(kls, 99), rel=1e-4, abs=1e-9)
        for one, (agrees, own) in zip(row["per_prompt"], found, strict=True):
            assert (one["steps"], one["agreed"]) == (len(agrees), sum(agrees))
            assert one["kl_mean"] == (pytest.approx(np.mean(own), rel=1e-4, abs=1e-9) if own else None)
        assert [one["problem"] for one in row["per_prompt"]] == [f"gsm8k-test-{number}" for number in range(PROMPTS)]
        assert (row["token_capacity"], row["token_capacity_full"]) == (CAPACITY[name], CAPACITY["full"])
        assert row.keys() >= {"commit", "device", "sglang", "torch", "date", "model", "dtype", "period", "token_limit"}
    agreements = [bench.rows[name]["agreement"] for name in NAMES]
    assert agreements[:2] == [1, 1]
    assert agreements[1] > agreements[2] > agreements[3]


def test_bits_are_those_that_are_reported_and_those_that_requests_used(bench: Bench) -> None:
    bench.run("full", "int8", "range-int4")
    found = {name: [row[key] for key in ("bits_per_element", "bits_in_use")] for name, row in bench.rows.items()}
    # Of 64 channels: keys 128 bytes; values 64 or 32, scale and minimum 4, index 4, half a row of 128 + 4 bytes.
    assert found["full"] == [16, 16]
    assert found["int8"] == [12.5, 8 * (128 + 64 + 4) / 128]
    assert found["range-int4"] == [12.5, 8 * (128 + 32 + 4 + 4 + 66) / 128]
    row = bench.rows["range-int4"]
    assert (row["kv_bytes_per_token"], row["kv_bytes_per_token_full"], row["group"]) == (400, 512, 64)
    assert (row["protected_end"], row["protected_rows_denied"]) == (0.5, PROMPTS - 1)
    assert bench.rows["full"]["kv_bytes_per_token_full"] == 512


def test_an_engine_that_stores_something_else_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    report = FakeEngine._report
    monkeypatch.setattr(FakeEngine, "_report", lambda self, number: report(self, number) | {"kv_quant": "int4"})
    with pytest.raises(AssertionError, match=r"stores its cache as \('int4', 64, 'none'\)"):
        bench.run("int8")


def test_only_formats_without_a_row_are_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("full", "int8") == ["full", "full", "int8"]
    before = bench.out.read_text()
    assert bench.run("int8", "full") == []
    assert bench.out.read_text() == before
    assert bench.run("int8", "int2") == ["full", "int2"]
    assert bench.out.read_text().startswith(before)
    assert list(bench.rows) == ["full", "int8", "int2"]
    assert "1 new rows" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{"period": 32}, {"memory": 0.2}, {"dtype": "float32"}, {"prompts": 2}])
def test_rows_of_other_settings_do_not_count(bench: Bench, changed: dict[str, Any]) -> None:
    bench.run("int8")
    assert bench.run("int8", **changed) == ["full", "int8"]
    assert len(read_rows(bench.out)) == 2
    assert bench.run("int8") == []


def test_rows_of_another_text_do_not_count(bench: Bench) -> None:
    bench.run("full", "int8")
    bench.shift = 50
    assert bench.run("int8") == []  # nothing was asked of the model, and the rows are of one text
    assert bench.run("int8", "int2") == ["full", "int8", "int2"]
    assert len({row["text_sha256"] for row in read_rows(bench.out)}) == 2
    assert len(bench.rows["int8"]["per_prompt"]) == PROMPTS
    assert bench.run("full", "int8", "int2") == ["full", "full"]


def test_a_run_that_breaks_leaves_the_rows_that_were_done_and_nothing_else(bench: Bench) -> None:
    bench.broken = "int2"
    with pytest.raises(RuntimeError, match="no memory"):
        bench.run("int8", "int2", "full")
    assert list(bench.rows) == ["int8"]
    assert [path.name for path in bench.out.parent.iterdir()] == [bench.out.name]
    bench.broken = None
    assert bench.run("int8", "int2", "full") == ["full", "int2", "full"]
    assert list(bench.rows) == ["int8", "int2", "full"]


def test_a_row_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    add_row(out, {"format": "a"})
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        add_row(out, {"format": "b"})
    assert out.read_text() == '{"format": "a"}\n'


def test_answers_of_one_token_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_engine, "stop_of", lambda _prompt, _most: 1)
    with pytest.raises(SystemExit, match=r"^quant_fidelity: the model ends each of its answers with its first token"):
        bench.run("int8")
    assert not bench.out.exists()


def test_the_interval_is_the_wider_one_of_two() -> None:
    z2 = 1.959963984540054**2
    low, high = interval(np.array([50, 50]), np.array([50, 50]))
    assert [low, high] == pytest.approx([1 / (1 + z2 / 100), 1])  # Wilson's, at a share of 1
    # Half of the prompts agree everywhere and half nowhere: 20 observations, not 1000.
    agreed = np.repeat([50, 0], 10)
    low, high = interval(agreed, np.full(20, 50))
    spread = 1.96 * math.sqrt(0.25 / 20)
    assert [low, high] == pytest.approx([0.5 - spread, 0.5 + spread], abs=0.03)
    # Prompts count by their steps: one of many steps outweighs many of a few.
    low, high = interval(np.array([990, 0, 0, 0]), np.array([1000, 1, 1, 0]))
    assert low < 990 / 1002 < high
    alone = interval(np.array([3, 0]), np.array([4, 0]))
    assert alone == pytest.approx((0.3006, 0.9544), abs=1e-4)


def test_int8_has_a_goal(bench: Bench) -> None:
    bench.run("full", "int8", "range-int4")
    goals = {name: (row["goal"], row["goal_met"]) for name, row in bench.rows.items()}
    assert goals == {"full": (None, None), "int8": (0.95, True), "range-int4": (None, None)}


@pytest.mark.parametrize(
    ("agreement", "low", "high", "sentence"),
    [
        (0.97, 0.951, 0.99, "≥ 95%: met"),
        (0.97, 0.94, 0.99, "≥ 95%: met, in doubt"),
        (0.93, 0.90, 0.96, "≥ 95%: missed, in doubt"),
        (0.93, 0.90, 0.94, "≥ 95%: missed"),
    ],
)
def test_the_table_shows_each_format(bench: Bench, agreement: float, low: float, high: float, sentence: str) -> None:
    bench.run("full", "int8", "range-int4")
    found = {"agreement": agreement, "agreement_low": low, "agreement_high": high, "goal_met": agreement >= 0.95}
    rows = [
        bench.rows["full"],
        bench.rows["int8"] | found,
        bench.rows["range-int4"] | {"format": "range-int4[group:32]"},
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(rows))
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert any(line.startswith("full again: the noise floor 16.00 16.00 512 1,000 (1.00x)") for line in lines)
    assert any(line.startswith("range-int4[group:32] 12.50") for line in lines)
    (int8,) = (line for line in lines if line.startswith("int8 "))
    assert int8.startswith(f"int8 12.50 12.25 400 1,300 (1.30x) 0 {agreement:.2%} [{low:.2%}, {high:.2%}]")
    assert int8.endswith(sentence)
    assert any(
        "a/model" not in line and line.startswith("model, bfloat16: 3 prompts, 10 decode steps") for line in lines
    )
    assert "Protected rows ran out in range-int4[group:32]: some tokens had only their codes." in lines


def test_engines_differ_in_their_format_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    down: list[str] = []

    def engine(**keywords: Any) -> SimpleNamespace:
        started.append(keywords)
        return SimpleNamespace(shutdown=lambda: down.append("down"))

    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=engine))
    study: Any = SimpleNamespace(args=quant_fidelity.arguments(["--model", "m", "--memory", "0.3"]))
    with quant_fidelity.running(study, parse_format("full", 64)):
        assert not down
    with pytest.raises(ZeroDivisionError), quant_fidelity.running(study, parse_format("range-int4[group:32]", 64)):
        raise ZeroDivisionError
    assert down == ["down", "down"]
    full, other = started
    assert other == {**full, "kv_quant": "range-int4", "kv_quant_group": "32"}
    assert (full["kv_policy"], full["kv_period"], full["mem_fraction_static"]) == ("full", 64, 0.3)
    assert "max_total_tokens" not in full
