"""KeyDiff: a worked example, and what its score does and does not depend on."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.keydiff import KeyDiff
from tests.policies.candidates import random_candidates

NOISE = Noise(0, 0, (0,))


def of_keys(rows: list[list[float]]) -> Candidates:
    return Candidates((1, 1, len(rows)), torch.tensor(rows)[None, None])


def test_a_worked_example() -> None:
    # Unit keys e1, e2, e2; their mean is (1, 2) / 3, of norm sqrt(5) / 3.
    scores = KeyDiff().scores(of_keys([[2.0, 0.0], [0.0, 3.0], [0.0, 0.5]]), NOISE)
    assert scores.flatten().tolist() == pytest.approx([-1 / math.sqrt(5)] + [-2 / math.sqrt(5)] * 2)


def test_scores_are_those_of_the_formula() -> None:
    candidates = random_candidates(2, 3, 33, 60, dtype=torch.bfloat16)
    scores = KeyDiff().scores(candidates, Noise(0, 0, (0, 1)))
    assert scores.dtype == torch.float32
    for layer in range(2):
        for head in range(3):
            keys = [key.tolist() for key in candidates.require("keys")[layer, head].double()]
            units = [[x / math.hypot(*key) for x in key] for key in keys]
            anchor = [math.fsum(column) / len(units) for column in zip(*units, strict=True)]
            cosines = [math.fsum(map(float.__mul__, unit, anchor)) / math.hypot(*anchor) for unit in units]
            assert scores[layer, head].tolist() == pytest.approx([-x for x in cosines], abs=2e-6)


def test_the_odd_key_out_is_kept() -> None:
    rows = [[1.0, 0.1 * i, 0.0] for i in range(6)]
    rows[2] = [0.0, 0.0, 1.0]
    assert KeyDiff(sinks=0, recent=0).select(of_keys(rows), 1, 16, NOISE).flatten().tolist() == [2]


def test_only_directions_count() -> None:
    candidates = random_candidates(1, 2, 33, 64)
    longer = Candidates(candidates.shape, candidates.require("keys") * torch.logspace(-3, 3, 33)[:, None])
    torch.testing.assert_close(KeyDiff().scores(longer, NOISE), KeyDiff().scores(candidates, NOISE), rtol=0, atol=2e-6)


def test_the_anchor_is_of_all_resident_tokens_and_of_one_head() -> None:
    before, after = random_candidates(1, 2, 33, 64), random_candidates(1, 2, 33, 64)
    after.require("keys")[0, 0, -1] *= -1  # a recent token
    changed = KeyDiff().scores(after, NOISE) != KeyDiff().scores(before, NOISE)
    assert changed[0, 0].all()
    assert not changed[0, 1].any()


def test_a_key_of_zeros_resembles_nothing() -> None:
    scores = KeyDiff().scores(of_keys([[0.0, 0.0], [0.0, 3.0]]), NOISE)
    assert scores.flatten().tolist() == pytest.approx([0, -1])
    assert KeyDiff().scores(of_keys([[0.0, 0.0]] * 2), NOISE).flatten().tolist() == [0, 0]


def test_sinks_and_recent_tokens_are_protected_unless_asked_otherwise() -> None:
    keys = torch.eye(8)[[0] * 6 + [1, 2, 3, 0, 0]].tolist()  # the average key is nearest to e0
    assert KeyDiff(sinks=1, recent=2).select(of_keys(keys), 5, 16, NOISE).flatten().tolist() == [0, 6, 7, 9, 10]
    assert KeyDiff(sinks=0, recent=0).select(of_keys(keys), 3, 16, NOISE).flatten().tolist() == [6, 7, 8]
    assert KeyDiff().forced(16) == 4 + 16
    assert KeyDiff().needs(16) == Needs(keys=True)
