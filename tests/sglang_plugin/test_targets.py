"""Checking, hooking and verifying SGLang's functions, on a fake module, and the real targets against SGLang."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvpolicy.sglang_plugin import targets
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.targets import Target

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

FAKE = "kvpolicy_test_fake_sglang"
SOURCE = """
class Sealed(type):
    def __setattr__(cls, name, value):
        raise TypeError("sealed")

class Engine:
    def step(self, batch):
        return batch + 1

    @classmethod
    def build(cls, size):
        return size

    @staticmethod
    def size_of(batch):
        return batch

class SealedEngine(metaclass=Sealed):
    def step(self, batch):
        return batch

def launch(server_args, *, port=0):
    return server_args
"""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for SGLang's modules, and registries that forget the test's hooks."""
    registry = pytest.importorskip("sglang.srt.plugins.hook_registry")
    monkeypatch.setattr(registry.HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(registry.HookRegistry, "_patched", set())
    monkeypatch.setattr(targets, "_installed", {})
    module = ModuleType(FAKE)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, FAKE, module)
    return module


def target(path: str, kind: Any = "after", parameters: tuple[str, ...] = ()) -> Target:
    return Target(f"{FAKE}.{path}", kind, parameters)


def test_every_real_target_exists_and_takes_its_parameters() -> None:
    targets.check(targets.ALL)
    assert len({target.path for target in targets.ALL}) == len(targets.ALL)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        pytest.param("launch", ("server_args", "port"), id="function"),
        pytest.param("Engine.step", ("self", "batch"), id="method"),
        pytest.param("Engine.build", ("size",), id="classmethod"),
        pytest.param("Engine.size_of", ("batch",), id="staticmethod"),
    ],
)
def test_a_target_with_its_parameters_passes(path: str, parameters: tuple[str, ...]) -> None:
    targets.check([target(path, parameters=parameters)])


@pytest.mark.parametrize(
    ("path", "parameters", "sentence"),
    [
        pytest.param("no_module.launch", (), "does not exist", id="no module"),
        pytest.param("stop", (), "does not exist", id="no function"),
        pytest.param("Engine.stop", (), "does not exist", id="no method"),
        pytest.param("Scheduler.step", (), "does not exist", id="no class"),
        pytest.param("launch", ("server_args", "node"), "has no parameter node", id="no parameter of a function"),
        pytest.param("Engine.step", ("self", "a", "b"), "has no parameter a, b", id="no parameters of a method"),
        pytest.param("Engine.build", ("cls",), "has no parameter cls", id="the class of a classmethod"),
    ],
)
def test_another_sglang_is_refused_by_the_target_that_differs(
    path: str, parameters: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(KVPolicyError, match=f"^{FAKE}.{path} {sentence}, so kv_policy cannot work in this") as caught:
        targets.check([target(path, parameters=parameters)])
    assert f"tested with SGLang {targets.TESTED_SGLANG}" in str(caught.value)


def hook_of(kind: str, seen: list[Any]) -> Callable[..., Any]:
    """A hook that records what it is called with and adds 10 to what passes through."""
    if kind == "before":
        return lambda *args: seen.append(args) or ((*args[:-1], args[-1] + 10), {})
    if kind == "after":
        return lambda result, *args: seen.append(args) or result + 10
    return lambda original, *args: seen.append(args) or original(*args) + 10


@pytest.mark.parametrize("kind", ["before", "after", "around"])
@pytest.mark.parametrize(
    ("path", "call", "expected"),
    [
        pytest.param("launch", lambda fake: fake.launch(1), 11, id="function"),
        pytest.param("Engine.step", lambda fake: fake.Engine().step(1), 12, id="method"),
        pytest.param("Engine.build", lambda fake: fake.Engine.build(1), 11, id="classmethod"),
        pytest.param("Engine.size_of", lambda fake: fake.Engine.size_of(1), 11, id="staticmethod"),
    ],
)
def test_an_installed_hook_is_called_and_verified(
    fake: ModuleType, path: str, call: Callable[[ModuleType], int], expected: int, kind: str
) -> None:
    seen: list[Any] = []
    targets.install({target(path, kind): hook_of(kind, seen)})
    assert call(fake) == expected
    assert len(seen) == 1


def test_installing_again_hooks_once(fake: ModuleType) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = {target("launch"): hook_of("after", [])}
    for _ in range(3):
        targets.install(hooks)
    assert fake.launch(1) == 11
    assert len(HookRegistry._hooks[f"{FAKE}.launch"]) == 1


def test_nothing_is_hooked_when_one_target_is_wrong(fake: ModuleType) -> None:
    original = fake.launch
    with pytest.raises(KVPolicyError, match="has no parameter node"):
        targets.install({target("launch"): print, target("Engine.step", parameters=("node",)): print})
    assert fake.launch is original


def test_every_hook_that_is_not_in_place_is_named() -> None:
    hooks = {target(path): hook_of("after", []) for path in ("launch", "Engine.step", "Engine.build")}
    targets.install({target("Engine.step"): hooks[target("Engine.step")]})
    with pytest.raises(KVPolicyError, match=f"^{FAKE}.launch and {FAKE}.Engine.build could not be hooked, so"):
        targets.verify(hooks)


def test_a_hook_that_the_registry_fails_to_apply_is_noticed() -> None:
    """The registry only logs this failure (0.5.23); without the check SGLang would serve stock output."""
    with pytest.raises(KVPolicyError, match=f"^{FAKE}.SealedEngine.step could not be hooked"):
        targets.install({target("SealedEngine.step"): print})


def test_a_target_that_another_plugin_hooked_before_is_noticed() -> None:
    """The registry applies the hooks of a target once (0.5.23), so a later one would be dropped silently."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register(f"{FAKE}.launch", lambda result, *_: result)
    HookRegistry.apply_hooks()
    with pytest.raises(KVPolicyError, match="could not be hooked"):
        targets.install({target("launch"): print})


@pytest.mark.parametrize("installed", [False, True], ids=["nothing installed", "another hook installed"])
def test_a_hook_that_was_not_installed_does_not_verify(installed: bool) -> None:
    if installed:
        targets.install({target("Engine.build"): hook_of("after", [])})
    with pytest.raises(KVPolicyError, match=f"^{FAKE}.Engine.build could not be hooked"):
        targets.verify({target("Engine.build"): hook_of("after", [])})


def test_a_function_that_replaced_the_hooked_one_is_noticed(fake: ModuleType) -> None:
    hooks = {target("launch"): hook_of("after", [])}
    targets.install(hooks)
    fake.launch = lambda server_args: server_args  # type: ignore[attr-defined]
    with pytest.raises(KVPolicyError, match="could not be hooked"):
        targets.verify(hooks)


@pytest.mark.parametrize("path", ["launch", "Engine.build"], ids=["function", "classmethod"])
def test_a_hook_under_later_wrappers_verifies(fake: ModuleType, path: str) -> None:
    hooks = {target(path): hook_of("after", [])}
    targets.install(hooks)
    owner = fake.Engine if "." in path else fake
    for _ in range(2):
        inner = getattr(owner, path.rpartition(".")[2])
        setattr(owner, path.rpartition(".")[2], functools.wraps(inner)(lambda *args, inner=inner: inner(*args)))
    targets.verify(hooks)


def test_a_bound_method_is_the_same_hook_each_time_it_is_taken() -> None:
    class Runtime:
        def after(self, result: int, *_: Any) -> int:
            return result

    runtime = Runtime()
    targets.install({target("launch"): runtime.after})
    targets.verify({target("launch"): runtime.after})
    with pytest.raises(KVPolicyError, match="could not be hooked"):
        targets.verify({target("launch"): Runtime().after})
