"""What the wrapper of window attention adds: layers one by one, and refusals of what would shift or leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.kernels.window_attention import window_attention

ARM: dict[str, Any] = {"domain": "all", "group": "mean", "pooling": "avg", "kernel": 5}


def tensors(layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(layers)
    queries = torch.randn(layers, 6, 8, 80, generator=generator)
    return queries, torch.randn(layers, 2, 63, 80, generator=generator)


@pytest.mark.parametrize("domain", ["candidates", "all"])
def test_a_layer_is_scored_bit_for_bit_alike_among_any_others(domain: str) -> None:
    queries, keys = tensors(3)
    arm = {**ARM, "domain": domain}
    together = window_attention(queries, keys, 50, **arm)
    for layer in range(3):
        one = slice(layer, layer + 1)
        assert torch.equal(window_attention(queries[one], keys[one], 50, **arm)[0], together[layer])
    queries[[0, 2]], keys[[0, 2]] = torch.nan, torch.nan
    assert torch.equal(window_attention(queries, keys, 50, **arm)[1], together[1])


def test_a_head_is_scored_bit_for_bit_alike_beside_any_other() -> None:
    queries, keys = tensors(1)
    before = window_attention(queries, keys, 50, **ARM)
    queries[:, :3], keys[:, 0] = torch.nan, torch.nan
    assert torch.equal(window_attention(queries, keys, 50, **ARM)[0, 1], before[0, 1])


def test_no_layer_gives_no_score() -> None:
    assert window_attention(torch.zeros(0, 4, 3, 8), torch.zeros(0, 2, 9, 8), 6, **ARM).shape == (0, 2, 6)


@pytest.mark.parametrize(
    ("queries", "keys", "candidates", "sentence"),
    [
        pytest.param((2, 4, 3, 8), (1, 2, 9, 8), 6, "does not fit", id="keys of fewer layers"),
        pytest.param((1, 4, 3, 8), (1, 2, 9, 6), 6, "does not fit", id="keys of another head size"),
        pytest.param((1, 4, 3, 8), (1, 3, 9, 8), 6, "must be a multiple", id="a group that is no whole number"),
        pytest.param((1, 2, 3, 8), (1, 4, 9, 8), 6, "must be a multiple", id="fewer query heads than KV heads"),
        pytest.param((1, 4, 3, 8), (1, 2, 9, 8), 7, "must not reach into", id="a candidate in the window"),
        pytest.param((1, 4, 3, 8), (1, 2, 9, 8), -1, "must not reach into", id="a negative number"),
        pytest.param((1, 4, 10, 8), (1, 2, 9, 8), 0, "must not reach into", id="more queries than tokens"),
    ],
)
def test_shapes_that_do_not_fit_are_programming_errors(
    queries: tuple[int, ...], keys: tuple[int, ...], candidates: int, sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        window_attention(torch.zeros(queries), torch.zeros(keys), candidates, **ARM)


@pytest.mark.parametrize("kernel", [0, 2, 6])
@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
def test_an_even_kernel_is_a_programming_error(kernel: int, pooling: str) -> None:
    with pytest.raises(AssertionError, match="must be odd"):
        window_attention(*tensors(1), 50, **{**ARM, "kernel": kernel, "pooling": pooling})
