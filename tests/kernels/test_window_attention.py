"""Window attention against loops in fp64, worked examples, and the ends of its range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvpolicy.kernels.window_attention import window_attention, window_attention_reference
from tests.kernels.attention_by_loops import attention_by_loops

# Relative error of one score. Inputs of any dtype are widened exactly and all arithmetic is fp32, so it is the absolute
# error of a logit: at most 9 here, a sum of up to 128 products of 24 bits each. The worst that was seen is 1.2e-6.
TOLERANCE = 5e-6

Attention = Callable[..., torch.Tensor]
implementations = pytest.mark.parametrize("attention", [window_attention, window_attention_reference])
PLAIN = {"domain": "candidates", "group": "mean", "pooling": "none", "kernel": 1}
ARMS = [
    {"domain": domain, "group": group, "pooling": pooling, "kernel": kernel}
    for domain, group in itertools.product(["candidates", "all"], ["mean", "max"])
    for pooling, kernel in [("none", 1), *itertools.product(["avg", "max"], [1, 5, 7])]
]


@dataclass(frozen=True)
class Size:
    label: str
    layers: int
    heads: int
    group: int
    window: int
    tokens: int
    candidates: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.label

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys whose logits have a standard deviation of 2."""
        generator = torch.Generator().manual_seed(self.tokens)
        queries = torch.randn(self.layers, self.heads * self.group, self.window, self.head_dim, generator=generator)
        keys = torch.randn(self.layers, self.heads, self.tokens, self.head_dim, generator=generator)
        return queries.mul(2).to(self.dtype), keys.to(self.dtype)


SIZES = (
    Size("63 tokens", 2, 2, 2, window=8, tokens=63, candidates=55, head_dim=64),
    Size("one head without a group", 1, 1, 1, window=5, tokens=33, candidates=28, head_dim=80),
    Size("groups of seven", 1, 2, 7, window=3, tokens=20, candidates=17, head_dim=96),
    Size("bf16", 2, 1, 4, window=4, tokens=41, candidates=37, head_dim=128, dtype=torch.bfloat16),
    Size("window + 1 tokens", 1, 2, 2, window=16, tokens=17, candidates=1, head_dim=64),
    Size("no candidate", 2, 2, 2, window=4, tokens=9, candidates=0, head_dim=64),
    Size("no candidate beside the window", 1, 1, 2, window=4, tokens=4, candidates=0, head_dim=60),
    Size("one query", 1, 2, 3, window=1, tokens=30, candidates=29, head_dim=64),
    Size("tokens between candidates and window", 1, 2, 2, window=4, tokens=33, candidates=20, head_dim=64),
    Size("fewer candidates than the kernel", 1, 1, 2, window=2, tokens=6, candidates=2, head_dim=64),
)


def by_loops(queries: torch.Tensor, keys: torch.Tensor, candidates: int, **arm: Any) -> torch.Tensor:
    """fp64 ``[L, H_kv, candidates]``; query heads ``G h .. G h + G - 1`` belong to KV head ``h``."""
    layers, heads = keys.shape[:2]
    groups = [layer.chunk(heads) for layer in queries]
    rows = [
        [attention_by_loops(groups[layer][head], keys[layer, head], candidates, **arm) for head in range(heads)]
        for layer in range(layers)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(layers, heads, candidates)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: " ".join(map(str, arm.values())))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scores_equal_the_loops(size: Size, arm: dict[str, Any]) -> None:
    queries, keys = size.tensors()
    expected = by_loops(queries, keys, size.candidates, **arm)
    for attention in (window_attention, window_attention_reference):
        scores = attention(queries, keys, size.candidates, **arm)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), expected, rtol=TOLERANCE, atol=0)


@implementations
@pytest.mark.parametrize("domain", ["candidates", "all"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(attention: Attention, domain: str, temperature: float) -> None:
    size = SIZES[0]
    queries, keys = size.tensors()
    arm = {**PLAIN, "domain": domain, "temperature": temperature}
    scores = attention(queries, keys, size.candidates, **arm)
    expected = by_loops(queries, keys, size.candidates, **arm)
    torch.testing.assert_close(scores.double(), expected, rtol=2 * TOLERANCE, atol=0)  # logits twice as large


@implementations
def test_a_worked_example_of_the_causal_mask(attention: Attention) -> None:
    # Powers of the logits are 1, 2, 3. The first query sees tokens 0 and 1, the second sees all three.
    keys, queries = torch.tensor([1.0, 2.0, 3.0]).log().view(1, 1, 3, 1), torch.ones(1, 1, 2, 1)
    scores = attention(queries, keys, 1, **{**PLAIN, "domain": "all"})
    assert scores.item() == pytest.approx((1 / 3 + 1 / 6) / 2, rel=1e-6)
    assert attention(queries, keys, 1, **PLAIN).item() == 1


@implementations
def test_a_worked_example_of_pooling(attention: Attention) -> None:
    keys, queries = torch.tensor([1.0, 2.0, 4.0, 3.0, 9.0]).log().view(1, 1, 5, 1), torch.ones(1, 1, 1, 1)
    average = attention(queries, keys, 4, **{**PLAIN, "pooling": "avg", "kernel": 3})
    assert average.flatten().tolist() == pytest.approx([3 / 30, 7 / 30, 9 / 30, 7 / 30], rel=1e-6)
    largest = attention(queries, keys, 4, **{**PLAIN, "pooling": "max", "kernel": 3})
    assert largest.flatten().tolist() == pytest.approx([0.2, 0.4, 0.4, 0.4], rel=1e-6)


@implementations
def test_a_worked_example_of_a_group(attention: Attention) -> None:
    # Powers of the logits are 1, 4 for one query head and 1, 1/4 for the other.
    keys, queries = torch.tensor([1.0, 4.0, 1.0]).log().view(1, 1, 3, 1), torch.tensor([1.0, -1.0]).view(1, 2, 1, 1)
    assert attention(queries, keys, 2, **PLAIN).flatten().tolist() == pytest.approx([0.5, 0.5], rel=1e-6)
    largest = attention(queries, keys, 2, **{**PLAIN, "group": "max"})
    assert largest.flatten().tolist() == pytest.approx([0.2, 0.8], rel=1e-6)


@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("domain", ["candidates", "all"])
def test_very_large_logits_give_all_attention_to_one_token(
    attention: Attention, domain: str, dtype: torch.dtype
) -> None:
    # Logits are 2^28 / 8 for the token that a query points at and 0 for the others.
    keys = torch.eye(64)[:20].mul(2.0**14).to(dtype).view(1, 1, 20, 64)
    targets = [3, 3, 19, 19]  # the last token is later than the third query, which then sees only logits of 0
    queries = torch.eye(64)[targets].mul(2.0**14).to(dtype).view(1, 1, 4, 64)
    scores = attention(queries, keys, 16, **{**PLAIN, "domain": domain})[0, 0]
    alike = 1 / 16 + 1 / 16 if domain == "candidates" else 1 / 19
    expected = [((2 if token == 3 else 0) + alike) / 4 for token in range(16)]
    assert scores.tolist() == pytest.approx(expected, rel=1e-6)


@implementations
@pytest.mark.parametrize("domain", ["candidates", "all"])
def test_equal_keys_share_the_attention_equally(attention: Attention, domain: str) -> None:
    queries, keys = SIZES[0].tensors()
    keys = keys[:, :, :1].expand(-1, -1, 63, -1)
    scores = attention(queries, keys, 55, **{**PLAIN, "domain": domain})
    seen = [55] * 8 if domain == "candidates" else range(56, 64)
    share = math.fsum(1 / count for count in seen) / 8
    torch.testing.assert_close(scores, torch.full_like(scores, share), rtol=1e-6, atol=0)


@implementations
@pytest.mark.parametrize("arm", [PLAIN, {**PLAIN, "group": "max"}], ids=["mean", "max"])
def test_attention_over_the_candidates_alone_adds_up_to_one(attention: Attention, arm: dict[str, Any]) -> None:
    queries, keys = SIZES[3].tensors()
    torch.testing.assert_close(attention(queries, keys, 37, **arm).sum(-1), torch.ones(2, 1), rtol=1e-6, atol=0)


@implementations
def test_strides_do_not_matter_and_inputs_stay_as_they_are(attention: Attention) -> None:
    queries, keys = SIZES[0].tensors()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (queries, keys)]  # as the engine hands them over
    arm = {**PLAIN, "domain": "all", "group": "max"}
    scores = attention(*strided, 55, **arm)
    assert not any(x.is_contiguous() for x in strided)
    torch.testing.assert_close(scores, attention(queries, keys, 55, **arm), rtol=TOLERANCE, atol=0)
    assert torch.equal(strided[0], queries)
    assert torch.equal(strided[1], keys)
