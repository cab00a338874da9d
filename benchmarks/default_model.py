"""The model that is measured where no other is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / "out" / "models" / "SmolLM2-135M-Instruct"


def smollm2() -> Path:
    """Where SmolLM2-135M-Instruct lies; it is built first if it is not there."""
    subprocess.run([sys.executable, ROOT / "examples" / "smollm2_checkpoint.py", SMOLLM2], check=True)
    return SMOLLM2
