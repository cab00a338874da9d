"""Which way is chosen, and what is said where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy.lmeval_tasks.sandbox import choice
from kvpolicy.lmeval_tasks.sandbox import method as method_module
from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, SandboxError, Status
from kvpolicy.lmeval_tasks.sandbox.run import run
from tests.lmeval_tasks.sandbox.runs import LIMITS, METHODS, watched


@pytest.fixture(autouse=True)
def asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.UNSAFE, raising=False)
    choice.refusal.cache_clear()
    choice._warn.cache_clear()


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(method: Method, *_: object) -> None:
        raise SandboxError(f"{method}: not here")

    monkeypatch.setattr(choice, "execute", fail)


def test_the_first_that_works_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = choice.methods()
    assert [method.tool for method in methods] == sorted(method.tool for method in methods)  # bwrap goes first
    for count in range(len(methods)):
        monkeypatch.setattr(choice, "refusal", lambda method, count=count: "no" if method in methods[:count] else None)
        assert choice.choose() == methods[count]


@pytest.mark.usefixtures("nothing_works")
def test_refused_in_one_sentence() -> None:
    with pytest.raises(SandboxError) as refused:
        choice.choose()
    sentence = str(refused.value)
    assert sentence.count(".") - sentence.count("0.7") == 1
    assert sentence.endswith(".")
    assert "KVPOLICY_UNSAFE_CODE=1" in sentence
    for method in METHODS:
        assert f"{method}: not here" in sentence


@pytest.mark.usefixtures("nothing_works")
@pytest.mark.parametrize("value", ["", "0", "true"])
def test_unsafe_code_must_be_asked_for_exactly(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(choice.UNSAFE, value)
    with pytest.raises(SandboxError):
        choice.choose()


@pytest.mark.usefixtures("nothing_works")
def test_unsafe_code_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.UNSAFE, "1")
    with pytest.warns(UserWarning, match="resource limits alone"):
        assert choice.choose() == Method("rlimits")


def test_isolation_goes_before_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.UNSAFE, "1")
    monkeypatch.setattr(choice, "refusal", lambda _: None)
    assert choice.choose().alone


def test_no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_module.shutil, "which", lambda _: None)
    assert choice.refusal(Method("bwrap")) == "bwrap: not found"


def test_a_broken_sandbox_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that fails says nothing about the program."""
    monkeypatch.setattr(method_module.shutil, "which", lambda _: "/bin/false")
    with pytest.raises(SandboxError, match="bwrap"):
        run("print(1)", method=Method("bwrap"))
    monkeypatch.setattr(method_module.shutil, "which", lambda _: "/nonexistent/bwrap")
    with pytest.raises(SandboxError, match="bwrap"):
        run("print(1)", method=Method("bwrap"))


@pytest.mark.parametrize("name", ["cpu_seconds", "wall_seconds", "memory_bytes", "output_bytes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})


RLIMITS_ALONE = {
    "fine": ("print(open('f', 'w').write('abc'))", Status.FINISHED),
    "loops": ("while True: pass", Status.TIME_LIMIT),
    "hogs": ("x = bytearray(1 << 40)", Status.MEMORY),
    "prints": ("while True: print('x' * 10_000)", Status.OUTPUT_LIMIT),
    "background": ("import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(99)", Status.FINISHED),
    "orphans": (
        "import os, time\nif os.fork() == 0:\n os.fork(); os.fork()\n time.sleep(99)\nos.fork()",
        Status.FINISHED,
    ),
}


@pytest.mark.parametrize(("program", "status"), RLIMITS_ALONE.values(), ids=RLIMITS_ALONE)
def test_resource_limits_alone(program: str, status: Status) -> None:
    outcome = watched(Method("rlimits"), program, limits=replace(LIMITS, cpu_seconds=1)).outcome
    assert outcome.status is status, outcome


def test_resource_limits_alone_take_their_folder_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = "import os; open('f', 'w').close(); print(os.environ.get('HF_TOKEN'), os.getcwd())"
    token, folder = watched(Method("rlimits"), program).outcome.stdout.split()
    assert token == "None"
    assert Path(folder).name.startswith("kvpolicy-code-")
    assert not Path(folder).exists()
