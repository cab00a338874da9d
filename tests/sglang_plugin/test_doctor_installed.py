"""What `kvpolicy doctor` says of the packages and the devices of a machine."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from kvpolicy.sglang_plugin import doctor_installed, targets
from kvpolicy.sglang_plugin.doctor_findings import Finding, Status

FAKE = "kvpolicy_test_trials"
TESTED = {"sglang": Requirement("sglang==0.5.23"), "lm-eval": Requirement("lm-eval==0.4.13")}
INSTALLED = {
    "sglang": "0.5.23",
    "torch": "2.14.1",
    "transformers": "5.19.0",
    "triton": "3.8.0",
    "lm-eval": "0.4.13",
    "math-verify": "0.9.0",
    "bitsandbytes": "0.50.2",
}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Packages with versions, which a test may change."""
    installed = dict(INSTALLED)
    monkeypatch.setattr(doctor_installed, "version_of", installed.get)
    return installed


def test_the_tested_versions_are_fine(versions: dict[str, str]) -> None:
    findings = doctor_installed.packages(TESTED)
    assert {finding.name: finding.found.removesuffix(", as tested") for finding in findings} == versions
    assert {finding.status for finding in findings} == {Status.OK}


def test_the_requirements_are_those_of_the_metadata() -> None:
    wanted = doctor_installed.requirements()
    assert wanted["sglang"].specifier.contains(targets.TESTED_SGLANG)
    assert {"lm-eval", "math-verify", "bitsandbytes"} <= set(wanted)


@pytest.mark.parametrize("name", ["sglang", "torch", "transformers"])
def test_what_every_launch_needs_is_a_problem_when_it_is_missing(versions: dict[str, str], name: str) -> None:
    del versions[name]
    found = by_name(doctor_installed.packages(TESTED))[name]
    assert (found.status, found.found) == (Status.PROBLEM, "not installed")
    assert "is not installed, so nothing can be served: " in found.advice
    assert "pip install '.[sglang]'" in found.advice


@pytest.mark.parametrize(
    ("name", "extra", "purpose"),
    [
        ("lm-eval", "eval", "lm_eval"),
        ("triton", "sglang", "kernels on a GPU"),
        ("bitsandbytes", "quant", "quant-error"),
    ],
)
def test_what_some_commands_need_is_a_note(versions: dict[str, str], name: str, extra: str, purpose: str) -> None:
    del versions[name]
    found = by_name(doctor_installed.packages(TESTED))[name]
    assert found.status is Status.NOTE
    assert purpose in found.advice
    assert f"pip install '.[{extra}]'" in found.advice


@pytest.mark.parametrize("name", ["sglang", "lm-eval"])
def test_another_version_is_told_with_the_tested_one(versions: dict[str, str], name: str) -> None:
    versions[name] = "0.9.9"
    found = by_name(doctor_installed.packages(TESTED))[name]
    assert found.status is Status.NOTE
    assert "0.9.9" in found.advice
    assert f"pip install '{TESTED[name]}'" in found.advice


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), Status.PROBLEM), ((3, 11, 0), Status.OK)])
def test_python_must_be_new_enough(version: tuple[int, ...], status: Status) -> None:
    assert doctor_installed.python(version).status is status


def test_a_switch_of_the_kernels_that_is_none_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOLICY_KERNELS", "cuda")
    found = by_name(doctor_installed.devices())["evictions"]
    assert (found.status, "KVPOLICY_KERNELS='cuda' must be" in found.advice) == (Status.PROBLEM, True)


def test_kernels_without_triton_are_a_problem(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setenv("KVPOLICY_KERNELS", "triton")
    assert by_name(doctor_installed.devices())["evictions"].status is Status.OK
    del versions["triton"]
    assert "pip install triton" in by_name(doctor_installed.devices())["evictions"].advice


def test_what_is_tried_says_what_works_or_why_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(FAKE)

    def works() -> str:
        return "bwrap"

    def fails() -> str:
        raise RuntimeError("install bubblewrap")

    vars(module).update(works=works, fails=fails)
    monkeypatch.setitem(sys.modules, FAKE, module)
    trials = {"one": f"{FAKE}:works", "two": f"{FAKE}:fails", "three": "kvpolicy_no_such_module:works"}
    found = by_name(doctor_installed.findings(trials))
    assert (found["one"].found, found["one"].status) == ("bwrap", Status.OK)
    assert (found["two"].advice, found["two"].status) == ("install bubblewrap", Status.NOTE)
    assert found["three"].status is Status.NOTE
