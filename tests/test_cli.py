"""The `kvpolicy` command, called as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicy.cli import COMMANDS, main
from kvpolicy.policies.registry import POLICIES
from kvpolicy.sglang_plugin import targets
from kvpolicy.sglang_plugin.config import ARGUMENTS


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: kvpolicy {name}" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["evict"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert all(name in error for name in COMMANDS)


def test_flags_prints_each_flag_and_each_keyword(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    shown = capsys.readouterr().out
    for name in ARGUMENTS:
        assert "--" + name.replace("_", "-") in shown
        assert name in shown


def test_policies_answers_an_unknown_name_with_one_sentence() -> None:
    command = [Path(sys.executable).parent / "kvpolicy", "policies", "vase"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == f"kvpolicy: 'vase' is not a policy; known: {', '.join(POLICIES)}.\n"


def test_tasks_prints_the_folder_of_the_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert list(folder.rglob("gsm8k_sample.yaml"))


def test_doctor_teaches_how_to_ask_about_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    shown = capsys.readouterr().out
    assert "kvpolicy doctor --model Qwen/Qwen3-4B --kv-policy vase-dkv -- --tp-size 2 --page-size 16" in shown
    assert all("--" + name.replace("_", "-") in shown for name in ARGUMENTS)
    assert "The exit status is 1 if something that a launch needs is wrong" in shown


def test_doctor_finds_nothing_wrong_where_these_tests_run() -> None:
    pytest.importorskip("sglang")
    command = [Path(sys.executable).parent / "kvpolicy", "doctor", "--json", "--kv-policy", "vase-dkv"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    record = json.loads(result.stdout)
    wrong = [finding for finding in record["findings"] if finding["status"] == "problem"]
    assert (wrong, record["ok"], result.returncode) == ([], True, 0)
    hooks = [finding["name"] for finding in record["findings"] if finding["section"] == "hooks"]
    assert hooks == [target.path for target in targets.ALL]
