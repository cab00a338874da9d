"""Exact probabilities of drawing without replacement, and bounds that observed frequencies must keep.

Every bound is exceeded by a correct sampler with a probability of at most one in a million. The tests draw from keyed
noise, so a test that passed once passes always.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

FALSE_ALARM = 1e-6
# Two-sided normal deviate of FALSE_ALARM shared by up to 26 items: 2 * (1 - Phi(5.5)) = 3.8e-8.
DEVIATIONS = 5.5


def chi_square_bound(degrees: int) -> float:
    """What a chi-square variable exceeds with probability FALSE_ALARM at most (Laurent and Massart 2000, lemma 1)."""
    x = -math.log(FALSE_ALARM)
    return degrees + 2 * math.sqrt(degrees * x) + 2 * x


def check_counts(counts: torch.Tensor, probabilities: Sequence[float], label: str = "") -> None:
    """Assert that ``[K]`` counts are those of independent draws with these probabilities (Pearson's chi-square)."""
    expected = torch.tensor(probabilities, dtype=torch.float64) * int(counts.sum())
    possible = expected > 0
    assert not counts[~possible].any(), f"{label}: impossible outcomes were drawn: {counts[~possible].tolist()}"
    assert expected[possible].min() >= 10, f"{label}: too few draws for the chi-square distribution to hold"
    statistic = float(((counts - expected).square() / expected)[possible].sum())
    bound = chi_square_bound(int(possible.sum()) - 1)
    assert statistic <= bound, f"{label}: chi-square {statistic:.1f} is above {bound:.1f}"


def check_same_distribution(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that two ``[K]`` counts of equally many draws come from one distribution (chi-square of homogeneity)."""
    assert int(a.sum()) == int(b.sum())
    seen = a + b > 0
    statistic = float(((a - b).double().square() / (a + b))[seen].sum())
    assert statistic <= chi_square_bound(int(seen.sum()) - 1)


def check_inclusions(counts: torch.Tensor, rounds: int, probabilities: Sequence[float]) -> None:
    """Assert that each item was drawn in as many of `rounds` independent rounds as its probability lets expect."""
    assert counts.shape == (len(probabilities),)
    for item, (count, p) in enumerate(zip(counts.tolist(), probabilities, strict=True)):
        bound = DEVIATIONS * math.sqrt(rounds * p * (1 - p))
        assert abs(count - rounds * p) <= bound, f"{item = } was drawn {count} times, expected {rounds * p:.0f}"


def sequences(weights: Sequence[float], draws: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every order in which `draws` items can be drawn one after the other, with its probability."""
    if draws == 0:
        yield (), 1.0
        return
    for first, p in sequences(weights, draws - 1):
        left = [i for i in range(len(weights)) if i not in first]
        total = sum(weights[i] for i in left)
        for i in left:
            yield (*first, i), p * weights[i] / total


def inclusion_probabilities(weights: Sequence[float], draws: int) -> list[float]:
    """Probability of each item to be among `draws` items that are drawn one after the other."""
    found = [0.0] * len(weights)
    for order, p in sequences(weights, draws):
        for item in order:
            found[item] += p
    return found


def count_sequences(drawn: torch.Tensor, items: int) -> torch.Tensor:
    """How often each row of ``[rounds, draws]`` occurs, ``[items ** draws]``, first draw most significant."""
    powers = items ** torch.arange(drawn.shape[1] - 1, -1, -1)
    return torch.bincount((drawn * powers).sum(-1), minlength=items ** drawn.shape[1])


def sequence_probabilities(weights: Sequence[float], draws: int) -> list[float]:
    """The probabilities in the order of :func:`count_sequences`."""
    items = len(weights)
    found = [0.0] * items**draws
    for order, p in sequences(weights, draws):
        found[sum(item * items ** (draws - 1 - place) for place, item in enumerate(order))] = p
    return found
