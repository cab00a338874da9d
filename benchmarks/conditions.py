"""What a measured row must say of where it comes from."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import torch


def conditions() -> dict[str, str]:
    """Commit (with a mark for uncommitted changes), processor, versions, time of day."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "commit": described.stdout.strip() or "unknown",
        "device": f"{_device()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "sglang": _version("sglang"),
        "triton": _version("triton"),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} CPU"
