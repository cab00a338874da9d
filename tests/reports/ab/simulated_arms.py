"""Arms whose true accuracies are known: problems of all difficulties, and arms that find the same ones difficult."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_SPREAD = 1.5  # of difficulties, in units of a single response's chance


@dataclass(frozen=True)
class Truth:
    """accuracy : of the first arm. gain : of the second over it. alike : correlation of the arms' difficulties."""

    problems: int
    samples: int
    accuracy: float
    gain: float = 0.0
    alike: float = 0.6

    def __str__(self) -> str:
        return f"n={self.problems} k={self.samples} acc={self.accuracy} gain={self.gain} alike={self.alike}"


def rates(truth: Truth, studies: int, seed: int) -> tuple[FloatArray, FloatArray]:
    """``[studies, problems]`` for each arm: share of its `samples` responses to each problem that are correct.

    An arm solves a problem of difficulty ``z`` with probability ``Phi(c - 1.5 z)``, where `c` makes the mean over
    standard normal ``z`` the arm's accuracy; responses to one problem are independent.
    """
    from scipy.stats import norm

    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((studies, truth.problems))
    own = rng.standard_normal((studies, truth.problems))
    difficulties = shared, truth.alike * shared + np.sqrt(1 - truth.alike**2) * own
    arms = []
    for accuracy, difficulty in zip((truth.accuracy, truth.accuracy + truth.gain), difficulties, strict=True):
        centre = np.sqrt(1 + _SPREAD**2) * norm.ppf(accuracy)
        arms.append(rng.binomial(truth.samples, norm.cdf(centre - _SPREAD * difficulty)) / truth.samples)
    return arms[0], arms[1]
