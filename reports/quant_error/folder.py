"""The folder of a quantization-error report: written whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpolicy.reports.quant_error.capture import QuantErrorError

FILES = ("index.html", "report.json")


def check_folder(target: Path, force: bool) -> None:
    """Raise QuantErrorError unless a report may be put there: a new or an empty folder or, by force, a report's."""
    if not target.exists():
        return
    if not target.is_dir():
        raise QuantErrorError(f"--out {target} is a file; it must name a folder")
    held = sorted(path.name for path in target.iterdir())
    if others := [name for name in held if name not in FILES]:
        raise QuantErrorError(f"--out {target} holds other things, {others[0]} for one; name a new folder")
    if held and not force:
        raise QuantErrorError(f"--out {target} holds a report already; --force replaces it")


@contextmanager
def whole_folder(target: Path, force: bool) -> Iterator[Path]:
    """A folder that takes the place of `target` if all goes well, and leaves nothing if it does not.

    Raises
    ------
    QuantErrorError
        On entry if there can be no such folder, on exit if it cannot take that place.
    """
    partial = target.parent / f".{target.name}.{os.getpid()}"
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    try:
        partial.mkdir(parents=True)
        try:
            yield partial
            check_folder(target, force)
            if target.exists():
                target.replace(old)
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise QuantErrorError(f"--out {target} cannot be written: {error.strerror or error}") from None
