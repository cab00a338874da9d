"""A buffer whose last slots lie more than 2^31 elements behind its beginning."""

from __future__ import annotations

import mmap

import pytest
import torch

ELEMENTS = 2**31 + 2**16
MAP_NORESERVE = 0x4000  # of Linux; not in `mmap` of every Python


def far_buffer(heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """bf16 ``[S, heads, head_dim]`` of at least `ELEMENTS`, all 0, of which pages that nobody writes cost no memory.

    In front of it lies as much again, also 0: an offset that has wrapped to a negative one reads a wrong number there,
    and the test fails, not the process.
    """
    slots = -(-ELEMENTS // (heads * head_dim))
    size = slots * heads * head_dim
    if device.type == "cuda":
        if torch.cuda.mem_get_info(device)[0] < 5 * size:
            pytest.skip("needs 10 GB of free memory on the device")
        both = torch.zeros(2 * size, dtype=torch.bfloat16, device=device)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        both = torch.frombuffer(mmap.mmap(-1, 4 * size, flags=flags), dtype=torch.bfloat16)
    return both[size:].view(slots, heads, head_dim)
