"""`kvpolicy ab` from arms to page, with a stand-in for lm-eval that makes results without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.cli import main
from kvpolicy.reports.ab import process as ab_process
from kvpolicy.reports.ab.plan import load_plan
from tests.reports.ab.made import ROOT, evicting, samples_of, whole
from tests.reports.ab.runs import write

ARMS = ("full", "small=kv_policy=vase-dkv,kv_budget=64", "kv_quant=range-int4")
NAMES = ("full", "small", "range-int4")
COMMON = ("--model", "org/model", "--tasks", "kvp_math500", "--subset", "12")


class Calls:
    """`kvpolicy ab` into a folder, and what it had lm-eval do."""

    def __init__(self, out: Path, notes: Path) -> None:
        self.out, self._notes = out, notes

    def __call__(self, *options: str, arms: tuple[str, ...] = ARMS) -> None:
        assert main(["ab", *[part for arm in arms for part in ("--arm", arm)], "-o", str(self.out), *options]) == 0

    def refused(self, *options: str, arms: tuple[str, ...] = ARMS) -> str:
        with pytest.raises(SystemExit) as refused:
            self(*options, arms=arms)
        message = str(refused.value)
        assert message.startswith("kvpolicy ab: ")
        assert message[-1] in ".?"
        assert "\n" not in message
        return message

    def taken(self) -> list[dict[str, str]]:
        """Options of each run of lm-eval since the last question."""
        lines = self._notes.read_text(encoding="utf-8").splitlines() if self._notes.exists() else []
        self._notes.unlink(missing_ok=True)
        calls = []
        for line in lines:
            words = json.loads(line)
            calls.append({a.removeprefix("--"): b for a, b in zip(words, [*words[1:], ""], strict=True) if a[0] == "-"})
        return calls

    def report(self) -> dict[str, Any]:
        numbers: dict[str, Any] = json.loads((self.out / "report.json").read_text(encoding="utf-8"))
        return numbers


@pytest.fixture
def ab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(ab_process, "POLL_SECONDS", 0.05)
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    code = "import sys\nfrom tests.reports.ab.made import main\nsys.exit(main(sys.argv[1:]))\n"
    (stand_in / "lm_eval.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{stand_in}:{ROOT}")
    monkeypatch.setenv("AB_CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("AB_FAIL", raising=False)
    return Calls(tmp_path / "ab", tmp_path / "calls")


def test_arms_are_run_in_turn_and_not_run_again(ab: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    ab(*COMMON, "--repeats", "2", "--split", "dev")
    calls = ab.taken()
    assert [call["output_path"] for call in calls] == [str(ab.out / name) for name in NAMES]
    assert [call["model_args"] for call in calls] == [
        "pretrained=org/model,kv_policy=full",
        "pretrained=org/model,kv_policy=vase-dkv,kv_budget=64",
        "pretrained=org/model,kv_policy=full,kv_quant=range-int4",
    ]
    assert {call["metadata"] for call in calls} == {"split=dev,subset=12,repeats=2"}
    shown = capsys.readouterr().out
    report = ab.report()
    assert [comparison["sentence"] in shown for comparison in report["comparisons"]] == [True, True]
    assert "This is the dev part" in shown
    assert (report["baseline"], report["arms"]) == ("full", list(NAMES))
    assert report["tasks"] == {"kvp_math500": {"problems": 12}}
    assert not (ab.out / "plan.json").exists()
    page = (ab.out / "index.html").read_bytes()
    assert "Running: 50%" in (ab.out / "full" / "log.txt").read_text().replace("\r", "\n")

    ab(*COMMON, "--repeats", "2", "--split", "dev", "--baseline", "small")
    assert ab.taken() == []
    assert ab.report()["baseline"] == "small"
    assert (ab.out / "index.html").read_bytes() != page


def test_only_what_is_missing_is_run(ab: Calls) -> None:
    ab(*COMMON)
    assert len(ab.taken()) == 3
    next((ab.out / "small").rglob("samples_*")).unlink()
    record = ab.out / "range-int4" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"wall_seconds": None}))
    ab(*COMMON, arms=(*ARMS, "more=kv_policy=vase-dkv,kv_budget=80"))
    assert [Path(call["output_path"]).name for call in ab.taken()] == ["small", "range-int4", "more"]


def test_a_failed_arm_is_told_and_the_others_stay(ab: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AB_FAIL", "64")
    message = ab.refused(*COMMON)
    assert "arm small failed with status 3" in message
    assert f"{ab.out / 'small' / 'log.txt'} says: RuntimeError: out of memory; what is complete is kept" in message
    assert [Path(call["output_path"]).name for call in ab.taken()] == list(NAMES)
    assert not (ab.out / "index.html").exists()
    monkeypatch.delenv("AB_FAIL")
    ab(*COMMON)
    assert [Path(call["output_path"]).name for call in ab.taken()] == ["small"]
    assert ab.report()["arms"] == list(NAMES)


def test_results_that_lm_eval_could_not_save_are_no_results(ab: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys\nprint('Could not save results aggregated')\n"
    (ab.out.parent / "stand_in" / "lm_eval.py").write_text(code)
    assert "arm full failed: no results were saved" in ab.refused(*COMMON)


def test_results_of_other_settings_are_in_the_way(ab: Calls) -> None:
    ab(*COMMON)
    ab.taken()
    message = ab.refused(*COMMON, "--gen-kwargs", "max_gen_toks=64")
    assert f"{ab.out / 'full'} holds a run of other settings (generation differ)" in message
    other = ("full", "small=kv_policy=vase-dkv,kv_budget=80")
    assert f"{ab.out / 'small'} holds a run of other settings (arm differ)" in ab.refused(*COMMON, arms=other)
    assert ab.taken() == []


def test_pieces_are_put_together(ab: Calls) -> None:
    two, tasks, arms = (*COMMON, "--tasks", "kvp_math500,kvp_aime25"), ("kvp_math500", "kvp_aime25"), ARMS[:2]
    ab(*two, "--chunk", "7", arms=arms)
    calls = ab.taken()
    # Arms take turns, so that what an interruption leaves can be compared.
    expected = [f"{name}/{task}-{piece}" for task in tasks for piece in ("0-6", "7-11") for name in NAMES[:2]]
    assert [str(Path(call["output_path"]).relative_to(ab.out)) for call in calls] == expected
    assert json.loads(calls[2]["samples"]) == {"kvp_math500": [7, 8, 9, 10, 11]}
    report = ab.report()
    assert report["tasks"] == {"kvp_aime25": {"problems": 12}, "kvp_math500": {"problems": 12}}
    (ab.out / "small" / "kvp_math500-7-11" / "run.json").unlink()
    assert "divided otherwise" in ab.refused(*two, "--chunk", "6", arms=arms)
    assert "divided otherwise" in ab.refused(*two, arms=arms)
    assert ab.taken() == []
    ab(*two, "--chunk", "7", arms=arms)
    assert [Path(call["output_path"]).name for call in ab.taken()] == ["kvp_math500-7-11"]

    pieces, ab.out = ab.out, ab.out.parent / "whole"
    ab(*two, arms=("full", f"in-pieces={pieces / 'full'}"))
    whole, in_pieces = (
        [{**each, "arm": ""} for each in ab.report()["measures"] if each["arm"] == name]
        for name in ("full", "in-pieces")
    )
    assert whole == in_pieces


def test_the_confirm_part_is_planned_and_its_runs_are_counted(ab: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    confirm = (*COMMON, "--split", "confirm")
    ab(*confirm)
    path = ab.out / "plan.json"
    assert [run.folder for run in load_plan(path).runs] == [str(ab.out / name) for name in NAMES]
    assert "written before the first of 3 runs, one of each arm" in capsys.readouterr().out
    plan = load_plan(path).plan
    assert (plan.split, plan.tasks, plan.seeds) == ("confirm", ("kvp_math500",), (0,))
    assert plan.comparisons == (("full", "small"), ("full", "range-int4"))
    assert plan.arms["small"] == {"kv_policy": "vase-dkv", "kv_budget": "64"}
    ab(*confirm)
    assert load_plan(path).run_count == 3
    next((ab.out / "small").rglob("samples_*")).unlink()
    ab(*confirm)
    assert "the first of 4 runs; 1 of them ran an arm again" in capsys.readouterr().out
    assert ab.report()["plan"]["run_count"] == 4
    ab.taken()
    assert "plans something else (comparisons differ)" in ab.refused(*confirm, "--baseline", "small")
    assert "plans something else (arms, comparisons differ)" in ab.refused(*confirm, arms=ARMS[:2])
    assert ab.taken() == []
    assert load_plan(path).run_count == 4


def test_results_from_before_the_plan_cannot_be_planned(ab: Calls) -> None:
    confirm = (*COMMON, "--split", "confirm")
    ab(*confirm)
    (ab.out / "plan.json").unlink()
    assert f"arm full was run before {ab.out / 'plan.json'} was written" in ab.refused(*confirm)
    assert not (ab.out / "plan.json").exists()


def test_the_plan_is_there_before_the_first_run(ab: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    (ab.out.parent / "stand_in" / "lm_eval.py").write_text("import sys\nsys.exit(1)\n")
    ab.refused(*COMMON, "--split", "confirm", "--plan", str(ab.out.parent / "mine.json"))
    assert load_plan(ab.out.parent / "mine.json").run_count == 3


def existing(folder: Path, verdicts: list[list[str]], records: Callable[[int, int], dict[str, Any]]) -> str:
    return str(write(folder, samples_of(verdicts, records)))


def test_folders_of_results_are_compared_without_a_run(ab: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [["correct"], ["wrong"], ["no_answer"], ["correct"]]
    one = existing(ab.out.parent / "one", verdicts, whole)
    other = existing(ab.out.parent / "other", verdicts[::-1], evicting(64))
    ab(arms=(one, f"mine={other}"))
    assert ab.taken() == []
    assert ab.report()["arms"] == ["one", "mine"]
    assert "which part of the data they are of was not asked" in capsys.readouterr().out
    ab("--split", "confirm", arms=(one, f"mine={other}"))
    assert "no plan was written before it was looked at" in capsys.readouterr().out
    ab(*COMMON, "--subset", "4", arms=("full", other))
    assert len(ab.taken()) == 1


def test_an_arm_without_effect_makes_no_page(ab: Calls) -> None:
    verdicts = [["correct"], ["wrong"], ["wrong"]]
    one = existing(ab.out.parent / "one", verdicts, whole)
    other = existing(
        ab.out.parent / "other", verdicts, lambda p, s: evicting(64)(p, s) | {"evictions": 0, "tokens_evicted": 0}
    )
    assert "arm other (vase-dkv) evicted nothing" in ab.refused(arms=(one, other))
    assert not ab.out.exists()


@pytest.mark.parametrize(
    ("options", "arms", "says"),
    [
        ((), ARMS, "--model is needed to run an arm"),
        (("--model", "m"), ARMS, "--tasks is needed to run an arm"),
        ((*COMMON, "--chunk", "5", "--repeats", "0"), ARMS, "--repeats must be at least 1, got 0"),
        (("--model", "m", "--tasks", "t", "--chunk", "5"), ARMS, "--chunk needs --subset"),
        ((*COMMON, "--metadata", "split=confirm"), ARMS, "--metadata split=… has an option of its own: --split"),
        ((*COMMON, "--gen-kwargs", "max_gen_toks"), ARMS, "'max_gen_toks' is not written name=value"),
        ((*COMMON, "--baseline", "x"), ARMS, "--baseline x is not an arm; they are full, small, range-int4"),
        (COMMON, ARMS[:1], "at least two arms, got 1"),
        ((*COMMON, "--split", "confirm"), ("full", "h2o=kv_policy=h2o,kv_seed=x"), "kv_seed must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_run(
    ab: Calls, options: tuple[str, ...], arms: tuple[str, ...], says: str
) -> None:
    assert says in ab.refused(*options, arms=arms)
    assert ab.taken() == []
    assert not ab.out.exists()


def test_folders_that_hold_something_else(ab: Calls) -> None:
    (ab.out / "full").mkdir(parents=True)
    (ab.out / "full" / "notes").write_text("mine")
    assert "full holds what no run of this arm left" in ab.refused(*COMMON)
    (ab.out / "full" / "run.json").write_text("{}")
    assert "is no 'kvpolicy arm 1'" in ab.refused(*COMMON)
    (ab.out / "full" / "run.json").write_text("{")
    assert "cannot be read" in ab.refused(*COMMON)
    (ab.out.parent / "empty").mkdir()
    assert "holds no samples of lm-eval" in ab.refused(arms=(str(ab.out.parent / "empty"), f"b={ab.out.parent}/empty"))
    assert ab.taken() == []


def test_an_interrupted_run_is_said_to_be_one(ab: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy.reports.ab.run.run_logged", interrupt)
    assert "interrupted; the same command goes on where it was" in ab.refused(*COMMON)
    assert json.loads((ab.out / "full" / "run.json").read_text())["wall_seconds"] is None
    monkeypatch.undo()
    assert "did not complete; run it again" in ab.refused(arms=(str(ab.out / "full"), f"b={ab.out / 'full'}"))


def test_the_command_is_that_of_this_python(ab: Calls) -> None:
    ab(*COMMON)
    record = json.loads((ab.out / "small" / "run.json").read_text())
    assert record["command"][:4] == [sys.executable, "-m", "lm_eval", "run"]
    assert record["wall_seconds"] > 0
    assert f"{sys.executable} -m lm_eval run" in (ab.out / "index.html").read_text(encoding="utf-8")
