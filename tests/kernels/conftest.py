"""Triton kernels under pytest: interpreted where there is no GPU, and memory that nobody wrote holds NaN.

A kernel test takes `device`, which runs it twice: as `interpreter`, on the CPU by Triton's interpreter, and as `cuda`,
compiled, which is skipped where there is no device. `poisoned` comes with it. Every kernel that is interpreted is also
read by the compiler, so that a test fails whose kernel would not compile.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.compiling import translate
from tests.kernels.interpreting import interpreted

READ: set[str] = set()  # keys of the launches that the compiler has accepted


def no_cuda() -> str:
    """Why kernels cannot be run compiled; empty if they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return "TRITON_INTERPRET is set: kernels are not compiled here" if "TRITON_INTERPRET" in os.environ else ""


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(no_cuda()), reason=no_cuda())]),
    ]
)
def device(request: pytest.FixtureRequest, poisoned: None) -> Iterator[torch.device]:
    """Where to put tensors; kernels launched in the test run there."""
    pytest.importorskip("triton")
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    with interpreted() as launched:
        yield torch.device("cpu")
    for launch in launched:
        if launch.key not in READ:
            translate(launch)
            READ.add(launch.key)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` and its kin give NaN, or the largest integer: what a kernel forgot to write cannot pass for 0."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # the filling is part of it
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@pytest.fixture
def launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels that the test has launched so far, by name."""
    from triton.runtime.jit import KernelInterface

    counter: Counter[str] = Counter()
    launch = KernelInterface.__getitem__

    def counted(kernel: Any, grid: Any) -> Any:
        counter[kernel.fn.__name__] += 1
        return launch(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", counted)
    return counter
