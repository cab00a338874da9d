"""Whether Triton kernels run: on a CUDA device, unless the environment says otherwise."""

from __future__ import annotations

import os

import torch

from kvpolicy.sglang_plugin.errors import KVPolicyError

# "torch" for PyTorch everywhere, "triton" for kernels even on a CPU (under Triton's interpreter).
SWITCH = "KVPOLICY_KERNELS"


def kernels_on(device: torch.device) -> bool:
    """Raise KVPolicyError if the switch is neither torch nor triton, nor unset."""
    wanted = os.environ.get(SWITCH, "")
    if wanted not in ("", "torch", "triton"):
        raise KVPolicyError(f"{SWITCH}={wanted!r} must be torch or triton, or not be set.")
    return wanted == "triton" or (wanted == "" and device.type == "cuda")
