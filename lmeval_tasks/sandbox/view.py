"""What a program in the sandbox can see of the file system: shared libraries and this Python, nothing else.

A list of what is allowed rather than of what is hidden, so that test data, caches, home folders and repositories
stay out wherever they are.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

_LIBRARIES = (
    *("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/usr/share/zoneinfo", "/nix/store"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class View:
    """Paths of the host, each at its own place in the sandbox."""

    read_only: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    """(what the link holds, where it is)"""
    devices: tuple[str, ...]


def interpreter() -> str:
    """The Python that runs programs: that of this process, without its virtual environment's wrapper."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    return os.path.realpath(base)


def packages() -> list[str]:
    """Folders of installed packages, which programs may import as in LiveCodeBench's own grading."""
    return [folder for folder in map(os.path.realpath, site.getsitepackages()) if os.path.isdir(folder)]


@functools.cache
def view() -> View:
    """The view of this machine."""
    links = tuple((os.readlink(path), path) for path in _LIBRARIES if os.path.islink(path))
    real = [path for path in _LIBRARIES if os.path.exists(path) and not os.path.islink(path)]
    read_only = tuple(_outermost([*real, *_python()]))
    return View(read_only, links, tuple(filter(os.path.exists, _DEVICES)))


def _python() -> list[str]:
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("LIBDIR")]
    return [interpreter(), *(os.path.realpath(folder) for folder in folders if os.path.isdir(folder)), *packages()]


def _outermost(paths: list[str]) -> Iterator[str]:
    """Each path that lies in no other one."""
    for path in dict.fromkeys(paths):
        if not any(path.startswith(f"{other}/") for other in paths):
            yield path
