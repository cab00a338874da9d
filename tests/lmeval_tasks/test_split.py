"""The frozen split: a pure function of the id, pinned so that nobody moves a problem by accident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy.lmeval_tasks.split import part_of

# The `unique_id` of each problem of MATH-500 is test/<subject>/<number>.json.
IDS = json.loads(Path(__file__).with_name("math500_ids.json").read_text(encoding="utf-8"))
# What `printf %s ID | md5sum` is modulo 5.
REMAINDERS = {
    "": 1,
    "test/precalculus/807.json": 0,
    "gsm8k-test-2": 2,
    "gsm8k-test-3": 3,
    "Größe/Ω 1": 4,
}


@pytest.mark.parametrize(("identifier", "remainder"), REMAINDERS.items())
def test_two_of_five_buckets_are_dev(identifier: str, remainder: int) -> None:
    assert part_of(identifier) == ("dev" if remainder < 2 else "confirm")


def test_math500_has_the_published_counts() -> None:
    parts = [part_of(f"test/{subject}/{number}.json") for subject, numbers in IDS.items() for number in numbers]
    assert (len(parts), parts.count("dev"), parts.count("confirm")) == (500, 201, 299)


def test_other_ids_are_divided_in_the_same_proportion() -> None:
    parts = [part_of(f"task-{number}") for number in range(10_000)]
    assert abs(parts.count("dev") - 4000) < 4 * 49  # standard deviations of the binomial
