"""Counter-based random numbers: every value is a pure function of its keys.

A generator with state would make a request's evictions depend on what else is in the batch. Here
a value depends on (seed, eviction, layer, head, counter) alone, so a request evicts alike in any
batch, on any rerun and on any device.
"""

from __future__ import annotations

import functools
import math

import torch

# Constants of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shift_right(x, 31).bitwise_xor_(x)


def _absorb(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return _mix((state ^ key.to(torch.int64)).add_(_GOLDEN))


def _absorb_number(state: int, key: int) -> int:
    """The same in Python, which is faster than in tensors of one number."""
    x = ((state ^ key) + _GOLDEN) % (1 << 64)
    x = (x ^ x >> 30) * _MIX_1 % (1 << 64)
    x = (x ^ x >> 27) * _MIX_2 % (1 << 64)
    x ^= x >> 31
    return x - (x >> 63 << 64)  # signed


def hash_keys(*keys: torch.Tensor | int) -> torch.Tensor:
    """Mix int64 keys, numbers and tensors that are broadcast against each other, into one int64 hash.

    The keys are absorbed in order, each followed by a full splitmix64 round, so (1, 2) and (2, 1)
    give unrelated hashes. Numbers come before tensors, of which there is at least one.
    """
    numbers = [key for key in keys if isinstance(key, int)]
    tensors = [key for key in keys if isinstance(key, torch.Tensor)]
    assert all(isinstance(key, int) for key in keys[: len(numbers)]), "numbers must come before tensors"
    start = functools.reduce(_absorb_number, numbers, 0)
    state = torch.full((), start, dtype=torch.int64, device=tensors[0].device)
    return functools.reduce(_absorb, tensors, state)


def mixed_seed(*keys: int) -> int:
    """One seed, ``0 <= seed < 2**63``, out of several whole numbers."""
    return functools.reduce(_absorb_number, keys, 0) & ((1 << 63) - 1)


def uniform(*keys: torch.Tensor | int) -> torch.Tensor:
    """Uniform values in the open interval (0, 1), fp64, shape = broadcast shape of `keys`."""
    return _uniform_of(hash_keys(*keys))


def _uniform_of(hashes: torch.Tensor) -> torch.Tensor:
    # 52 bits and a half: one bit more, and the largest value would round to 1.
    return _shift_right(hashes, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def standard_normal(*keys: torch.Tensor | int) -> torch.Tensor:
    """Standard normal values, fp32, shape = broadcast shape of `keys` (Box and Muller 1958)."""
    state = hash_keys(*keys)
    streams = torch.arange(1, 3, device=state.device).view(2, *[1] * state.dim())
    first, second = _uniform_of(_absorb(state, streams))
    radius = first.log_().mul_(-2.0).sqrt_()
    normal: torch.Tensor = radius.mul_(second.mul_(2.0 * math.pi).cos_())
    return normal.float()
