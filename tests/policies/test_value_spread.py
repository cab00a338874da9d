"""The measures of a value vector's spread against their definitions, one token at a time in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from kvpolicy.policies.value_spread import Measure, value_spread


def variance(vector: list[float]) -> float:
    mean = math.fsum(vector) / len(vector)
    return math.fsum((x - mean) ** 2 for x in vector) / len(vector)


BY_DEFINITION: dict[Measure, Callable[[list[float]], float]] = {
    "range": lambda vector: max(vector) - min(vector),
    "variance": variance,
    "l2": lambda vector: math.sqrt(math.fsum(x * x for x in vector)),
}
measures = pytest.mark.parametrize("measure", BY_DEFINITION)


def spread_by_loops(values: torch.Tensor, measure: Measure) -> list[float]:
    """``[N, D]`` to N numbers."""
    return [BY_DEFINITION[measure](vector) for vector in values.tolist()]


def test_every_measure_is_defined_here() -> None:
    assert set(BY_DEFINITION) == set(get_args(Measure))


@measures
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [1, 60, 64, 80, 96, 128])
def test_spreads_are_those_of_the_definition(measure: Measure, head_dim: int, dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 33, head_dim, generator=torch.Generator().manual_seed(head_dim)).to(dtype)
    untouched = values.clone()
    spreads = value_spread(values, measure)
    assert spreads.dtype == torch.float32
    expected = torch.tensor(spread_by_loops(values.flatten(0, 2), measure), dtype=torch.float64).view(2, 3, 33)
    # Sums of up to 128 squares in fp32, each rounded to 2^-24; inputs are widened exactly.
    torch.testing.assert_close(spreads.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(values, untouched)


@pytest.mark.parametrize(("measure", "expected"), [("range", 6.0), ("variance", 5.0), ("l2", 6.0)])
def test_a_worked_example(measure: Measure, expected: float) -> None:
    # Mean 2, squared deviations 9, 1, 1, 9; squares 1, 1, 9, 25.
    assert value_spread(torch.tensor([-1.0, 1.0, 3.0, 5.0]), measure).item() == pytest.approx(expected)


@measures
def test_fp16_values_do_not_overflow(measure: Measure) -> None:
    values = torch.tensor([[-60000.0, 60000.0]], dtype=torch.float16)
    widened = value_spread(values.double().float(), measure)
    assert widened.isfinite().all()
    assert torch.equal(value_spread(values, measure), widened)
