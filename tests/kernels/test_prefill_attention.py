"""Causal attention of new tokens on a CPU against loops over tokens and heads."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels import prefill_attention as module
from kvpolicy.kernels.prefill_attention import causal_mask, prefill_attention, prefill_attention_reference
from tests.kernels.cpu_attention_by_loops import assert_near, attention_by_loops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# New tokens and those before them; blocks are of 8.
LENGTHS = [(1, 0), (1, 62), (7, 0), (8, 0), (8, 3), (9, 0), (17, 11), (24, 39), (63, 0)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)


def draw(
    new: int, before: int, heads: int, group: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(new)
    shapes = (new, heads * group, head_dim), (before + new, heads, head_dim), (before + new, heads, value_dim)
    queries, keys, values = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return queries, keys, values


def check(output: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    before = len(keys) - len(queries)
    for token, (query, own) in enumerate(zip(queries, output, strict=True)):
        seen = before + token + 1
        assert_near(own, *attention_by_loops(query, keys[:seen], values[:seen], 0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("new", "before"), LENGTHS)
def test_each_new_token_attends_to_all_up_to_its_own(new: int, before: int, dtype: torch.dtype) -> None:
    tensors = draw(new, before, 2, 3, 20, 20, dtype)
    output = prefill_attention(*tensors, causal_mask(before + new, dtype), 0.3)
    assert output.dtype == dtype
    check(output, *tensors)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("head_dim", [60, 64, 80, 96, 128])
def test_any_head_size_and_group(group: int, head_dim: int) -> None:
    tensors = draw(11, 6, 2, group, head_dim, head_dim, torch.float32)
    check(prefill_attention(*tensors, causal_mask(17, torch.float32), 0.3), *tensors)


def test_values_may_be_of_another_width() -> None:
    tensors = draw(11, 6, 2, 3, 20, 5, torch.float32)
    output = prefill_attention(*tensors, causal_mask(17, torch.float32), 0.3)
    assert output.shape == (11, 6, 5)
    check(output, *tensors)


def test_a_mask_for_more_tokens_says_the_same() -> None:
    tensors = draw(11, 6, 2, 3, 20, 20, torch.float32)
    output = prefill_attention(*tensors, causal_mask(17, torch.float32), 0.3)
    for tokens in (18, 25, 200):
        assert torch.equal(prefill_attention(*tensors, causal_mask(tokens, torch.float32), 0.3), output)


def test_the_mask_is_small_beside_a_square() -> None:
    assert causal_mask(1000, torch.bfloat16).shape == (8, 1000)


def test_the_reference_is_the_formula() -> None:
    tensors = draw(11, 6, 2, 3, 20, 5, torch.bfloat16)
    check(prefill_attention_reference(*tensors, 0.3), *tensors)


@pytest.mark.parametrize(
    ("new", "before", "mask", "heads", "sentence"),
    [
        (5, -1, causal_mask(9, torch.float32), 6, "5 new tokens of 4"),
        (5, 9, causal_mask(13, torch.float32), 6, "for 14 tokens"),
        (5, 9, causal_mask(14, torch.bfloat16), 6, "must be torch.float32"),
        (5, 9, causal_mask(14, torch.float32), 5, "must be a multiple"),
    ],
    ids=["more new tokens than tokens", "short mask", "mask of another dtype", "group"],
)
def test_what_does_not_fit_is_noticed(new: int, before: int, mask: torch.Tensor, heads: int, sentence: str) -> None:
    keys = torch.zeros(before + new, 2, 20)
    with pytest.raises(AssertionError, match=sentence):
        prefill_attention(torch.zeros(new, heads, 20), keys, keys, mask, 0.3)
