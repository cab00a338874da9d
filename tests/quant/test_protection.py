"""One operation, two uses: VaSE's reserve and the tokens that low-bit storage leaves at 16 bits."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels import value_range as kernel
from kvpolicy.policies import value_spread
from kvpolicy.policies.vase_attnv import VaseAttnV
from kvpolicy.quant import protection
from kvpolicy.quant.protection import protected_tokens
from tests.policies.candidates import random_candidates
from tests.policies.matrix import noise_of


def by_loops(values: torch.Tensor, count: int) -> list[list[int]]:
    """Per row of ``[R, N, D]``."""
    chosen = []
    for row in values.double().tolist():
        spread = [max(token) - min(token) for token in row]
        order = sorted(range(len(row)), key=lambda token, spread=spread: (-spread[token], token))
        chosen.append(sorted(order[:count]))
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 60), (63, 64), (111, 80), (50, 96), (17, 128)])
def test_the_tokens_of_largest_range_are_protected(tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    values = random_candidates(2, 3, tokens, head_dim, dtype=dtype).require("values")
    for count in {0, 1, tokens // 3, tokens}:
        assert protected_tokens(values, count).flatten(0, 1).tolist() == by_loops(values.flatten(0, 1), count)


def test_of_equal_ranges_the_older_token_is_protected() -> None:
    assert protected_tokens(torch.tensor([[0.0, 1], [0, 2], [5, 7], [1, 2]]), 1).tolist() == [1]


def test_eviction_and_quantization_protect_the_same_tokens() -> None:
    """Sinks are VaSE's own; without them its reserve is what the quantizer protects."""
    candidates = random_candidates(2, 3, 90, 64, queries=16)
    values = candidates.require("values")[:, :, :74]
    reserve = VaseAttnV(sinks=0, recent=16)._most_spread(candidates, 74, 20, noise_of(2))
    assert torch.equal(reserve, protected_tokens(values, 20))


def test_both_call_the_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value_spread.value_range is protection.value_range is kernel.value_range
    calls = []

    def newest_widest(values: torch.Tensor) -> torch.Tensor:
        calls.append(values.shape)
        return torch.arange(values.shape[-2]).float().expand(values.shape[:-1])

    monkeypatch.setattr(value_spread, "value_range", newest_widest)
    monkeypatch.setattr(protection, "value_range", newest_widest)
    candidates = random_candidates(1, 2, 30, 8, queries=4)
    values = candidates.require("values")[:, :, :26]
    assert protected_tokens(values, 3).tolist() == [[[23, 24, 25]] * 2]
    reserve = VaseAttnV(sinks=0, recent=4)._most_spread(candidates, 26, 3, noise_of(1))
    assert reserve.tolist() == [[[23, 24, 25]] * 2]
    assert calls == [(1, 2, 26, 8)] * 2
