"""The document that holds all numbers of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvpolicy import __version__
from kvpolicy.reports.ab.memory import TOLERANCE, MemoryMatch
from kvpolicy.reports.ab.report import Comparison, Report
from kvpolicy.reports.ab.sentences import contrast_sentence, evaporation_sentence, iso_sentence, plan_sentence, sentence
from kvpolicy.reports.ab.statistics import ALPHA

FORMAT = "kvpolicy ab 1"


def document(report: Report) -> dict[str, Any]:
    """The report as JSON can hold it."""
    return {
        "format": FORMAT,
        "kvpolicy": __version__,
        "alpha": ALPHA,
        "memory_tolerance": TOLERANCE,
        "split": report.split,
        "baseline": report.baseline,
        "arms": list(report.arms),
        "tasks": {task: {"problems": len(report.pairs.problems(task))} for task in report.pairs.tasks},
        "plan": None if report.plan is None else _plan(report),
        "plan_sentence": plan_sentence(report),
        "warnings": list(report.warnings),
        "measures": [dataclasses.asdict(measures) for measures in report.measures.values()],
        "comparisons": [_comparison(comparison, len(report.comparisons)) for comparison in report.comparisons],
        "memory": [
            {"task": task, "first": one, "second": other, **_match(found)}
            for (task, one, other), found in report.memory.items()
        ],
        "contrasts": [
            {**dataclasses.asdict(contrast), "sentence": contrast_sentence(contrast)} for contrast in report.contrasts
        ],
        "origins": [dataclasses.asdict(origin) for origin in report.origins],
    }


def _comparison(comparison: Comparison, cells: int) -> dict[str, Any]:
    return {
        **dataclasses.asdict(comparison),
        "memory": None if comparison.memory is None else _match(comparison.memory),
        "sentence": sentence(comparison, cells),
        "iso_sentence": iso_sentence(comparison),
        "evaporation_sentences": [evaporation_sentence(comparison, study) for study in comparison.evaporation],
    }


def _match(found: MemoryMatch) -> Mapping[str, Any]:
    return {**dataclasses.asdict(found), "matched": found.matched}


def _plan(report: Report) -> dict[str, Any]:
    assert report.plan is not None
    return {
        "sha256": report.plan.plan.digest,
        "plan": dataclasses.asdict(report.plan.plan),
        "runs": [dataclasses.asdict(run) for run in report.plan.runs],
        "run_count": report.plan.run_count,
    }
