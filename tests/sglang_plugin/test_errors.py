"""How an uncaught error ends a process: one sentence for a KVPolicyError, a traceback for all others."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from kvpolicy.sglang_plugin.errors import KVPolicyError

IMPORT = "import sys\nfrom kvpolicy.sglang_plugin.errors import KVPolicyError\n"
OWN_HOOK = "sys.excepthook = lambda kind, error, trace: print('own hook:', error, file=sys.stderr)\n"


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", IMPORT + script], capture_output=True, text=True)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("raise KVPolicyError('no budget.')", id="plain"),
        pytest.param("raise KVPolicyError('no budget.') from ValueError('why')", id="with a cause"),
        pytest.param("try:\n    1 / 0\nexcept ArithmeticError:\n    raise KVPolicyError('no budget.')", id="handling"),
        pytest.param(OWN_HOOK + "raise KVPolicyError('no budget.')", id="under another hook"),
        pytest.param("KVPolicyError('another.')\nraise KVPolicyError('no budget.')", id="the second"),
        pytest.param("import pickle\nraise pickle.loads(pickle.dumps(KVPolicyError('no budget.')))", id="from a child"),
    ],
)
def test_an_uncaught_kvpolicy_error_prints_its_sentence_alone(script: str) -> None:
    ended = run(script)
    assert ended.stderr == "kvpolicy: no budget.\n"
    assert ended.stdout == ""
    assert ended.returncode == 1


@pytest.mark.parametrize("before", ["", "KVPolicyError('caught.')\n"], ids=["untouched", "after a KVPolicyError"])
def test_other_errors_keep_their_traceback(before: str) -> None:
    ended = run(before + "raise RuntimeError('not ours')")
    assert ended.stderr.startswith("Traceback (most recent call last):")
    assert ended.stderr.endswith("RuntimeError: not ours\n")
    assert ended.returncode == 1


def test_other_errors_still_reach_a_hook_that_was_there_before() -> None:
    ended = run(OWN_HOOK + "KVPolicyError('caught.')\nraise RuntimeError('not ours')")
    assert ended.stderr == "own hook: not ours\n"


def test_a_later_hook_that_calls_the_one_before_it_still_works() -> None:
    wrap = (
        "before = sys.excepthook\n"
        "def later(kind, error, trace):\n    print('later hook', file=sys.stderr)\n    before(kind, error, trace)\n"
        "sys.excepthook = later\n"
    )
    ended = run("KVPolicyError('first.')\n" + wrap + "KVPolicyError('second.')\nraise RuntimeError('not ours')")
    assert ended.stderr.count("later hook") == 1
    assert ended.stderr.endswith("RuntimeError: not ours\n")


def test_importing_the_module_changes_nothing() -> None:
    assert run("assert sys.excepthook is sys.__excepthook__").returncode == 0


def test_it_is_a_value_error_that_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(KVPolicyError("no budget.")))
    assert isinstance(error, ValueError)
    assert type(error) is KVPolicyError
    assert str(error) == "no budget."
