"""What `kvpolicy doctor` says of how SGLang finds the plugin, and of each function that it hooks."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpolicy.sglang_plugin import doctor_hooks, doctor_installed, targets
from kvpolicy.sglang_plugin.doctor_findings import Status
from kvpolicy.sglang_plugin.targets import Target

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

FAKE = "kvpolicy_test_doctored_sglang"
SOURCE = """
class Engine:
    def step(self, batch):
        return batch

    def stop(self):
        return None
"""


def test_both_entry_points_are_registered_and_load() -> None:
    findings = doctor_hooks.entry_points()
    assert [finding.name for finding in findings] == list(doctor_hooks.ENTRY_POINTS)
    assert {finding.status for finding in findings} == {Status.OK}


@pytest.mark.parametrize(
    ("registered", "sentence"),
    [
        ([], "kvpolicy is not registered in sglang.srt.plugins: install kvpolicy again"),
        (["kvpolicy_no_such_module:register"], "kvpolicy_no_such_module:register in sglang.srt.plugins cannot be"),
        (["kvpolicy.sglang_plugin.plugin:no_such_function"], "plugin:no_such_function in sglang.srt.plugins cannot be"),
    ],
    ids=["not registered", "no module", "no function"],
)
def test_an_entry_point_that_does_not_load_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, registered: list[str], sentence: str
) -> None:
    def entries(group: str, name: str) -> list[importlib.metadata.EntryPoint]:
        return [importlib.metadata.EntryPoint(name, value, group) for value in registered]

    monkeypatch.setattr(importlib.metadata, "entry_points", entries)
    first, _ = doctor_hooks.entry_points()
    assert first.status is Status.PROBLEM
    assert sentence in first.advice


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's registry of hooks, which forgets those of the test, and a stand-in for a module that it hooks."""
    found = pytest.importorskip("sglang.srt.plugins.hook_registry")
    monkeypatch.setattr(found.HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(found.HookRegistry, "_patched", set())
    module = ModuleType(FAKE)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, FAKE, module)
    for function in (module.Engine.step, module.Engine.stop):  # type: ignore[attr-defined]
        function.__module__ = "sglang.fake"
    return found


def step(*parameters: str, path: str = "Engine.step") -> Target:
    return Target(f"{FAKE}.{path}", "after", parameters)


def test_every_function_is_as_the_hooks_expect(registry: Any) -> None:
    findings = doctor_hooks.hooks()
    assert [finding.name for finding in findings] == [target.path for target in targets.ALL]
    assert {finding.status for finding in findings} == {Status.OK}
    by_path = {target.path: target for target in targets.ALL}
    for finding in findings:
        assert finding.more["kind"] == by_path[finding.name].kind
        assert finding.more["parameters"] == list(by_path[finding.name].parameters)
        assert finding.more["when"]


@pytest.mark.parametrize(
    ("target", "found", "sentence"),
    [
        (step("self", "batch"), "ok", ""),
        (step(path="Engine.pause"), "missing", "Engine.pause does not exist"),
        (step("self", "reqs"), "changed signature", "Engine.step has no parameter reqs"),
    ],
    ids=["as expected", "missing", "changed"],
)
def test_another_sglang_is_told_by_the_function_that_differs(
    registry: Any, monkeypatch: pytest.MonkeyPatch, target: Target, found: str, sentence: str
) -> None:
    monkeypatch.setattr("sglang.version.__version__", "0.6.0")
    monkeypatch.setattr(targets, "ALL", (target,))
    (finding,) = doctor_hooks.hooks()
    assert (finding.found, finding.status) == (found, Status.PROBLEM if sentence else Status.OK)
    if sentence:
        assert sentence in finding.advice
        assert "cannot work in this SGLang 0.6.0" in finding.advice
        assert "install that version, or drop kv_policy" in finding.advice


@pytest.mark.parametrize(("at_load", "status"), [(False, Status.PROBLEM), (True, Status.NOTE)])
def test_another_plugin_on_the_same_function_is_named(
    registry: Any, monkeypatch: pytest.MonkeyPatch, at_load: bool, status: Status
) -> None:
    source = registry.HookSource(plugin_name="other", dist_name="other-plugin")
    registry.HookRegistry.register(step().path, lambda result, *_: result, source=source)
    monkeypatch.setattr(targets, "ALL", (step("self"), step(path="Engine.stop")))
    monkeypatch.setattr(targets, "LOAD", (step("self"),) if at_load else ())
    taken, free = doctor_hooks.hooks()
    assert taken.status is status
    assert "plugin other of other-plugin" in taken.advice
    assert free.status is Status.OK


def test_kvpolicys_own_hooks_are_no_others(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = registry.HookSource(plugin_name="kvpolicy", dist_name=doctor_installed.DISTRIBUTION)
    registry.HookRegistry.register(step().path, lambda result, *_: result, source=source)
    monkeypatch.setattr(targets, "ALL", (step("self"),))
    assert [finding.status for finding in doctor_hooks.hooks()] == [Status.OK]


def test_a_function_that_someone_replaced_is_told_by_its_module(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, batch: Any) -> None:
        """Stands in for the function."""

    monkeypatch.setattr(sys.modules[FAKE].Engine, "step", other)
    monkeypatch.setattr(targets, "ALL", (step("self", "batch"),))
    (finding,) = doctor_hooks.hooks()
    assert finding.status is Status.NOTE
    assert __name__.rpartition(".")[2] in finding.advice


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"SGLANG_PLUGINS": "other, second"}, "SGLANG_PLUGINS=other, second leaves kvpolicy out: add kvpolicy"),
        ({"SGLANG_PLATFORM": "other"}, "SGLANG_PLATFORM=other makes SGLang leave out"),
        ({"SGLANG_PLUGINS": "kvpolicy,kvpolicy_cpu"}, "could not be hooked"),
        ({"SGLANG_PLATFORM": "kvpolicy_cpu"}, "could not be hooked"),
        ({}, "could not be hooked"),
    ],
)
def test_a_plugin_that_sglang_does_not_load_is_told_with_the_setting_that_keeps_it_out(
    registry: Any, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], sentence: str
) -> None:
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: None)  # as if kvpolicy were not among them
    monkeypatch.setattr(targets, "verify", _refuse)
    finding = doctor_hooks.loaded(environ)
    assert finding.status is Status.PROBLEM
    assert sentence in finding.advice


def _refuse(_hooks: targets.Hooks) -> None:
    raise targets.KVPolicyError("… could not be hooked")


def test_an_sglang_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_hooks, "version_of", lambda _: "0.5.23")

    def broken(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor_hooks, "importlib", SimpleNamespace(import_module=broken))
    finding = doctor_hooks.import_sglang()
    assert finding is not None
    assert finding.status is Status.PROBLEM
    assert "libcuda.so.1" in finding.advice
    assert "install sglang==0.5.23" in finding.advice
