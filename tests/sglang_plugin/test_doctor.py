"""`kvpolicy doctor` as a whole: its order, its output, its exit status. No engine is started."""

from __future__ import annotations

import importlib.metadata
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvpolicy.cli import TRIALS, main
from kvpolicy.sglang_plugin import doctor_command, doctor_hooks, doctor_installed, targets
from kvpolicy.sglang_plugin.doctor import examine
from kvpolicy.sglang_plugin.doctor_findings import HOOKS, LAUNCH, Finding, Status, note, problem

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

FINDINGS = [
    Finding("installed", "Python", "3.11"),
    note("installed", "lm-eval", "not installed", "Install lm-eval [eval]."),
    Finding(HOOKS, "a.b", "ok", more={"kind": "after", "parameters": ["self", "batch"], "when": "At load"}),
]
WRONG = problem(LAUNCH, "options", "refused", "kv_policy does not work with page_size=16: a page must be one token.")


@pytest.mark.parametrize(("findings", "status"), [(FINDINGS, 0), ([*FINDINGS, WRONG], 1)], ids=["well", "wrong"])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_status_and_the_output_say_whether_a_launch_would_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: list[Finding],
    status: int,
    as_json: bool,
) -> None:
    monkeypatch.setattr(doctor_command, "examine", lambda *_: findings)
    assert main(["doctor", *(["--json"] if as_json else [])]) == status
    printed = capsys.readouterr().out
    if as_json:
        record = json.loads(printed)
        assert record["ok"] == (status == 0)
        assert [each["advice"] for each in record["findings"]] == [finding.advice for finding in findings]
        assert record["findings"][2]["parameters"] == ["self", "batch"]
        assert "more" not in record["findings"][2]
    else:
        assert ("Nothing stands in the way of a launch." in printed) == (status == 0)
        assert ("  1. kv_policy does not work with page_size=16: a page must be one token.\n" in printed) == (
            status == 1
        )
        assert "  1. Install lm-eval [eval].\n" in printed


def test_what_was_asked_reaches_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(doctor_command, "examine", lambda *asked: seen.extend(asked) or [])
    command = ["doctor", "--model", "m", "--kv-policy", "tova", "--kv-budget", "99", "--", "--tp-size", "2"]
    assert main(command) == 0
    arguments, model, flags, trials = seen
    assert {name: value for name, value in arguments.items() if value is not None} == {
        "kv_policy": "tova",
        "kv_budget": "99",
    }
    assert (model, flags, trials) == ("m", ["--tp-size", "2"], TRIALS)


@pytest.mark.parametrize("width", [80, 160])
def test_the_tables_cut_nothing_off(width: int) -> None:
    rows = [
        Finding(HOOKS, target.path, "ok", more={"kind": "after", "parameters": ["self"], "when": "At load"})
        for target in targets.ALL
    ]
    console = Console(width=width, file=io.StringIO(), record=True)
    doctor_command.show([*FINDINGS, *rows], console)
    text = console.export_text()
    assert "…" not in text
    cells = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 3)
    assert [target.path for target in targets.ALL if target.path not in cells] == []


def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if SGLang were not installed, and could not be imported either."""
    found = doctor_installed.version_of

    def version_of(package: str) -> str | None:
        return None if package == "sglang" else found(package)

    for module in (doctor_installed, doctor_hooks):
        monkeypatch.setattr(module, "version_of", version_of)
    refusing = SimpleNamespace(
        metadata=importlib.metadata, import_module=lambda name: pytest.fail(f"{name} was imported")
    )
    monkeypatch.setattr(doctor_hooks, "importlib", refusing)


def test_without_sglang_it_says_so_and_looks_at_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    no_sglang(monkeypatch)
    findings = examine({"kv_policy": "vase-dkv", "kv_budget": 32}, None, (), {})
    wrong = {finding.name: finding.advice for finding in findings if finding.status is Status.PROBLEM}
    assert list(wrong) == ["sglang", "arguments"]
    assert wrong["sglang"].startswith("SGLang is not installed, so nothing can be served: pip install '.[sglang]'")
    hooks = [finding for finding in findings if finding.section == HOOKS]
    assert [(finding.name, finding.found) for finding in hooks] == [("all", "not looked at")]
    assert targets.TESTED_SGLANG in hooks[0].advice


def test_another_sglang_with_a_broken_function_is_told_once_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("sglang")
    broken = targets.Target("sglang.srt.server_args.ServerArgs.no_such_function", "after", ())
    other = targets.Target("sglang.srt.server_args.ServerArgs.check_server_args", "after", ("self", "strictly"))
    monkeypatch.setattr(targets, "ALL", (broken, other))
    monkeypatch.setattr("sglang.version.__version__", "0.6.0")
    monkeypatch.setattr(doctor_installed, "version_of", lambda name: "0.6.0" if name == "sglang" else "1")
    monkeypatch.setattr(doctor_hooks, "loaded", lambda _: Finding("plugin", "loaded", "yes"))
    findings = examine({"kv_policy": "full"}, str(tmp_path), (), {})
    wrong = {finding.name: finding for finding in findings if finding.status is Status.PROBLEM}
    assert wrong.pop("model").found == "cannot be read"  # an empty folder
    assert {name: finding.found for name, finding in wrong.items()} == {
        broken.path: "missing",
        other.path: "changed signature",
    }
    for finding in wrong.values():
        assert "in this SGLang 0.6.0; kvpolicy was tested with SGLang 0.5.23: install that version" in finding.advice
    told = {finding.name: finding.advice for finding in findings if finding.status is Status.NOTE}
    assert "kvpolicy was tested with sglang 0.5.23, and 0.6.0 is installed" in told["sglang"]
    assert "was not looked at; do first what is said above" in told["support"]
