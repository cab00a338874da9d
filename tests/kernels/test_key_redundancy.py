"""Redundancy of keys against all N * N cosines in fp64, worked examples, and how little of them is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpolicy.kernels import key_redundancy as module
from kvpolicy.kernels.key_redundancy import key_redundancy, key_redundancy_reference
from tests.kernels.redundancy_by_loops import redundancy_by_loops

# Error of a mean of cosines. Inputs of any dtype are widened exactly, sums are fp32; the worst that was seen is 1e-7.
TOLERANCE = 1e-6

Redundancy = Callable[..., torch.Tensor]
implementations = pytest.mark.parametrize("redundancy", [key_redundancy, key_redundancy_reference])


@dataclass(frozen=True)
class Size:
    """`alike` is the share of a key that it has in common with the others of its kind; head 0 has none."""

    label: str
    layers: int
    heads: int
    tokens: int
    head_dim: int
    alike: float
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.label

    def keys(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.tokens)
        shape = (self.layers, self.heads, self.tokens)
        kinds = torch.randn(4, self.head_dim, generator=generator)[torch.randint(4, shape, generator=generator)]
        common = torch.full(shape, self.alike)
        common[:, 0] = 0
        keys = common[..., None] * kinds + torch.randn(*shape, self.head_dim, generator=generator)
        norms = torch.randn(*shape, 1, generator=generator).exp()
        return (keys * norms).to(self.dtype)


SIZES = (
    Size("63 tokens", 2, 3, 63, 64, alike=2),
    Size("heads that differ", 1, 4, 111, 80, alike=1),
    Size("one token", 2, 2, 1, 60, alike=1),
    Size("two tokens of one head", 1, 1, 2, 64, alike=0),
    Size("bf16", 1, 3, 65, 96, alike=1.5, dtype=torch.bfloat16),
    Size("fp16", 2, 2, 50, 128, alike=3, dtype=torch.float16),
)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how many numbers the largest tensor has, and how many all products of matrices have together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
            self.products += result.numel() * (func is torch.ops.aten.bmm.default)
        return result


@pytest.mark.parametrize("similarities", [1, 300, 2**23], ids=["a column at a time", "a few columns", "all columns"])
@pytest.mark.parametrize("threshold", [None, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_means_equal_the_loops(
    size: Size, threshold: float | None, similarities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SIMILARITIES", similarities)
    keys = size.keys()
    expected = torch.tensor(
        [[redundancy_by_loops(head, threshold) for head in layer] for layer in keys], dtype=torch.float64
    )
    for redundancy in (key_redundancy, key_redundancy_reference):
        means = redundancy(keys, threshold=threshold)
        assert means.dtype == torch.float32
        torch.testing.assert_close(means.double(), expected, rtol=0, atol=TOLERANCE)


@implementations
@pytest.mark.parametrize(
    ("threshold", "sums"),
    [
        pytest.param(None, [1.8, 2.2, 0.6, 1.8], id="all count"),
        # Of rows 0 and 1 column 3 is not counted, of rows 2 and 3 column 1.
        pytest.param(0.5, [1.8, 0.8, 0.6, 0.0], id="similar above 0.5"),
        # Row 2 has no similar key: column 0, where it has a 0 anyway.
        pytest.param(0.7, [1.8, 1.4, 0.6, 0.0], id="similar above 0.7"),
        # Rows 1 and 2 have none; rows 0 and 3 have each other.
        pytest.param(0.9, [0.0, 2.2, 0.6, 0.8], id="similar above 0.9"),
    ],
)
def test_a_worked_example(redundancy: Redundancy, threshold: float | None, sums: list[float]) -> None:
    # Cosines: 0.8 of keys 0 and 1, 1 of 0 and 3, 0.6 of 1 and 2, 0.8 of 1 and 3, else 0.
    keys = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 5.0], [2.0, 0.0]])[None, None]
    assert redundancy(keys, threshold=threshold).flatten().tolist() == pytest.approx([x / 4 for x in sums], abs=1e-6)


@implementations
def test_where_nothing_is_similar_the_oldest_key_is_not_counted(redundancy: Redundancy) -> None:
    # Cosines: 0.4 of keys 0 and 1, 0.28 of 0 and 2, negative of 1 and 2.
    keys = torch.tensor([[1.0, 0.0], [0.4, math.sqrt(0.84)], [0.28, -0.96]])[None, None]
    opposite = 0.4 * 0.28 - math.sqrt(0.84) * 0.96
    expected = [0.0, (0.4 + opposite) / 3, (0.28 + opposite) / 3]
    assert redundancy(keys, threshold=0.5).flatten().tolist() == pytest.approx(expected, abs=1e-6)


@implementations
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_a_key_of_zeros_is_similar_to_none(redundancy: Redundancy, threshold: float | None) -> None:
    keys = SIZES[0].keys()[:1, :1]
    keys[:, :, 20] = 0
    expected = redundancy_by_loops(keys[0, 0], threshold)
    assert expected[20] == 0
    assert redundancy(keys, threshold=threshold).flatten().tolist() == pytest.approx(expected, abs=TOLERANCE)


@implementations
def test_norms_do_not_overflow_the_cache_dtype(redundancy: Redundancy) -> None:
    keys = torch.full((1, 1, 3, 64), 300.0, dtype=torch.float16)  # 64 * 300^2 is beyond fp16
    assert redundancy(keys).flatten().tolist() == pytest.approx([2 / 3] * 3)
    # Rows 0 and 1 do not count key 2, row 2 does not count key 1.
    assert redundancy(keys, threshold=0.5).flatten().tolist() == pytest.approx([2 / 3, 1 / 3, 0], abs=TOLERANCE)


@implementations
def test_strides_do_not_matter_and_keys_stay_as_they_are(redundancy: Redundancy) -> None:
    keys = SIZES[0].keys()
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as the engine hands them over
    means = redundancy(strided, threshold=0.5)
    assert not strided.is_contiguous()
    torch.testing.assert_close(means, redundancy(keys, threshold=0.5), rtol=0, atol=TOLERANCE)
    assert torch.equal(strided, keys)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_not_all_cosines_exist_at_once(threshold: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIMILARITIES", 2**13)
    keys = torch.randn(2, 2, 600, 8, generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        key_redundancy(keys, threshold=threshold)
    assert largest.numbers <= max(keys.numel(), 2**13)


def test_a_row_is_looked_at_until_its_newest_similar_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIMILARITIES", 600 * 8)
    keys = torch.ones(1, 1, 600, 8)
    with Largest() as alike:
        key_redundancy(keys, threshold=0.5)
    assert alike.products == 600 + 600 * 8  # the sums, and one block of columns
    keys[:, :, 10] = torch.tensor([1.0, -1.0] * 4)  # at right angles to the others
    with Largest() as but_one:
        key_redundancy(keys, threshold=0.5)
    assert but_one.products == 600 + 600 * 8 + 592  # that row against the other columns


@pytest.mark.parametrize(
    ("shape", "threshold", "message"),
    [
        pytest.param((2, 5, 8), None, "shape", id="no layer axis"),
        pytest.param((1, 2, 5, 8), -0.1, "threshold = -0.1", id="a threshold below 0"),
    ],
)
def test_arguments_that_do_not_fit_are_programming_errors(
    shape: tuple[int, ...], threshold: float | None, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        key_redundancy(torch.zeros(shape), threshold=threshold)
