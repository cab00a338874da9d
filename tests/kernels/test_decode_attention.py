"""Attention rows of the newest queries against loops in fp64, worked examples, and what each decode step saw."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from kvpolicy.kernels.decode_attention import decode_attention, decode_attention_reference
from tests.kernels.attention_by_loops import softmax

# Relative error of one entry: the absolute error of a logit of at most 9, a sum of up to 128 products, all in fp32.
TOLERANCE = 5e-6

Attention = Callable[[torch.Tensor, torch.Tensor, int], Iterator[torch.Tensor]]
implementations = pytest.mark.parametrize("attention", [decode_attention, decode_attention_reference])


@dataclass(frozen=True)
class Size:
    label: str
    layers: int
    heads: int
    group: int
    window: int
    newest: int
    tokens: int
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
    Size("63 tokens", 2, 2, 2, window=8, newest=8, tokens=63, head_dim=64),
    Size("fewer than the window", 2, 2, 2, window=8, newest=3, tokens=63, head_dim=60),
    Size("one head without a group", 1, 1, 1, window=5, newest=5, tokens=33, head_dim=80),
    Size("groups of seven", 1, 2, 7, window=3, newest=2, tokens=20, head_dim=96),
    Size("bf16", 2, 1, 4, window=4, newest=4, tokens=41, head_dim=128, dtype=torch.bfloat16),
    Size("a query for every token", 1, 2, 2, window=9, newest=9, tokens=9, head_dim=64),
    Size("one token", 1, 1, 2, window=1, newest=1, tokens=1, head_dim=60),
    Size("one query", 1, 2, 3, window=4, newest=1, tokens=30, head_dim=64),
    Size("no query", 2, 2, 3, window=4, newest=0, tokens=30, head_dim=64),
)
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def rows_of(attention: Attention, queries: torch.Tensor, keys: torch.Tensor, newest: int) -> torch.Tensor:
    return torch.stack(list(attention(queries, keys, newest)))


@implementations
@sizes
def test_rows_equal_loops_in_fp64(attention: Attention, size: Size) -> None:
    queries, keys = size.tensors()
    found = rows_of(attention, queries, keys, size.newest)
    assert found.shape == (size.layers, size.heads, size.group, size.newest, size.tokens)
    assert found.dtype == torch.float32
    for layer, head, member, i in torch.cartesian_prod(*map(torch.arange, found.shape[:4])).tolist():
        query = queries[layer, head * size.group + member, size.window - size.newest + i].double()
        logits = (keys[layer, head].double() @ query / math.sqrt(size.head_dim)).tolist()
        seen = size.tokens - size.newest + i + 1
        expected = torch.tensor([*softmax(logits[:seen]), *[0.0] * (size.tokens - seen)], dtype=torch.float64)
        torch.testing.assert_close(found[layer, head, member, i].double(), expected, rtol=TOLERANCE, atol=0)


@implementations
def test_a_worked_example_of_the_causal_mask(attention: Attention) -> None:
    # Powers of the logits are 1, 2, 3. The first query sees tokens 0 and 1, the second sees all three.
    keys, queries = torch.tensor([1.0, 2.0, 3.0]).log().view(1, 1, 3, 1), torch.ones(1, 1, 2, 1)
    (rows,) = attention(queries, keys, 2)
    assert rows.flatten().tolist() == pytest.approx([1 / 3, 2 / 3, 0, 1 / 6, 2 / 6, 3 / 6], rel=1e-6)


@implementations
def test_a_worked_example_of_groups(attention: Attention) -> None:
    # Powers of the logits: KV head 0 has 1 and 3, KV head 1 has 1 and 4; query heads 1 and 3 look the other way.
    keys = torch.tensor([[1.0, 3.0], [1.0, 4.0]]).log().view(1, 2, 2, 1)
    queries = torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, 4, 1, 1)
    (rows,) = attention(queries, keys, 1)
    expected = [0.25, 0.75, 0.75, 0.25, 0.2, 0.8, 0.8, 0.2]
    assert rows.flatten().tolist() == pytest.approx(expected, rel=1e-6)


@implementations
def test_rows_of_many_queries_are_those_that_each_step_saw(attention: Attention) -> None:
    size = SIZES[0]
    queries, keys = size.tensors()
    together = rows_of(attention, queries, keys, 8)
    for i in range(8):
        seen = 63 - 8 + i + 1
        step = rows_of(attention, queries[:, :, : i + 1], keys[:, :, :seen], 1)
        torch.testing.assert_close(together[..., i, :seen], step[..., 0, :], rtol=TOLERANCE, atol=0)
        assert together[..., i, seen:].eq(0).all()


@implementations
def test_older_queries_and_later_keys_are_not_read(attention: Attention) -> None:
    queries, keys = SIZES[1].tensors()
    before = rows_of(attention, queries, keys, 3)
    queries[:, :, :5] = torch.nan
    assert torch.equal(rows_of(attention, queries, keys, 3), before)
    keys[:, :, -1] = 1e4
    assert torch.equal(rows_of(attention, queries, keys, 3)[..., :2, :], before[..., :2, :])


@implementations
def test_very_large_logits_give_all_attention_to_one_token(attention: Attention) -> None:
    keys = torch.eye(64)[:20].mul(2.0**14).view(1, 1, 20, 64)
    queries = keys[:, :, [3, 19, 19]]  # token 19 is later than the second query, which then sees only logits of 0
    (rows,) = attention(queries, keys, 3)
    assert rows[0, 0, 0].tolist() == [float(token == 3) for token in range(20)]
    assert rows[0, 0, 1].tolist() == pytest.approx([1 / 19] * 19 + [0], rel=1e-6)
    assert rows[0, 0, 2].tolist() == [float(token == 19) for token in range(20)]


def test_layers_come_one_at_a_time_and_do_not_depend_on_each_other() -> None:
    queries, keys = SIZES[0].tensors()
    alone = next(decode_attention(queries[1:], keys[1:], 8))
    layers = decode_attention(queries, keys, 8)
    assert inspect.isgenerator(layers)
    queries[0], keys[0] = torch.nan, torch.nan  # before the first layer is computed
    assert next(layers).isnan().any()
    assert torch.equal(next(layers), alone)
    assert next(layers, None) is None


def test_a_head_is_read_bit_for_bit_alike_beside_any_other() -> None:
    queries, keys = SIZES[0].tensors()
    before = rows_of(decode_attention, queries, keys, 8)
    queries[:, :2], keys[:, 0] = torch.nan, torch.nan
    assert torch.equal(rows_of(decode_attention, queries, keys, 8)[:, 1], before[:, 1])


@implementations
def test_strides_do_not_matter_and_inputs_stay_as_they_are(attention: Attention) -> None:
    queries, keys = SIZES[0].tensors()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (queries, keys)]  # as the engine hands them over
    found = rows_of(attention, *strided, 8)
    torch.testing.assert_close(found, rows_of(attention, queries, keys, 8), rtol=TOLERANCE, atol=0)
    assert torch.equal(strided[0], queries)
    assert torch.equal(strided[1], keys)


@pytest.mark.parametrize(
    ("queries", "keys", "newest", "sentence"),
    [
        pytest.param((2, 4, 3, 8), (1, 2, 9, 8), 3, "does not fit", id="keys of fewer layers"),
        pytest.param((1, 4, 3, 8), (1, 2, 9, 6), 3, "does not fit", id="keys of another head size"),
        pytest.param((1, 4, 3, 8), (1, 3, 9, 8), 3, "must be a multiple", id="a group that is no whole number"),
        pytest.param((1, 4, 3, 8), (1, 2, 9, 8), 4, "must be at most", id="more than there are queries"),
        pytest.param((1, 4, 3, 8), (1, 2, 2, 8), 3, "must be at most", id="more than there are tokens"),
        pytest.param((1, 4, 3, 8), (1, 2, 9, 8), -1, "must be at most", id="a negative number"),
    ],
)
def test_shapes_that_do_not_fit_are_programming_errors(
    queries: tuple[int, ...], keys: tuple[int, ...], newest: int, sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        decode_attention(torch.zeros(queries), torch.zeros(keys), newest)
