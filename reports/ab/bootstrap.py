"""Intervals for a mean difference between two arms, from resampled problems."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

RESAMPLES = 10_000
BATCH = 1000  # resamples drawn at once: 1000 * problems numbers


def intervals(
    differences: FloatArray, alphas: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[tuple[float, float]]:
    """Intervals of ``1 - alpha`` for the mean difference, from one paired bootstrap over problems.

    Percentiles of the means of resampled problems, with two corrections, since plain percentiles cover too little where
    problems are few or mostly equal:

    * The percentiles are those of Hesterberg (2015, "What teachers should know about the bootstrap", expanded
      percentile interval): ``Phi(-sqrt(n / (n - 1)) t)`` in place of alpha / 2, with Student's ``t`` of alpha / 2.
    * Two imagined problems, whose differences are plus and minus half the largest one seen, are resampled with the
      others. Few problems have not shown how far a difference may go, nor that it may go the other way. This is what
      adding a fraction to each cell of a table of pairs does in the interval of Agresti and Min (2005), for differences
      of any size; with many problems that differ it does next to nothing.

    Where all differences are equal a bootstrap knows of no spread at all. Then at most a share
    ``u = 1 - (alpha / 2)**(1 / n)`` of all problems differs from the ones seen (Clopper and Pearson), by whatever -1
    to 1 allows: from ``d - u (1 + d)`` to ``d + u (1 - d)``.

    differences : fp64 ``[problems]``, between -1 and 1, at least two.
    """
    from scipy.stats import bootstrap, norm, t

    problems = len(differences)
    if not vary(differences):
        equal, unseen = float(differences[0]), [1 - (alpha / 2) ** (1 / problems) for alpha in alphas]
        return [(equal - share * (1 + equal), equal + share * (1 - equal)) for share in unseen]
    imagined = np.abs(differences).max() / 2
    sample = np.append(differences, [imagined, -imagined])
    result = bootstrap(
        (sample,), np.mean, n_resamples=resamples, batch=BATCH, method="percentile", rng=np.random.default_rng(seed)
    )
    means, size = result.bootstrap_distribution, len(sample)
    bounds = []
    for alpha in alphas:
        tail = norm.cdf(-math.sqrt(size / (size - 1)) * t.ppf(1 - alpha / 2, size - 1))
        low, high = np.quantile(means, [tail, 1 - tail])
        bounds.append((float(low), float(high)))
    return bounds


def vary(differences: FloatArray) -> bool:
    """Whether there is more between them than the rounding of means of the same few numbers."""
    return bool(np.ptp(differences) > 1e-9)
