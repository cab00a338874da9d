"""Are the tests of an operation green, on the device that is about to be timed?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def refusal(operation: str, *, gpu: bool, folder: Path = ROOT / "tests" / "kernels") -> str | None:
    """Run ``test_<operation>*.py`` and say in one sentence why the operation may not be timed; None if it may.

    Tests that are all skipped do not pass: what cannot be checked is not measured.

    gpu : run the tests on the CUDA device (``-m gpu``), else those that need none.
    """
    files = sorted(str(path) for path in folder.glob(f"test_{operation}*.py"))
    if not files:
        return f"{operation} has no tests ({folder}/test_{operation}*.py), so nothing is measured"
    marker = "gpu" if gpu else "not gpu"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", marker, f"--junitxml={report}", *files]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    run, red = (0, 0) if suite is None else counts(suite)
    if finished.returncode == 0 and run and not red:
        return None
    found = f"{red} of {run} are red" if red else f"none ran (pytest ended with {finished.returncode})"
    shown = " ".join(["python -m pytest -m", repr(marker), *files]).replace(f"{ROOT}/", "")
    return f"the tests of {operation} must be green before it is timed, but {found}; see {shown}"


def counts(suite: ElementTree.Element) -> tuple[int, int]:
    """How many tests of a JUnit report were run to their end or failed, and how many of them are red."""
    total, skipped, failures, errors = (int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors"))
    return total - skipped, failures + errors
