"""The difference between two arms on the same problems: estimate, interval, p-value, what could have been detected.

The unit is the problem. All responses to a problem are averaged first, so the problems are a sample and the repeats
are not: asking each problem ten times makes its own number more exact, and adds no problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpolicy.reports.ab.bootstrap import BATCH, RESAMPLES, FloatArray, intervals, vary

ALPHA = 0.05
POWER = 0.8
FEW_PROBLEMS = 200
FEW_DIFFERENCES = 10


@dataclass(frozen=True)
class PairedDifference:
    """Second arm minus first, of one measure between 0 and 1 on the problems of one task.

    difference : mean over problems.
    low, high : interval of 1 - `ALPHA`, for this comparison alone.
    family_low, family_high : interval of ``1 - ALPHA / cells``; those of all cells hold together with ``1 - ALPHA``.
    p : two-sided, for this comparison alone; see :func:`sign_flip_p`. It is made of other resamples than the interval,
        and where 0 lies at its edge the two may disagree: then p decides.
    deviation : standard deviation of the differences of single problems.
    detectable : see :func:`detectable_effect`; None where no two problems differ in their difference.
    differing : problems on which the arms are not equal.
    warnings : one sentence each.
    """

    problems: int
    differing: int
    difference: float
    low: float
    high: float
    family_low: float
    family_high: float
    p: float
    deviation: float
    detectable: float | None
    warnings: tuple[str, ...]


def compare(first: FloatArray, second: FloatArray, *, cells: int = 1, seed: int = 0) -> PairedDifference:
    """Compare two arms, each of which gives one number per problem.

    Parameters
    ----------
    first, second : fp64 ``[problems]``
        Rates between 0 and 1, means over the responses to a problem; row `i` of both is the same problem.
    cells : int
        Comparisons in the same report. `family_low`, `family_high` and `detectable` are corrected for it (Bonferroni).
    seed : int
        Of the resamples; the same data and seed give the same numbers, in whatever order the problems come.

    Raises
    ------
    ValueError
        If there are fewer than two problems, the arrays differ in shape, or a number is no rate.
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise ValueError(f"two arms need one rate for each of at least two problems, got {first.shape}, {second.shape}")
    if not all(np.all((rates >= 0) & (rates <= 1)) for rates in (first, second)):
        raise ValueError("rates must lie between 0 and 1")
    differences = np.sort(second - first)
    problems, differing = len(differences), int(np.count_nonzero(differences))
    deviation = float(differences.std(ddof=1)) if vary(differences) else 0.0
    bounds = intervals(differences, (ALPHA, ALPHA / cells), seed=seed)
    return PairedDifference(
        problems=problems,
        differing=differing,
        difference=float(differences.mean()),
        low=bounds[0][0],
        high=bounds[0][1],
        family_low=bounds[1][0],
        family_high=bounds[1][1],
        p=sign_flip_p(differences, seed=seed),
        deviation=deviation,
        detectable=detectable_effect(deviation, problems, ALPHA / cells) if deviation else None,
        warnings=tuple(_warnings(problems, differing, cells)),
    )


def sign_flip_p(differences: FloatArray, *, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """Two-sided p-value of "the arms do the same": ``(r + 1) / (resamples + 1)``.

    If they do, it is chance which arm is which on each problem. So each resample flips the sign of each difference with
    probability 1/2, and `r` counts the resamples whose mean is at least as far from 0 as the one observed. Adding 1
    counts the observed one, without which p could be 0 and the test would reject too often (Phipson and Smyth, 2010).
    So arms that do the same are called different in no more than a share alpha of all studies, however few problems
    there are; a bootstrap calls more, since it takes the observed spread for the true one. With one response per
    problem this is McNemar's exact test, up to the error of the resamples. Arms that are equally accurate without doing
    the same, one of them by always solving the same problems, may be called different slightly too often below
    `FEW_PROBLEMS`.

    differences : fp64 ``[problems]``.
    """
    rng = np.random.default_rng(seed)
    sizes = np.abs(differences[differences != 0])
    observed = abs(float(differences.sum()))
    slack = 1e-9 * float(sizes.sum())  # sums of the same numbers in another order are equal
    reached, left = 0, resamples
    while left > 0:
        signs = 2.0 * rng.integers(0, 2, size=(min(BATCH, left), len(sizes)), dtype=np.int8) - 1.0
        reached += int(np.count_nonzero(np.abs(signs @ sizes) >= observed - slack))
        left -= BATCH
    return (reached + 1) / (resamples + 1)


def detectable_effect(deviation: float, problems: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """The difference that such a comparison finds significant with probability `power`.

    ``(z(1 - alpha / 2) + z(power)) * deviation / sqrt(problems)``, with normal quantiles ``z``; ``2.80 * deviation /
    sqrt(problems)`` for alpha 0.05 and power 0.8. A smaller one may exist and stay unseen.

    deviation : standard deviation of the differences of single problems, as observed.
    """
    from scipy.stats import norm

    quantiles = norm.ppf(1 - alpha / 2) + norm.ppf(power)
    return float(quantiles * deviation / math.sqrt(problems))


def adjusted(p_values: Sequence[float]) -> list[tuple[float, float]]:
    """Each p-value corrected for all cells of a report: by Bonferroni, and by Holm (1979), which is never larger.

    Bonferroni multiplies by the number of cells. Holm multiplies the smallest by it, the next by one less, and so on,
    and lets none fall below one before it.
    """
    cells = len(p_values)
    holm, largest = [0.0] * cells, 0.0
    for rank, place in enumerate(sorted(range(cells), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, (cells - rank) * p_values[place]))
        holm[place] = largest
    return [(min(1.0, cells * p), corrected) for p, corrected in zip(p_values, holm, strict=True)]


def _warnings(problems: int, differing: int, cells: int) -> list[str]:
    warnings = []
    if problems < FEW_PROBLEMS:
        warnings.append(
            f"{problems} problems are few: below {FEW_PROBLEMS}, gains that are found tend to shrink as more are added."
        )
    if differing < FEW_DIFFERENCES:
        warnings.append(
            f"the arms differ on {differing} of {problems} problems; the interval is wider than it need be, "
            "since so few say little of its true width."
        )
    if ALPHA / cells < 10 / (RESAMPLES + 1):
        warnings.append(
            f"{cells} comparisons are too many for {RESAMPLES} resamples: the smallest possible p is "
            f"{1 / (RESAMPLES + 1):.1e}, and {ALPHA / cells:.1e} is asked for; compare less."
        )
    return warnings
