"""Triton's interpreter cuts numbers that become bf16 off; compiled kernels round them to the nearest."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def bf16_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, for every test of a module that imports this."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding(builder: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, target)
        rounded = torch.from_numpy(source.data.copy()).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding)
