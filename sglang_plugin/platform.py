"""Entry point of the CPU platform: active only where SGLang would find no accelerator."""

from __future__ import annotations

import os

import torch

# Of the CPU platform: SGLang's name for the backend in `cpu_attention.py`.
ATTENTION_BACKEND = "kvp_cpu"


def has_accelerator() -> bool:
    """Whether PyTorch sees a device that SGLang serves on (CUDA or ROCm, XPU, NPU, MUSA, MPS)."""
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return True
    return any(hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "musa"))


def activate() -> str | None:
    """The platform class for SGLang's registry, or None to stay out of the way.

    SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine (a source build with CPU kernels).
    """
    if has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "kvpolicy.sglang_plugin.cpu_platform.TorchCPUPlatform"
