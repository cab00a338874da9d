"""Attention over chosen pages against a loop over heads and tokens."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kvpolicy.kernels.page_attention import page_attention, tokens_of_pages


def tokens_by_loops(pages: torch.Tensor, page: int, length: int) -> list[list[int]]:
    return [[t for t in range(length) if row[t // page]] for row in pages.tolist()]


def attention_by_loops(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: list[int],
    read: list[list[int]],
    scaling: float,
) -> torch.Tensor:
    """fp64 ``[H_q, D_v]``; `read` has the tokens of each query head or of each KV head."""
    kv_heads, output = keys.shape[1], []
    for head, q in enumerate(query.double()):
        kv_head, tokens = head * kv_heads // len(query), read[head * len(read) // len(query)]
        logits = [float(q @ keys[slots[t], kv_head].double()) * scaling for t in tokens]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        mixed = sum(w * values[slots[t], kv_head].double() for w, t in zip(weights, tokens, strict=True))
        output.append(mixed / sum(weights))
    return torch.stack(output)


def random_pages(rng: random.Random, heads: int, length: int, page: int) -> torch.Tensor:
    """Of each head some pages, at least one; many heads equally many, the incomplete newest in some."""
    count = -(-length // page)
    pages = torch.zeros(heads, count, dtype=torch.bool)
    usual = rng.randint(1, count)
    for head in range(heads):
        pages[head, rng.sample(range(count), rng.choice([usual, usual, rng.randint(1, count)]))] = True
    return pages


@pytest.mark.parametrize("seed", range(100))
def test_exactly_the_tokens_of_the_chosen_pages_are_read_by_each_head(seed: int) -> None:
    rng = random.Random(seed)
    page, length = rng.choice([1, 3, 16, 64]), rng.choice([1, 2, 63, 64, 65, 100])
    pages = random_pages(rng, rng.choice([1, 4, 7]), length, page)
    read: dict[int, list[int]] = {}
    for heads, tokens in tokens_of_pages(pages, page, length):
        assert heads.dtype == tokens.dtype == torch.int64
        read |= dict(zip(heads.tolist(), tokens.tolist(), strict=True))
    assert [read[head] for head in range(len(pages))] == tokens_by_loops(pages, page, length)


def test_heads_that_read_equally_many_tokens_come_together() -> None:
    pages = torch.tensor([[True, False, True], [False, True, True], [True, True, False], [True, True, True]])
    groups = [(heads.tolist(), list(tokens.shape)) for heads, tokens in tokens_of_pages(pages, 4, 10)]
    assert groups == [([0, 1], [2, 6]), ([2], [1, 8]), ([3], [1, 10])]


def test_pages_that_do_not_fit_the_length_are_noticed() -> None:
    for length in (8, 13):
        with pytest.raises(AssertionError, match="for length"):
            tokens_of_pages(torch.ones(1, 3, dtype=torch.bool), 4, length)


@pytest.mark.parametrize("seed", range(60))
def test_attention_is_that_of_a_loop_over_the_tokens_read(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kv_heads, group, head_dim, value_dim = rng.choice([1, 2, 3]), rng.choice([1, 4, 7]), rng.choice([1, 16, 60]), 5
    page, length = rng.choice([1, 3, 16]), rng.choice([1, 17, 63, 64, 65])
    slots = torch.randperm(80, generator=generator)[:length]
    query = torch.randn(kv_heads * group, head_dim, generator=generator)
    keys = torch.randn(80, kv_heads, head_dim, generator=generator)
    values = torch.randn(80, kv_heads, value_dim, generator=generator)
    pages = random_pages(rng, kv_heads * rng.choice([1, group]), length, page)
    read = tokens_by_loops(pages, page, length)
    expected = attention_by_loops(query, keys, values, slots.tolist(), read, 0.3)
    unread = torch.ones(80, kv_heads, dtype=torch.bool)
    for choice, tokens in enumerate(read):
        unread[slots[tokens], choice * kv_heads // len(pages)] = False
    values[unread] = keys[unread] = torch.nan  # who reads anything else, or masks it away, gets this
    output, mean = page_attention(query, keys, values, slots, pages, page, 0.3)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    assert mean == pytest.approx(sum(map(len, read)) / len(read))


@pytest.mark.parametrize("per", ["query head", "KV head"])
def test_all_pages_are_full_attention(per: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, 32, generator=generator, dtype=torch.bfloat16)
    keys, values = (torch.randn(40, 2, 32, generator=generator, dtype=torch.bfloat16) for _ in "kv")
    slots = torch.randperm(40, generator=generator)[:33]
    pages = torch.ones(6 if per == "query head" else 2, 3, dtype=torch.bool)
    output, mean = page_attention(query, keys, values, slots, pages, 16, 32**-0.5)
    full = torch.nn.functional.scaled_dot_product_attention(
        query[:, None].float(),
        keys[slots].float().repeat_interleave(3, dim=1).transpose(0, 1),
        values[slots].float().repeat_interleave(3, dim=1).transpose(0, 1),
        scale=32**-0.5,
    )
    assert output.dtype == torch.bfloat16
    assert mean == 33
    torch.testing.assert_close(output.float(), full[:, 0], rtol=2e-2, atol=2e-2)
