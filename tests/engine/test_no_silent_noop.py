"""Break each hooked function of SGLang in turn: every door must refuse with one sentence, none may serve."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import harness
import pytest

from kvpolicy.sglang_plugin import targets

BIN = Path(sys.executable).parent
ENGINE = (
    "import sglang, sys\nif __name__ == '__main__':\n    sglang.Engine(model_path=sys.argv[1], device='cuda', {})\n"
)


def start_engine(model: Path, script: Path, sabotage: str | None, arguments: str) -> subprocess.CompletedProcess[str]:
    script.write_text(ENGINE.format(arguments))
    return run([sys.executable, script, model], sabotage)


def start_server(model: Path, sabotage: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run([BIN / "sglang", "serve", "--model-path", model, "--port", port, "--kv-policy", "vase-dkv"], sabotage)


def run(command: list[object], sabotage: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **harness.ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    if sabotage is not None:
        environment["KVPOLICY_TEST_SABOTAGE"] = sabotage
    return subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def assert_refused(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert result.returncode != 0, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if sentence in line]
    assert lines, result.stderr[-3000:]
    assert f"tested with SGLang {targets.TESTED_SGLANG}" in lines[-1]


@pytest.mark.parametrize("how", ["missing", "signature"])
@pytest.mark.parametrize(
    "target",
    targets.SCHEDULER + targets.ADMISSION + targets.TAPS + targets.PACKED + targets.LAUNCHER,
    ids=lambda target: target.path.rsplit(".", 1)[1],
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


SCHEDULER = targets.SCHEDULER + targets.ADMISSION + targets.TAPS + targets.PACKED
# Which hooks fail, and in a start of what. A start costs a minute on a slow machine; that each target is missed on its
# own is tested above, and in tests/sglang_plugin/test_targets.py.
IN_THE_SCHEDULER = {
    "all": SCHEDULER,
    "the first": SCHEDULER[:1],
    "eviction": (targets.UPDATE_BATCH,),
    "the last": SCHEDULER[-1:],
}
IN_THE_SERVER = {
    "all of the launcher": targets.LAUNCHER,
    **{each.path.rsplit(".", 1)[1]: (each,) for each in targets.LOAD},
}

Runs = dict[str, Future["subprocess.CompletedProcess[str]"]]


@pytest.fixture(scope="module")
def broken(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Engines and servers in which hooks fail; two starts at a time, for most of a start is imports."""
    folder = tmp_path_factory.mktemp("scripts")
    with ThreadPoolExecutor(2) as pool:
        runs: Runs = {}
        for label, failing in IN_THE_SCHEDULER.items():
            paths, script = " ".join(target.path for target in failing), folder / f"{len(runs)}.py"
            arms = "kv_policy='vase-attnv|epikv[band_b:2]', kv_quant='range-int4'"
            runs[label] = pool.submit(start_engine, tiny, script, f"children|{paths}|unhooked", arms)
        for label, failing in IN_THE_SERVER.items():
            paths = " ".join(target.path for target in failing)
            runs[label] = pool.submit(start_server, tiny, f"everywhere|{paths}|unhooked")
        yield runs
        pool.shutdown(cancel_futures=True)


def named(failing: tuple[targets.Target, ...]) -> str:
    return f"{' and '.join(target.path for target in failing)} could not be hooked"


@pytest.mark.parametrize("label", IN_THE_SCHEDULER)
def test_hooks_that_fail_in_the_scheduler_process_alone_stop_the_engine(label: str, broken: Runs) -> None:
    assert_refused(broken[label].result(), named(IN_THE_SCHEDULER[label]))


def test_a_scheduler_that_never_heard_of_the_policy_is_refused(tiny: Path, tmp_path: Path) -> None:
    sabotage = f"children|{targets.SCHEDULER_INIT.path}|unhooked"
    assert_refused(start_engine(tiny, tmp_path / "run.py", sabotage, "kv_policy='vase-dkv'"), "reports no policy")


@pytest.mark.parametrize("label", IN_THE_SERVER)
def test_hooks_that_fail_in_the_launching_process_stop_the_server(label: str, broken: Runs) -> None:
    result = broken[label].result()
    if IN_THE_SERVER[label] == (targets.ADD_CLI_ARGS,):
        assert result.returncode != 0
        assert "unrecognized arguments: --kv-policy" in result.stderr
    else:
        assert_refused(result, named(IN_THE_SERVER[label]))


@pytest.mark.alone
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
