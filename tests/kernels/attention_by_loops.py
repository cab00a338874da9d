"""Window attention as its docstring says it, for one KV head, in Python floats (fp64) and one number at a time."""

from __future__ import annotations

import math

import torch


def softmax(logits: list[float]) -> list[float]:
    highest = max(logits, default=0.0)
    powers = [math.exp(logit - highest) for logit in logits]
    return [power / sum(powers) for power in powers]


def mean(rows: list[list[float]]) -> list[float]:
    """Of equally long rows, number by number."""
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def pooled(mass: list[float], pooling: str, kernel: int) -> list[float]:
    """Average, padding counted as zeros, or largest over `kernel` neighbours."""
    if pooling == "none":
        return mass
    windows = [mass[max(0, j - kernel // 2) : j + kernel // 2 + 1] for j in range(len(mass))]
    return [math.fsum(window) / kernel if pooling == "avg" else max(window) for window in windows]


def attention_by_loops(
    queries: torch.Tensor,
    keys: torch.Tensor,
    candidates: int,
    *,
    domain: str,
    group: str,
    pooling: str,
    kernel: int,
    temperature: float = 1.0,
) -> list[float]:
    """``[G, w, D]`` queries of the head's group and its ``[N, D]`` keys to `candidates` scores."""
    window, tokens = queries.shape[1], len(keys)
    scale = math.sqrt(keys.shape[1]) * temperature
    products = [[(keys.double() @ query / scale).tolist() for query in head] for head in queries.double()]
    if group == "max":
        products = [[[max(logit) for logit in zip(*heads, strict=True)] for heads in zip(*products, strict=True)]]
    of_heads = []
    for head in products:
        rows = []
        for i, logits in enumerate(head):
            seen = candidates if domain == "candidates" else tokens - window + i + 1
            rows.append(softmax(logits[:seen])[:candidates])
        of_heads.append(pooled(mean(rows), pooling, kernel))
    return mean(of_heads)
