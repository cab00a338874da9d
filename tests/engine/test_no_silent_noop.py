"""Break each hooked function of SGLang in turn: every door must refuse with one sentence, none may serve."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import harness
import pytest

from kvpolicy.sglang_plugin import targets

BIN = Path(sys.executable).parent
ENGINE = (
    "import sglang, sys\nif __name__ == '__main__':\n    sglang.Engine(model_path=sys.argv[1], device='cuda', {})\n"
)
LAUNCHER = set(targets.LOAD) | set(targets.LAUNCHER)


def start_engine(model: Path, script: Path, sabotage: str | None, arguments: str) -> subprocess.CompletedProcess[str]:
    script.write_text(ENGINE.format(arguments))
    return run([sys.executable, script, model], sabotage)


def run(command: list[object], sabotage: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **harness.ENVIRONMENT}
    if sabotage is not None:
        environment["KVPOLICY_TEST_SABOTAGE"] = sabotage
    return subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def assert_refused(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert result.returncode != 0, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if sentence in line]
    assert lines, result.stderr[-3000:]
    assert f"tested with SGLang {targets.TESTED_SGLANG}" in lines[-1]


@pytest.mark.parametrize("how", ["missing", "signature"])
@pytest.mark.parametrize(
    "target", targets.SCHEDULER + targets.LAUNCHER, ids=lambda target: target.path.rsplit(".", 1)[1]
)
def test_a_changed_function_is_found_before_a_process_is_started(
    target: targets.Target, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check that runs in the launching process, here in this one (each costs no engine start)."""
    import pkgutil

    owner_path, _, name = target.path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    if how == "missing":
        for holder in getattr(owner, "__mro__", (owner,)):
            monkeypatch.delattr(holder, name, raising=False)
    else:
        monkeypatch.setattr(owner, name, lambda renamed: None)
    with pytest.raises(ValueError, match=name) as caught:
        targets.check(targets.ALL)
    assert f"tested with SGLang {targets.TESTED_SGLANG}" in str(caught.value)


@pytest.mark.parametrize("target", targets.SCHEDULER, ids=lambda target: target.path.rsplit(".", 1)[1])
def test_a_hook_that_fails_in_the_scheduler_process_alone_stops_the_engine(
    target: targets.Target, tiny: Path, tmp_path: Path
) -> None:
    result = start_engine(tiny, tmp_path / "run.py", f"children|{target.path}|unhooked", "kv_policy='vase-dkv'")
    assert_refused(result, f"{target.path} could not be hooked")


def test_a_scheduler_that_never_heard_of_the_policy_is_refused(tiny: Path, tmp_path: Path) -> None:
    sabotage = f"children|{targets.SCHEDULER_INIT.path}|unhooked"
    assert_refused(start_engine(tiny, tmp_path / "run.py", sabotage, "kv_policy='vase-dkv'"), "reports no policy")


@pytest.mark.parametrize("target", sorted(LAUNCHER, key=str), ids=lambda target: target.path.rsplit(".", 1)[1])
def test_a_hook_that_fails_in_the_launching_process_stops_the_server(target: targets.Target, tiny: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [BIN / "sglang", "serve", "--model-path", tiny, "--port", port, "--kv-policy", "vase-dkv"]
    result = run(command, f"everywhere|{target.path}|unhooked")
    if target is targets.ADD_CLI_ARGS:
        assert result.returncode != 0
        assert "unrecognized arguments: --kv-policy" in result.stderr
    else:
        assert_refused(result, f"{target.path} could not be hooked")


def test_lm_eval_stops_too(tiny: Path) -> None:
    target = targets.UPDATE_BATCH
    arguments = f"pretrained={tiny},kv_policy=vase-dkv,kv_budget=128"
    command = [BIN / "lm_eval", "run", "--model", "sglang", "--model_args", arguments, "--tasks", "kvp_gsm8k_sample"]
    result = run([*command, "--include_path", harness.ROOT / "lmeval_tasks"], f"children|{target.path}|unhooked")
    assert_refused(result, f"{target.path} could not be hooked")
    assert "exact_match" not in result.stdout


def test_without_kv_arguments_the_same_sabotage_harms_nobody(tiny: Path, tmp_path: Path) -> None:
    """Stock SGLang: nothing of the runtime is hooked, so nothing can fail to be."""
    sabotage = f"children|{targets.UPDATE_BATCH.path}|unhooked"
    result = start_engine(tiny, tmp_path / "run.py", sabotage, "max_total_tokens=8192")
    assert result.returncode == 0, result.stderr[-3000:]
