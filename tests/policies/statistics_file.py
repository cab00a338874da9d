"""Query statistics of models that do not exist, and their files."""

from __future__ import annotations

from pathlib import Path

import torch

from kvpolicy.policies.query_statistics import QueryStatistics, write


def random_statistics(
    layers: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: float = 1.0,
    seed: int = 0,
) -> QueryStatistics:
    """Means of different lengths, and queries that are up to twice as long as their mean."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, kv_heads * group, head_dim // 2)
    real, imag, stretch, longer = (torch.randn(shape, generator=generator) for _ in range(4))
    scale = stretch.mul(0.5).exp()
    real, imag = real * scale, imag * scale
    return QueryStatistics(
        mean_real=real,
        mean_imag=imag,
        mean_abs=real.hypot(imag) * (1 + longer.sigmoid()),
        inv_freq=theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim).float(),
        attention_scaling=scaling,
        kv_heads=kv_heads,
        rope_theta=theta,
        model="org/model",
        tokens=123,
    )


def statistics_file(folder: Path, statistics: QueryStatistics, name: str = "stats.safetensors") -> str:
    """Where they were written to."""
    write(statistics, folder / name)
    return str(folder / name)
