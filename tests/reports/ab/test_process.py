"""A program is run, read and ended, with all that it started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from kvpolicy.reports.ab import process as ab_process
from kvpolicy.reports.ab.process import last_line, reason, run_logged


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_process, "POLL_SECONDS", 0.02)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_all_output_goes_to_the_log(tmp_path: Path) -> None:
    log, seen = tmp_path / "log.txt", set[str]()
    code = "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(0.3); sys.exit(4)"
    assert run_logged(python(code), log, seen.add) == 4
    assert sorted(log.read_text().split()) == ["err", "out"]
    assert seen & {"out", "err"}


def test_the_newest_line_of_a_bar_that_is_drawn_anew(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"first\n 10%\r 20%\r\n\n")
    assert last_line(log) == "20%"
    log.write_bytes(b"")
    assert (last_line(log), reason(log)) == ("", "")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["a", "b"], "b"),
        (["Traceback", "ValueError: no", "closing"], "ValueError: no"),
        (["torch.OutOfMemoryError: 2 GiB", "  x"], "torch.OutOfMemoryError: 2 GiB"),
        (
            ["kvpolicy.sglang_plugin.errors.KVPolicyError: kv_budget=1.", "ChildProcessError: 10", "bye"],
            "kvpolicy.sglang_plugin.errors.KVPolicyError: kv_budget=1.",
        ),
        (["KeyError: 1", "ChildProcessError: 2", "an Error: of nobody"], "ChildProcessError: 2"),
    ],
)
def test_the_line_that_explains_a_failure(tmp_path: Path, lines: list[str], said: str) -> None:
    (tmp_path / "log.txt").write_text("\n".join(lines))
    assert reason(tmp_path / "log.txt") == said


def _is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _child_of(log: Path) -> int:
    until = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < until, "the child did not start"
        time.sleep(0.02)
    return int(log.read_text())


LEAVES_A_CHILD = (
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=subprocess.DEVNULL);"
    "print(child.pid);"
)


def _gone(process_id: int) -> bool:
    until = time.monotonic() + 30
    while _is_alive(process_id) and time.monotonic() < until:
        time.sleep(0.02)
    return not _is_alive(process_id)


def test_a_child_that_outlives_its_parent_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert run_logged(python(LEAVES_A_CHILD), log, lambda _: None) == 0
    assert _gone(_child_of(log))


def test_an_interruption_ends_the_program_and_its_children(tmp_path: Path) -> None:
    log, before = tmp_path / "log.txt", signal.getsignal(signal.SIGTERM)

    def terminate() -> None:
        _child_of(log)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_logged(python(LEAVES_A_CHILD + "time.sleep(600)"), log, lambda _: None)
    thread.join()
    assert _gone(_child_of(log))
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_that_does_not_end_when_asked_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_process, "END_SECONDS", 0.2)
    log = tmp_path / "log.txt"
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); time.sleep(600)"

    def interrupt(line: str) -> None:
        if line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_logged(python(code), log, interrupt)
    assert _gone(_child_of(log))


def test_it_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    code = (
        "import signal, sys, time;"
        "signal.signal(signal.SIGTERM, lambda *_: (print('gave the memory back', flush=True), sys.exit(0)));"
        "print('ready', flush=True); time.sleep(600)"
    )

    def interrupt(line: str) -> None:
        if line == "ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_logged(python(code), log, interrupt)
    assert last_line(log) == "gave the memory back"
