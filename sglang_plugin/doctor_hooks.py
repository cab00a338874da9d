"""How SGLang finds the plugin, and whether each function that it hooks is the one that the hook was written for."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

from kvpolicy.sglang_plugin import targets
from kvpolicy.sglang_plugin.doctor_findings import HOOKS, PLUGIN, Finding, first_line, note, problem
from kvpolicy.sglang_plugin.doctor_installed import DISTRIBUTION, version_of
from kvpolicy.sglang_plugin.errors import KVPolicyError

# Group of SGLang's entry points -> name of ours in it.
ENTRY_POINTS = {"sglang.srt.plugins": "kvpolicy", "sglang.srt.platforms": "kvpolicy_cpu"}
WHEN = {
    **dict.fromkeys(targets.LOAD, "At load, in every process"),
    **dict.fromkeys(targets.LAUNCHER, "With a policy, in the launching process"),
    **dict.fromkeys(targets.SCHEDULER, "With a policy, in each scheduler"),
    **dict.fromkeys(targets.ADMISSION, "If a policy holds requests to a budget"),
    **dict.fromkeys(targets.TAPS, "If a policy reads more than the cache"),
    **dict.fromkeys(targets.PACKED, "With kv_quant"),
}
REINSTALL = "install kvpolicy again: pip install . in its checkout (pip install -e . to work on it)"
# What the import of a package with compiled parts has been seen to raise.
BROKEN = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)


def entry_points() -> list[Finding]:
    """The two names by which SGLang finds kvpolicy: registered, and what they name can be imported."""
    found = []
    for group, name in ENTRY_POINTS.items():
        registered = importlib.metadata.entry_points(group=group, name=name)
        if not registered:
            advice = f"SGLang would not load kvpolicy, because {name} is not registered in {group}: {REINSTALL}."
            found.append(problem(PLUGIN, group, "not registered", advice))
            continue
        (entry, *_) = registered
        if version_of("torch") is None:  # nothing of the plugin can be imported; said among the packages
            found.append(Finding(PLUGIN, group, f"{name} = {entry.value}, not loaded"))
            continue
        try:
            entry.load()
        except (ImportError, AttributeError) as error:
            advice = f"{entry.value} in {group} cannot be imported ({first_line(error)}): {REINSTALL}."
            found.append(problem(PLUGIN, group, f"{name}, broken", advice))
        else:
            found.append(Finding(PLUGIN, group, f"{name} = {entry.value}"))
    return found


def import_sglang() -> Finding | None:
    """Import what the checks below need; what to do if that is not possible, else None."""
    if version_of("sglang") is None:
        tested = targets.TESTED_SGLANG
        advice = f"What would be hooked was not looked at: there is no SGLang (kvpolicy was tested with {tested})."
        return note(HOOKS, "all", "not looked at", advice)
    try:
        importlib.import_module("sglang.srt.plugins")
        importlib.import_module("sglang.srt.managers.scheduler")
    except BROKEN as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "sglang.srt.managers.scheduler":
            return None  # another SGLang: its functions are looked at one by one
        advice = (
            f"SGLang {version_of('sglang')} cannot be imported ({type(error).__name__}: {first_line(error)}): "
            f"install sglang=={targets.TESTED_SGLANG} in a fresh environment."
        )
        return problem(HOOKS, "all", "SGLang cannot be imported", advice)
    return None


def loaded(environ: Mapping[str, str]) -> Finding:
    """Let SGLang load its plugins, as each of its processes does, and see whether kvpolicy's hooks are in place."""
    from sglang.srt.plugins import load_plugins

    from kvpolicy.sglang_plugin.plugin import LOAD_HOOKS

    load_plugins()
    others = sorted(
        {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")} - {"kvpolicy"}
    )
    beside = f"; beside it: {', '.join(others)}" if others else ""
    try:
        targets.verify(LOAD_HOOKS)
    except KVPolicyError as error:
        return problem(PLUGIN, "loaded", "no", _left_out(environ) or str(error))
    return Finding(PLUGIN, "loaded", f"yes{beside}")


def _left_out(environ: Mapping[str, str]) -> str | None:
    """The setting of SGLang that keeps it from loading kvpolicy, as a sentence; None if there is none."""
    only = environ.get("SGLANG_PLUGINS", "")
    if only and "kvpolicy" not in {name.strip() for name in only.split(",")}:
        return f"SGLANG_PLUGINS={only} leaves kvpolicy out: add kvpolicy and kvpolicy_cpu to it, or unset it."
    chosen = environ.get("SGLANG_PLATFORM", "")
    if chosen and chosen != ENTRY_POINTS["sglang.srt.platforms"]:
        return (
            f"SGLANG_PLATFORM={chosen} makes SGLang leave out the plugins of all other packages that bring a platform, "
            "and kvpolicy brings one: unset it."
        )
    return None


def platform(environ: Mapping[str, str]) -> Finding:
    """On what SGLang will serve, and with which attention backend as far as that is known without a model."""
    from kvpolicy.sglang_plugin.platform import has_accelerator

    try:
        current: Any = importlib.import_module("sglang.srt.platforms").current_platform
    except (RuntimeError, TypeError, ImportError) as error:
        advice = f"SGLang cannot choose a platform ({first_line(error)})"
        return problem(PLUGIN, "platform", "none", f"{advice.removesuffix('.')}: unset SGLANG_PLATFORM.")
    name = type(current).__name__
    if current.is_out_of_tree():
        return Finding(PLUGIN, "platform", f"{name}; attention backend {current.get_default_attention_backend()}")
    if environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        advice = (
            "SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine, which needs CPU kernels that its wheel does not "
            "have; unset it to serve through kvpolicy's platform."
        )
        return note(PLUGIN, "platform", name, advice)
    if not has_accelerator():
        advice = _left_out(environ) or f"there is no GPU, and kvpolicy's CPU platform was not chosen: {REINSTALL}."
        return problem(PLUGIN, "platform", name, advice)
    return Finding(PLUGIN, "platform", f"{name}; SGLang chooses the attention backend with the model (--model)")


def hooks() -> list[Finding]:
    """One finding for each function that is, or may be, hooked."""
    return [_hook(target) for target in targets.ALL]


def _hook(target: targets.Target) -> Finding:
    more = {"kind": target.kind, "parameters": list(target.parameters), "when": WHEN.get(target, "With a policy")}
    try:
        function = targets.resolve(target)
    except KVPolicyError as error:
        return problem(HOOKS, target.path, "missing", str(error), **more)
    try:
        targets.check([target])
    except KVPolicyError as error:
        return problem(HOOKS, target.path, "changed signature", str(error), **more)
    others = _others(target)
    if others and target not in targets.LOAD:
        # SGLang applies the hooks of a function once, and ours come when a policy is asked for.
        advice = (
            f"{target.path} is hooked by {' and '.join(others)} before kvpolicy can, and SGLang applies the hooks of a "
            "function once, so an engine with a policy would refuse to start: set "
            "SGLANG_PLUGINS=kvpolicy,kvpolicy_cpu to leave that plugin out."
        )
        return problem(HOOKS, target.path, f"taken by {', '.join(others)}", advice, **more)
    if others:
        advice = f"Beside kvpolicy {' and '.join(others)} hooks {target.path}; both hooks run."
        return note(HOOKS, target.path, f"ok, shared with {', '.join(others)}", advice, **more)
    home = inspect.unwrap(function).__module__
    if not home.startswith("sglang."):
        advice = f"{target.path} was replaced by a function of {home}, which kvpolicy would hook in its place."
        return note(HOOKS, target.path, f"ok, but of {home}", advice, **more)
    return Finding(HOOKS, target.path, "ok", more=more)


def _others(target: targets.Target) -> list[str]:
    """Plugins of other packages with a hook on the same function, as SGLang's registry knows them."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    sources = [source for _, _, source in getattr(HookRegistry, "_hooks", {}).get(target.path, ())]
    foreign = [source for source in sources if source is None or source.dist_name != DISTRIBUTION]
    return sorted(
        {f"plugin {source.plugin_name} of {source.dist_name}" if source else "unnamed code" for source in foreign}
    )
