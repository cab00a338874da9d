"""What is installed on this machine, as far as kvpolicy uses it: packages, devices, what can be tried."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import platform
import sys
from collections.abc import Mapping

from packaging.requirements import Requirement

from kvpolicy.sglang_plugin.doctor_findings import INSTALLED, Finding, first_line, note, problem

DISTRIBUTION = "sglang-kvpolicy"
# Packages that every launch needs; the others come with SGLang.
NEEDED = ("sglang", "torch", "transformers")
# Those that some commands need, with the extra that brings them and what is missing without.
OPTIONAL = {
    "triton": ("sglang", "kernels on a GPU"),
    "lm-eval": ("eval", "lm_eval and the kvp_… tasks"),
    "math-verify": ("eval", "grading of mathematical answers"),
    "bitsandbytes": ("quant", "the codecs that kvpolicy quant-error compares with"),
}


def findings(trials: Mapping[str, str]) -> list[Finding]:
    """All of it."""
    found = [python(sys.version_info[:3])]
    found += packages(requirements())
    found += devices()
    return found + [_tried(name, path) for name, path in trials.items()]


def python(version: tuple[int, ...]) -> Finding:
    """Whether this Python is new enough."""
    shown = ".".join(map(str, version))
    if version < (3, 11):
        return problem(INSTALLED, "Python", shown, f"kvpolicy needs Python 3.11 or newer, and this is {shown}.")
    return Finding(INSTALLED, "Python", f"{shown}, {platform.system()} {platform.machine()}")


def version_of(package: str) -> str | None:
    """The installed version, without importing the package; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> dict[str, Requirement]:
    """What kvpolicy's own metadata asks of each package, extras included."""
    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


def packages(wanted: Mapping[str, Requirement]) -> list[Finding]:
    """Each package with its version; `wanted` is what kvpolicy was tested with."""
    return [_needed(name, wanted.get(name)) for name in NEEDED] + [
        _optional(name, wanted.get(name)) for name in OPTIONAL
    ]


def _needed(name: str, wanted: Requirement | None) -> Finding:
    version = version_of(name)
    if version is None:
        what = "SGLang" if name == "sglang" else f"{name}, which comes with SGLang,"
        advice = (
            f"{what} is not installed, so nothing can be served: pip install '.[sglang]' in a checkout of kvpolicy."
        )
        return problem(INSTALLED, name, "not installed", advice)
    if wanted is not None and not _fits(version, wanted):
        return note(
            INSTALLED,
            name,
            f"{version}, not the tested {_asked(wanted)}",
            f"kvpolicy was tested with {name} {_asked(wanted)}, and {version} is installed: it serves if every hooked "
            f"function is as expected, but no test was run with it; pip install '{name}{wanted.specifier}' to be sure.",
        )
    return Finding(INSTALLED, name, f"{version}, as tested" if wanted is not None else version)


def _optional(name: str, wanted: Requirement | None) -> Finding:
    extra, purpose = OPTIONAL[name]
    version = version_of(name)
    if version is None:
        advice = f"{name} is not installed, which leaves out {purpose}: pip install '.[{extra}]' in a checkout."
        return note(INSTALLED, name, "not installed", advice)
    if wanted is not None and not _fits(version, wanted):
        tested = f"kvpolicy was tested with {name} {_asked(wanted)}, not with {version}"
        advice = f"{tested}: pip install '{name}{wanted.specifier}'."
        return note(INSTALLED, name, f"{version}, not {_asked(wanted)}", advice)
    return Finding(INSTALLED, name, version)


def _fits(version: str, wanted: Requirement) -> bool:
    return wanted.specifier.contains(version, prereleases=True)


def _asked(wanted: Requirement) -> str:
    return str(wanted.specifier).removeprefix("==")


def devices() -> list[Finding]:
    """The GPUs, or the CPU, and what computes evictions there."""
    try:
        import torch
    except ImportError:
        return []  # said among the packages
    from kvpolicy.sglang_plugin.kernel_switch import SWITCH, kernels_on
    from kvpolicy.sglang_plugin.platform import has_accelerator

    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        memory = f"{about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}"
        found.append(Finding(INSTALLED, f"GPU {index}", f"{about.name}, {memory}"))
    if not found and has_accelerator():
        advice = "kvpolicy was made for CUDA devices and CPUs; on this device nothing of it was ever run."
        found.append(note(INSTALLED, "device", "an accelerator other than CUDA", advice))
    elif not found:
        found.append(Finding(INSTALLED, "device", f"no GPU; {os.cpu_count()} CPUs"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kernels = kernels_on(device)
    except ValueError as error:
        return [*found, problem(INSTALLED, "evictions", "refused", str(error))]
    if kernels and version_of("triton") is None:
        advice = (
            f"Evictions on {device} need Triton, which is not installed: pip install triton, or set {SWITCH}=torch."
        )
        return [*found, problem(INSTALLED, "evictions", "no Triton", advice)]
    return [*found, Finding(INSTALLED, "evictions", "Triton kernels" if kernels else "PyTorch, request by request")]


def _tried(name: str, path: str) -> Finding:
    try:
        return Finding(INSTALLED, name, str(pkgutil.resolve_name(path)()))
    except ImportError as error:
        return note(
            INSTALLED, name, "not tried", f"The {name} was not tried, for want of a package: {first_line(error)}."
        )
    except RuntimeError as error:
        return note(INSTALLED, name, "none", first_line(error))
