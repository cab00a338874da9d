"""The arms of the run through lm-eval are all methods, and fit its budget."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from methods_arms import NEEDS_GATES, small_arms

from kvpolicy.policies.registry import POLICIES
from kvpolicy.sglang_plugin.arms import parse_arms
from tests.policies.references.table import Shape, statistics_file


@pytest.fixture
def arms(tmp_path: Path) -> list[str]:
    return small_arms(statistics_file(Shape(3, 2, 2, 16), tmp_path))


def test_every_method_but_those_with_trained_gates_takes_part(arms: list[str]) -> None:
    assert {arm.partition("[")[0] for arm in arms} == set(POLICIES) - set(NEEDS_GATES)


def test_each_fits_the_default_budget(arms: list[str]) -> None:
    for arm in parse_arms("|".join(arms), "").values():
        arm.check(128, 32)
