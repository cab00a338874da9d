"""Attention by its formula, one head after the other, and how far from it an implementation may be."""

from __future__ import annotations

import torch

from tests.kernels.tolerance import RELATIVE


def attention_by_loops(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 ``[H_q, D_v]`` of one query ``[H_q, D]`` over ``[N, H_kv, D]`` and ``[N, H_kv, D_v]``.

    And the same of the absolute values, which says how large the terms were.
    """
    output, sizes = [], []
    for head, q in enumerate(query.double()):
        kv_head = head * keys.shape[1] // len(query)
        logits = torch.stack([(key[kv_head].double() * q).sum() * scaling for key in keys])
        weights = (logits - logits.max()).exp()
        weights /= weights.sum()
        output.append(sum(weight * value[kv_head].double() for weight, value in zip(weights, values, strict=True)))
        sizes.append(sum(weight * value[kv_head].double().abs() for weight, value in zip(weights, values, strict=True)))
    return torch.stack(output), torch.stack(sizes)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> None:
    """Weights and output may be rounded to the dtype of `actual`: an error relative to the mean of absolute values."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} must be {tuple(expected.shape)}"
    error = (actual.double() - expected).abs() / sizes
    assert bool((error <= RELATIVE[actual.dtype]).all()), f"{error.max() = }"
