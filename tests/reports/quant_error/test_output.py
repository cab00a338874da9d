"""Errors of the output, position by position, and what a text can show of a difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpolicy.quant.logits_errors import logits_errors
from kvpolicy.reports.quant_error.capture import QuantErrorError
from kvpolicy.reports.quant_error.output import BLOCK, OutputErrors, kl_difference, output_errors

TOKENS, VOCABULARY = 70, 30


def logits(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def errors(kl: np.ndarray[tuple[int], np.dtype[np.float64]]) -> OutputErrors:
    return OutputErrors(kl, np.zeros_like(kl), np.zeros_like(kl))


def test_each_position_is_compared_by_its_own_next_token() -> None:
    reference, changed = logits(0), logits(0) + 0.3 * logits(1)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()
    seen: list[None] = []
    found = output_errors(reference, changed, ids, lambda: seen.append(None))
    assert len(found.kl) == len(seen) == TOKENS - 1
    for t in range(TOKENS - 1):
        p, q = (x[t].double().softmax(dim=0).numpy() for x in (reference, changed))
        assert found.kl[t] == pytest.approx((p * np.log(p / q)).sum())
        assert found.nll_delta[t] == pytest.approx(np.log(p[ids[t + 1]] / q[ids[t + 1]]))
        assert found.flips[t] == (p.argmax() != q.argmax())
    assert 0 < found.flips.sum() < TOKENS - 1


def test_the_summary_is_that_of_all_positions_at_once() -> None:
    reference, changed = logits(0), logits(0) + 0.3 * logits(1)
    ids = list(range(25)) * 3
    ids = ids[:TOKENS]
    expected = logits_errors(reference[:-1], changed[:-1], torch.tensor(ids[1:]))
    assert output_errors(reference, changed, ids).summary() == pytest.approx(expected)


def test_equal_logits_have_no_error() -> None:
    found = output_errors(logits(0), logits(0), [1] * TOKENS)
    assert (found.kl.max(), found.flips.max(), found.nll_delta.max()) == (0, 0, 0)


def test_logits_that_are_no_numbers_are_refused() -> None:
    broken = logits(0)
    broken[3, 4] = torch.nan
    with pytest.raises(QuantErrorError, match="logits must be finite"):
        output_errors(logits(0), broken, [1] * TOKENS)


def test_the_interval_of_a_constant_difference_is_that_difference() -> None:
    kl = np.random.default_rng(1).exponential(size=200)
    low, high = kl_difference(errors(kl + 0.25), errors(kl))
    assert (low, high) == (pytest.approx(0.25), pytest.approx(0.25))


def test_the_interval_covers_the_mean_and_narrows_with_the_text() -> None:
    widths = []
    for length in (4 * BLOCK, 64 * BLOCK):
        difference = np.random.default_rng(2).normal(0.1, 1, length)
        low, high = kl_difference(errors(difference), errors(np.zeros(length)))
        assert low < difference.mean() < high
        widths.append(high - low)
    # 16 times the text, a quarter of the width; independent numbers give 2 * 1.96 / sqrt(n)
    assert widths[1] == pytest.approx(2 * 1.96 / np.sqrt(64 * BLOCK), rel=0.25)
    assert widths[1] < widths[0] / 2


def test_neighbours_that_are_alike_count_as_one() -> None:
    blocks = np.repeat(np.random.default_rng(3).normal(size=40), BLOCK)
    low, high = kl_difference(errors(blocks), errors(np.zeros_like(blocks)))
    assert high - low == pytest.approx(2 * 1.96 * blocks.std() / np.sqrt(40), rel=0.25)


def test_a_short_last_block_counts_by_its_length() -> None:
    kl = np.concatenate([np.zeros(3 * BLOCK), [100.0]])
    low, high = kl_difference(errors(kl), errors(np.zeros_like(kl)))
    # Drawn three times of four in 5% of the samples, four times in 0.4%: 300 in 32 + 3 positions; 75 if it were whole.
    assert low == 0
    assert high == pytest.approx(300 / (BLOCK + 3))
