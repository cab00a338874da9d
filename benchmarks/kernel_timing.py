"""Times on a CUDA device, and the copy that a bandwidth is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

LARGEST_COPY = 8 << 30  # bytes moved; a copy is no faster beyond, and the pools must fit beside it


class Times(NamedTuple):
    """Milliseconds of one call: quantiles over the calls that fitted into the time."""

    p20: float
    p50: float
    p80: float


class Speed(NamedTuple):
    """Of a copy within the device: bytes that it moved, read and written ones together, and its median GB/s."""

    bytes: int
    gb_s: float


def device_times(run: Callable[[], object], milliseconds: int) -> Times:
    """Between CUDA events around each call, with the L2 cache overwritten before it.

    A call of several launches is timed from its first to its last, waits for the host included.
    """
    from triton.testing import do_bench

    p20, p50, p80 = do_bench(run, warmup=milliseconds // 4, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return Times(p20, p50, p80)


def gb_per_second(moved: int, milliseconds: float) -> float:
    return moved / milliseconds / 1e6


def copy_speed(moved: int, device: torch.device, milliseconds: int) -> Speed:
    """Of a contiguous copy that moves `moved` bytes, or `LARGEST_COPY` if that is less."""
    half = min(moved, LARGEST_COPY) // 2
    source, target = (torch.ones(half, dtype=torch.uint8, device=device) for _ in range(2))
    return Speed(2 * half, gb_per_second(2 * half, device_times(lambda: target.copy_(source), milliseconds).p50))
