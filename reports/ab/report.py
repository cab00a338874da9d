"""All that a comparison of arms says, computed from their responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvpolicy.reports.ab.arms import AbError
from kvpolicy.reports.ab.bootstrap import FloatArray
from kvpolicy.reports.ab.effect import check_effect
from kvpolicy.reports.ab.failure_modes import Evaporation, IsoCacheContrast, evaporation, iso_cache_contrast
from kvpolicy.reports.ab.measures import Measures, measure
from kvpolicy.reports.ab.memory import ArmMemory, IsoCache, MemoryMatch, iso_cache, match
from kvpolicy.reports.ab.origin import Origin
from kvpolicy.reports.ab.pairs import Pairs, correct, pair
from kvpolicy.reports.ab.plan import PlanFile
from kvpolicy.reports.ab.responses import Arm
from kvpolicy.reports.ab.settings import Split
from kvpolicy.reports.ab.statistics import PairedDifference, adjusted, compare
from kvpolicy.reports.ab.warnings import warnings_of


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline on one task: accuracy, second minus first, and memory, second over first.

    bonferroni, holm : p-values corrected for all comparisons of the report.
    memory, iso : None where one of the caches is not known.
    """

    task: str
    baseline: str
    arm: str
    accuracy: PairedDifference
    bonferroni: float
    holm: float
    memory: MemoryMatch | None
    iso: IsoCache | None
    evaporation: tuple[Evaporation, ...]


@dataclass(frozen=True)
class Contrast:
    """An arm against the budgets of another method; see :func:`ab_failure_modes.iso_cache_contrast`."""

    task: str
    arm: str
    found: IsoCacheContrast


@dataclass(frozen=True)
class Report:
    """A comparison. `memory` has each pair of arms whose caches are known, in the order of the arms, per task.

    plan : of runs of the confirm part; None where none was written.
    """

    pairs: Pairs
    split: Split | None
    baseline: str
    measures: Mapping[tuple[str, str], Measures]
    comparisons: tuple[Comparison, ...]
    memory: Mapping[tuple[str, str, str], MemoryMatch]
    contrasts: tuple[Contrast, ...]
    origins: tuple[Origin, ...]
    plan: PlanFile | None
    warnings: tuple[str, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """Names, in the order in which they were given."""
        return tuple(arm.name for arm in self.pairs.arms)

    def of(self, arm: str, task: str) -> Measures:
        """What an arm did on a task."""
        return self.measures[arm, task]


def make_report(
    arms: Sequence[Arm],
    origins: Sequence[Origin],
    *,
    split: Split | None,
    baseline: str | None = None,
    plan: PlanFile | None = None,
) -> Report:
    """Compare arms, each with its origin, with `baseline`, or with the first of them.

    Raises
    ------
    OutputError
        If the arms were not asked the same, or one of them shows no effect.
    AbError
        If there is no such baseline, or a task has a single problem.
    """
    pairs = pair(arms)
    names = [arm.name for arm in arms]
    first = names[0] if baseline is None else baseline
    if first not in names:
        raise AbError(f"--baseline {first} is not an arm; the arms are {', '.join(names)}.")
    for task in pairs.tasks:
        if len(pairs.problems(task)) < 2:
            raise AbError(f"{task}: one problem is no sample of any; run at least two, and better 200.")
    for arm in arms:
        check_effect(arm)
    measures = {(name, task): measure(pairs, name, task) for name in names for task in pairs.tasks}
    return Report(
        pairs=pairs,
        split=split,
        baseline=first,
        measures=measures,
        comparisons=_comparisons(pairs, measures, first),
        memory={
            (task, one, other): match(*known)
            for task in pairs.tasks
            for one, other in combinations(names, 2)
            if (known := _both(measures, task, one, other)) is not None
        },
        contrasts=_contrasts(pairs, measures),
        origins=tuple(origins),
        plan=plan,
        warnings=(*pairs.warnings, *warnings_of(measures, origins)),
    )


def _comparisons(pairs: Pairs, measures: Mapping[tuple[str, str], Measures], baseline: str) -> tuple[Comparison, ...]:
    cells = [(task, arm.name) for task in pairs.tasks for arm in pairs.arms if arm.name != baseline]
    differences = [
        compare(_correct(pairs, baseline, task), _correct(pairs, arm, task), cells=len(cells)) for task, arm in cells
    ]
    corrected = adjusted([difference.p for difference in differences])
    found = []
    for (task, arm), difference, (bonferroni, holm) in zip(cells, differences, corrected, strict=True):
        known = _both(measures, task, baseline, arm)
        studies = evaporation(_correct(pairs, arm, task) - _correct(pairs, baseline, task))
        found.append(
            Comparison(
                task=task,
                baseline=baseline,
                arm=arm,
                accuracy=difference,
                bonferroni=bonferroni,
                holm=holm,
                memory=None if known is None else match(*known),
                iso=None if known is None else iso_cache(*known),
                evaporation=tuple(studies),
            )
        )
    return tuple(found)


def _contrasts(pairs: Pairs, measures: Mapping[tuple[str, str], Measures]) -> tuple[Contrast, ...]:
    """Each arm but the whole cache against each other method that was run under several budgets.

    They are corrected among themselves.
    """
    cells: list[tuple[str, str, list[str]]] = []
    for task in pairs.tasks:
        methods: dict[tuple[str, ...], list[str]] = {}
        for arm in pairs.arms:
            found = measures[arm.name, task]
            if found.method is not None and not found.is_whole:
                methods.setdefault(tuple(map(str, found.method.values())), []).append(arm.name)
        several = [names for names in methods.values() if len(names) > 1]
        cells += [
            (task, name, others)
            for names in methods.values()
            for name in names
            for others in several
            if others is not names
        ]
    contrasts = []
    for task, name, others in cells:
        baselines = {other: (_correct(pairs, other, task), _memory(measures, other, task)) for other in others}
        contrast = iso_cache_contrast(
            _correct(pairs, name, task), _memory(measures, name, task), baselines, cells=2 * len(cells)
        )
        contrasts.append(Contrast(task, name, contrast))
    return tuple(contrasts)


def _memory(measures: Mapping[tuple[str, str], Measures], arm: str, task: str) -> ArmMemory:
    memory = measures[arm, task].memory
    assert memory is not None, "a method is known by its records, and so is its memory"
    return memory


def _correct(pairs: Pairs, arm: str, task: str) -> FloatArray:
    rates = pairs.by_problem(arm, task, correct)
    assert rates is not None, "every response is correct or not"
    return rates


def _both(
    measures: Mapping[tuple[str, str], Measures], task: str, one: str, other: str
) -> tuple[ArmMemory, ArmMemory] | None:
    first, second = measures[one, task].memory, measures[other, task].memory
    return None if first is None or second is None else (first, second)
