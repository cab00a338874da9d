"""Two ways in which a gain deceives, shown on one's own data.

Both are named by the paper whose protocol the reports follow (alpha, arXiv 2605.14292): a gain that evaporates as
problems are added, and a gain that is there only while caches are compared at the wrong moment. How the paper measures
them is not published; the measures here are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvpolicy.reports.ab.bootstrap import FloatArray
from kvpolicy.reports.ab.memory import ArmMemory, IsoCache, iso_cache, within_tolerance
from kvpolicy.reports.ab.statistics import FEW_PROBLEMS, PairedDifference, compare, sign_flip_p

SIZES = (50, FEW_PROBLEMS)
LOOKS = 10
_DRAWS = 2000
_TEST_DRAWS = 200  # a p-value each
_TEST_RESAMPLES = 1000


@dataclass(frozen=True)
class Evaporation:
    """What studies of so many problems would have reported, if the problems here were all there are.

    low, median, high : 5 %, 50 % and 95 % quantiles of the gain that such a study estimates.
    best_of_looks : mean of the largest gain of `LOOKS` such studies, what a search over variants would show that all
        have the gain of this one.
    significant : share of studies with p < 0.05.
    significant_gain : mean absolute gain of those; None if there are none.
    """

    size: int
    low: float
    median: float
    high: float
    best_of_looks: float
    significant: float
    significant_gain: float | None


@dataclass(frozen=True)
class IsoCacheContrast:
    """The gain of one arm over two baselines: one with its cache after prefill, one with its mean cache.

    Each baseline is the nearest there is; `…_sizes` says how near. The gain vanishes under the second comparison where
    it came from memory.
    """

    by_prefill: str
    by_prefill_sizes: IsoCache
    by_prefill_gain: PairedDifference
    by_mean: str
    by_mean_sizes: IsoCache
    by_mean_gain: PairedDifference
    warnings: tuple[str, ...]


def evaporation(differences: FloatArray, sizes: Sequence[int] = SIZES, *, seed: int = 0) -> list[Evaporation]:
    """How the estimated gain depends on the number of problems, in studies drawn from the problems at hand.

    Problems are drawn with replacement, as a study would draw from a population that the problems at hand represent:
    drawn without, samples of nearly all of them would agree because they are the same problems. The gains scatter
    about the one at hand, and the fewer the problems, the further; whoever reports the best, or only what is
    significant, reports more than there is. Sizes above the number of problems are left out.

    differences : fp64 ``[problems]``, second arm minus first.
    """
    rng = np.random.default_rng(seed)
    found = []
    for size in sizes:
        if size > len(differences):
            continue
        drawn = rng.choice(differences, size=(_DRAWS, size))
        gains = drawn.mean(axis=1)
        low, median, high = (float(value) for value in np.quantile(gains, [0.05, 0.5, 0.95]))
        tested = drawn[:_TEST_DRAWS]
        seeds = rng.integers(0, 2**32, size=_TEST_DRAWS)
        p_values = np.array(
            [
                sign_flip_p(study, resamples=_TEST_RESAMPLES, seed=int(each))
                for study, each in zip(tested, seeds, strict=True)
            ]
        )
        significant = np.abs(gains[:_TEST_DRAWS][p_values < 0.05])
        found.append(
            Evaporation(
                size=size,
                low=low,
                median=median,
                high=high,
                best_of_looks=float(gains.reshape(-1, LOOKS).max(axis=1).mean()),
                significant=len(significant) / _TEST_DRAWS,
                significant_gain=float(significant.mean()) if len(significant) else None,
            )
        )
    return found


def iso_cache_contrast(
    arm: FloatArray,
    arm_memory: ArmMemory,
    baselines: Mapping[str, tuple[FloatArray, ArmMemory]],
    *,
    cells: int = 2,
    seed: int = 0,
) -> IsoCacheContrast:
    """Compare an arm with the baseline that has its cache after prefill, and with the one that has its mean cache.

    Parameters
    ----------
    arm : fp64 ``[problems]``
        Rates by problem, as in :func:`ab_statistics.compare`.
    baselines : per name
        The same method under several budgets, rates on the same problems.

    Raises
    ------
    ValueError
        If there are no baselines.
    """
    if not baselines:
        raise ValueError("the contrast needs at least one baseline")
    sizes = {name: iso_cache(memory, arm_memory) for name, (_, memory) in baselines.items()}
    by_prefill = min(sizes, key=lambda name: _distance(sizes[name].after_prefill))
    by_mean = min(sizes, key=lambda name: _distance(sizes[name].mean))
    warnings = [
        f"no baseline has the arm's {what}: that of the nearest, {name}, is off by a factor of {ratio:.3f}."
        for what, name, ratio in (
            ("cache after prefill", by_prefill, sizes[by_prefill].after_prefill),
            ("mean cache", by_mean, sizes[by_mean].mean),
        )
        if not within_tolerance(ratio)
    ]
    return IsoCacheContrast(
        by_prefill=by_prefill,
        by_prefill_sizes=sizes[by_prefill],
        by_prefill_gain=compare(baselines[by_prefill][0], arm, cells=cells, seed=seed),
        by_mean=by_mean,
        by_mean_sizes=sizes[by_mean],
        by_mean_gain=compare(baselines[by_mean][0], arm, cells=cells, seed=seed),
        warnings=tuple(warnings),
    )


def _distance(ratio: float) -> float:
    return abs(float(np.log(ratio)))
