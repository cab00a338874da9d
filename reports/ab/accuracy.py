"""The accuracy of one arm (or any other rate), with an interval that knows how alike the responses to a problem are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvpolicy.reports.ab.bootstrap import FloatArray
from kvpolicy.reports.ab.statistics import ALPHA

# Problems that are imagined to be answered always or never. Near 0 or 1 most samples lack the few hard problems that
# make the true spread. Of 1, 2 and 4, only 4 covered 92 % or more wherever it was simulated.
_IMAGINED = 4


@dataclass(frozen=True)
class Rate:
    """A rate and its interval of ``1 - ALPHA``; `effective` is how many independent responses it is worth."""

    value: float
    low: float
    high: float
    effective: float


def rate(by_problem: FloatArray, responses: int) -> Rate:
    """Mean over problems, with Wilson's interval for as many responses as the problems are worth.

    Wilson's interval stays within 0 and 1 and has a width where all responses are correct; a bootstrap or a normal
    interval has none there and covers far too little at the high accuracies of reasoning models. It is made for
    independent responses, which several to one problem are not. So it is given the number of independent responses
    that have the variance observed between problems (Korn and Graubard, 1998, for surveys of clusters): between one for
    each problem, if the responses to a problem are all alike, and one for each response. Student's quantile stands in
    for the normal one, with the degrees of freedom of the problems.

    Parameters
    ----------
    by_problem : fp64 ``[problems]``
        Means over the responses to each problem, between 0 and 1.
    responses : int
        To all problems.

    Raises
    ------
    ValueError
        If there are fewer than two problems, or fewer responses than problems.
    """
    from scipy.stats import t

    problems = len(by_problem)
    if problems < 2 or responses < problems:
        raise ValueError(f"a rate needs at least two problems and a response to each, got {problems} and {responses}")
    value = float(by_problem.mean())
    widest = value * (1 - value)  # variance between problems that are answered always or never
    effective = float(problems)
    if widest > 0:
        squares = float(np.square(by_problem - value).sum())
        variance = (squares + _IMAGINED * widest) / (problems - 1 + _IMAGINED)
        effective = min(max(problems * widest / variance, problems), responses)
    quantile = float(t.ppf(1 - ALPHA / 2, problems - 1))
    shrink = 1 + quantile**2 / effective
    centre = (value + quantile**2 / (2 * effective)) / shrink
    half = quantile / shrink * math.sqrt(widest / effective + quantile**2 / (4 * effective**2))
    return Rate(value, max(0.0, centre - half), min(1.0, centre + half), effective)
