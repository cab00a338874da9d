"""bitsandbytes where it is installed, imported without asking a hub for the kernels that it would like to have."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture(scope="session")
def bitsandbytes() -> None:
    """Skips where it is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kernels", None)  # the package that would ask
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'sglang-kvpolicy[quant]'")
        importlib.import_module("bitsandbytes.functional")
