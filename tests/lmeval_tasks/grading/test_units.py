from __future__ import annotations

import pytest

from kvpolicy.lmeval_tasks.grading.units import opposed

OPPOSED = [
    ({"cents"}, {"dollars"}),
    ({"hours"}, {"minutes"}),
    ({"cm"}, {"inches"}),
    ({"cm"}, {"hours"}),
    ({"degrees"}, {"dollars"}),
    ({"am"}, {"pm"}),
    ({"miles", "north"}, {"miles", "south"}),
    ({"miles", "per", "hour"}, {"km", "per", "hour"}),
]
NOT_OPPOSED: list[tuple[set[str], set[str]]] = [
    (set(), {"cm"}),
    (set(), set()),
    ({"cm"}, {"centimeters"}),
    ({"in"}, {"square", "inches"}),
    ({"eggs"}, {"dollars"}),
    ({"miles", "per", "hour"}, {"mph"}),
    ({"miles", "north"}, {"miles"}),
    ({"usd"}, {"dollars"}),
]


@pytest.mark.parametrize(("gold", "answer"), OPPOSED)
def test_units_that_exclude_each_other(gold: set[str], answer: set[str]) -> None:
    assert opposed(gold, answer)
    assert opposed(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), NOT_OPPOSED)
def test_units_that_may_be_the_same(gold: set[str], answer: set[str]) -> None:
    assert not opposed(gold, answer)
    assert not opposed(answer, gold)
