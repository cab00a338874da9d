"""Paged buffers for tests of kernels, in which every slot that a kernel must not read holds NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpolicy.kernels.paged import Pool, Rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def shuffled_rows(lengths: Sequence[int], slots: int, device: torch.device, seed: int = 0) -> Rows:
    """Requests of so many tokens in distinct slots out of `slots`, in no order."""
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
    return Rows.of([row.to(device) for row in order[: sum(lengths)].split(list(lengths))])


def random_pool(shape: tuple[int, int, int, int], dtype: torch.dtype, rows: Rows, seed: int = 0) -> Pool:
    """``[L, S, H, D]``: standard normal where `rows` point, NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.full(shape, torch.nan)
    used = rows.slots.unique().cpu()
    data[:, used] = torch.randn(shape[0], len(used), *shape[2:], generator=generator)
    return Pool.of(list(data.to(rows.slots.device, dtype)))
