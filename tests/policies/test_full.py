"""The full cache is measured and never cut."""

from __future__ import annotations

import pytest

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.full import Full


@pytest.mark.parametrize(("resident", "budget", "period"), [(1, 1, 1), (164, 100, 64), (10**6, 1, 1)])
def test_no_request_is_ever_due(resident: int, budget: int, period: int) -> None:
    assert Full().due(resident, budget, period) is False


def test_asking_it_to_choose_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="never due"):
        Full().select(Candidates((1, 1, 8)), 4, 64, Noise(0, 0, (0,)))


def test_it_forces_and_reads_nothing() -> None:
    assert Full().forced(64) == 0
    assert Full().needs(64) == Needs()
