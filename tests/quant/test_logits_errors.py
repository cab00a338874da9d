"""Errors of the next-token distribution against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy.quant.logits_errors import ROWS_AT_ONCE, logits_errors


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


def by_loops(
    reference: torch.Tensor, changed: torch.Tensor, targets: torch.Tensor
) -> tuple[float, float, float, float]:
    divergence, flips, deltas = [], 0, []
    for a, b, target in zip(reference.double().tolist(), changed.double().tolist(), targets.tolist(), strict=True):
        p, q = probabilities(a), probabilities(b)
        divergence.append(math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0))
        flips += a.index(max(a)) != b.index(max(b))
        deltas.append(math.log(p[target]) - math.log(q[target]))
    place = 0.99 * (len(divergence) - 1)
    low = math.floor(place)
    ordered = [*sorted(divergence), 0.0]
    p99 = ordered[low] + (place - low) * (ordered[low + 1] - ordered[low])
    count = len(divergence)
    return math.fsum(divergence) / count, p99, flips / count, math.fsum(deltas) / count


def random_logits(positions: int, tokens: int, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(positions)
    reference = 4 * torch.randn(positions, tokens, generator=generator)
    changed = reference + noise * torch.randn(positions, tokens, generator=generator)
    return reference, changed, torch.randint(tokens, (positions,), generator=generator)


@pytest.mark.parametrize("positions", [1, 2, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 150])
@pytest.mark.parametrize("tokens", [2, 50])
def test_all_four(positions: int, tokens: int) -> None:
    case = random_logits(positions, tokens)
    assert tuple(logits_errors(*case)) == pytest.approx(by_loops(*case), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_shorter_dtype_is_widened_first(dtype: torch.dtype) -> None:
    reference, changed, targets = random_logits(40, 30)
    short = reference.to(dtype), changed.to(dtype), targets
    assert tuple(logits_errors(*short)) == pytest.approx(by_loops(*short), rel=1e-9, abs=1e-12)


def test_a_small_divergence_is_not_lost_in_rounding() -> None:
    case = random_logits(20, 200, noise=1e-5)
    found = logits_errors(*case)
    assert 0 < found.kl_mean < 1e-9
    assert found.kl_mean == pytest.approx(by_loops(*case)[0], rel=1e-4)


def test_nothing_changed() -> None:
    reference, _, targets = random_logits(40, 30)
    assert logits_errors(reference, reference.clone(), targets) == (0, 0, 0, 0)
    shifted = logits_errors(reference.double(), reference.double() + 3, targets)
    assert tuple(shifted) == pytest.approx((0, 0, 0, 0), abs=1e-14)


def test_the_divergence_is_from_the_reference() -> None:
    sure, unsure = torch.tensor([[math.log(9), 0.0]]), torch.zeros(1, 2)
    forth, back = (logits_errors(*pair, torch.tensor([0])) for pair in ((sure, unsure), (unsure, sure)))
    assert forth.kl_mean == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert back.kl_mean == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5))
    assert forth.nll_delta == pytest.approx(math.log(1.8))
    assert back.nll_delta == pytest.approx(-math.log(1.8))


def test_likelihood_may_improve_while_the_distribution_moves_away() -> None:
    found = logits_errors(torch.zeros(1, 4), torch.tensor([[2.0, 0, 0, 0]]), torch.tensor([0]))
    assert found.kl_mean > 0.1
    assert found.nll_delta < -0.5


def test_a_token_of_no_probability_adds_nothing() -> None:
    reference, changed, _ = random_logits(6, 10)
    alone = logits_errors(reference[:, :7], changed[:, :7], torch.zeros(6))
    reference[:, 7:], changed[:, 7:] = -3e38, -1e38
    assert tuple(logits_errors(reference, changed, torch.zeros(6))) == pytest.approx(tuple(alone), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_no_logit_is_refused(which: int, bad: float) -> None:
    case = random_logits(40, 5)
    case[which][37, 2] = bad
    with pytest.raises(ValueError, match="must be finite numbers"):
        logits_errors(*case)


def test_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one position"):
        logits_errors(torch.zeros(0, 5), torch.zeros(0, 5), torch.zeros(0))


def test_shapes_that_differ_are_refused() -> None:
    reference, changed, targets = random_logits(3, 5)
    with pytest.raises(AssertionError, match="must be"):
        logits_errors(reference, changed[:2], targets)
    with pytest.raises(AssertionError, match="must be"):
        logits_errors(reference, changed, targets[:2])
