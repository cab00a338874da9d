"""Counter-based random numbers: every value is a pure function of its keys.

A generator with state would make a request's evictions depend on what else is in the batch. Here
a value depends on (seed, eviction, layer, head, counter) alone, so a request evicts alike in any
batch, on any rerun and on any device.
"""

from __future__ import annotations

import math

import torch

# Constants of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def hash_keys(*keys: torch.Tensor) -> torch.Tensor:
    """Mix int64 key tensors, broadcast against each other, into one int64 hash.

    The keys are absorbed in order, each followed by a full splitmix64 round, so (1, 2) and (2, 1)
    give unrelated hashes.
    """
    state = torch.zeros((), dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix((state ^ key.to(torch.int64)) + _GOLDEN)
    return state


def uniform(*keys: torch.Tensor) -> torch.Tensor:
    """Uniform values in the open interval (0, 1), fp64, shape = broadcast shape of `keys`."""
    # 52 bits and a half: one bit more, and the largest value would round to 1.
    return (_shift_right(hash_keys(*keys), 12).to(torch.float64) + 0.5) * 2.0**-52


def standard_normal(*keys: torch.Tensor) -> torch.Tensor:
    """Standard normal values, fp32, shape = broadcast shape of `keys` (Box and Muller 1958)."""
    radius, angle = (torch.tensor(stream, device=keys[0].device) for stream in (1, 2))
    log_term = -2.0 * torch.log(uniform(*keys, radius))
    return (torch.sqrt(log_term) * torch.cos(2.0 * math.pi * uniform(*keys, angle))).float()
