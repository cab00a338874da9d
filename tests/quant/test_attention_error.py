"""Error of attention's output against attention written by loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy.quant.attention_error import attention_error

Matrix = list[list[float]]


def by_loops(query: list[float], keys: Matrix, values: Matrix, scale: float) -> list[float]:
    logits = [scale * sum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [sum(w * v[d] for w, v in zip(weights, values, strict=True)) / sum(weights) for d in range(len(values[0]))]


def expected_errors(
    queries: torch.Tensor,
    exact: tuple[torch.Tensor, ...],
    restored: tuple[torch.Tensor, ...],
    *,
    causal: bool,
    scale: float,
) -> list[float]:
    query_heads, window, _ = queries.shape
    kv_heads, tokens, _ = exact[0].shape
    errors = []
    for head in range(query_heads):
        kv_head = head * kv_heads // query_heads
        noise = signal = 0.0
        for i, query in enumerate(queries[head].double().tolist()):
            seen = tokens - window + i + 1 if causal else tokens
            outputs = [
                by_loops(query, *(x[kv_head, :seen].double().tolist() for x in kv), scale) for kv in (exact, restored)
            ]
            noise += sum((b - a) ** 2 for a, b in zip(*outputs, strict=True))
            signal += sum(a**2 for a in outputs[0])
        errors.append(math.sqrt(noise / signal))
    return errors


def random_case(query_heads: int, kv_heads: int, window: int, tokens: int, head_dim: int) -> list[torch.Tensor]:
    """Queries, keys, values, restored keys, restored values."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    queries, keys, values = draw(query_heads, window, head_dim), *(draw(kv_heads, tokens, head_dim) for _ in range(2))
    return [2 * queries, keys, values, *(x + 0.1 * torch.randn(x.shape, generator=generator) for x in (keys, values))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("sizes", [(4, 2, 5, 12, 16), (3, 3, 1, 1, 8), (6, 2, 7, 7, 8), (8, 1, 1, 20, 16)], ids=str)
def test_each_query_head(sizes: tuple[int, int, int, int, int], causal: bool, scale: float | None) -> None:
    queries, *rows = random_case(*sizes)
    found = attention_error(queries, *rows, causal=causal, scale=scale)
    expected = expected_errors(
        queries, tuple(rows[:2]), tuple(rows[2:]), causal=causal, scale=scale or 1 / math.sqrt(sizes[-1])
    )
    assert found.dtype == torch.float32
    assert found.shape == (sizes[0],)
    assert found.tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_shorter_dtype_is_widened_first(dtype: torch.dtype) -> None:
    short = [x.to(dtype) for x in random_case(4, 2, 5, 12, 16)]
    assert torch.equal(attention_error(*short), attention_error(*(x.float() for x in short)))


def test_by_default_no_query_sees_a_later_token() -> None:
    queries, keys, values, *_ = random_case(2, 1, 3, 10, 8)
    changed = values.clone()
    changed[:, 8:] += 5  # what the first of the three queries, of token 7, does not see
    first = queries[:, :1]
    assert attention_error(torch.cat([first, queries[:, 1:] * 0], dim=1), keys, values, keys, changed).min() > 0
    shorter = attention_error(first, keys[:, :8], values[:, :8], keys[:, :8], changed[:, :8])
    assert shorter.tolist() == [0, 0]


def test_nothing_changed_is_no_error_even_of_nothing() -> None:
    queries, keys, values, *_ = random_case(4, 2, 3, 9, 8)
    assert attention_error(queries, keys, values, keys, values).tolist() == [0] * 4
    assert attention_error(queries, keys, 0 * values, keys, 0 * values).tolist() == [0] * 4
    assert attention_error(queries, keys, 0 * values, keys, values).tolist() == [math.inf] * 4


@pytest.mark.parametrize(
    ("sizes", "message"), [((3, 2, 1, 4, 8), "share 2 KV heads"), ((2, 2, 5, 4, 8), "5 queries of 4")]
)
def test_shapes_that_do_not_fit_are_refused(sizes: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        attention_error(*random_case(*sizes))
