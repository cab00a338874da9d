"""ThinKV's plan by hand: what a segment is about, and how many tokens it is left with."""

from __future__ import annotations

import pytest

from kvpolicy.policies.thinkv import ThinKV, Thought

UNKNOWN = float("nan")
T, E, R = Thought


@pytest.mark.parametrize(
    ("sparsity", "thoughts"),
    [
        ([], []),
        ([UNKNOWN], [R]),
        ([0.5, 0.9], [R, R]),
        ([0.5, 0.9, 0.1], [R, T, E]),
        ([0.5, UNKNOWN, 0.9, UNKNOWN, 0.1], [R, R, T, R, E]),
        ([0.5, UNKNOWN, 0.9], [R, R, R]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [E, R, R, R, T]),
        ([0.6, 0.1, 0.5, 0.2, 0.4, 0.3], [T, E, T, E, R, R]),
        ([0.5, 0.5, 0.5, 0.5], [R, R, R, R]),
        ([0.1, 0.1, 0.1, 0.5, 0.6, 0.6], [R, R, R, R, T, T]),
        ([0.1, 0.1, 0.4, 0.6, 0.6, 0.6], [E, E, R, R, R, R]),
    ],
)
def test_thirds_of_known_sparsity_say_what_a_segment_is(sparsity: list[float], thoughts: list[Thought]) -> None:
    assert ThinKV().thoughts(sparsity) == thoughts


def test_thresholds_say_what_a_segment_is() -> None:
    policy = ThinKV(low=0.25, high=0.75)
    assert policy.thoughts([0.2, 0.25, 0.5, 0.75, 0.8, UNKNOWN]) == [E, R, R, R, T, R]
    assert ThinKV(low=0.5, high=0.5).thoughts([0.4, 0.5, 0.6]) == [E, R, T]


OLD = [False] * 8


@pytest.mark.parametrize(
    ("sizes", "thoughts", "since", "budget", "left"),
    [
        pytest.param([128] * 3, [R] * 3, OLD, 384, [128] * 3, id="enough room"),
        pytest.param([128] * 3, [R] * 3, OLD, 383, [64, 128, 128], id="the oldest drops a step"),
        pytest.param([128] * 3, [R, E, T], OLD, 383, [128, 128, 64], id="transition first"),
        pytest.param([128] * 3, [R, E, R], OLD, 383, [128, 64, 128], id="then execution"),
        pytest.param([128] * 3, [R, T, T], OLD, 250, [128, 4, 64], id="to the least before the next"),
        pytest.param([128] * 3, [T, E, R], OLD, 140, [4, 8, 128], id="kind before age"),
        pytest.param([128] * 3, [T, E, R], OLD, 135, [4, 4, 64], id="reasoning last"),
        pytest.param([64, 8, 128, 100], [R, T, R], OLD, 260, [16, 4, 128, 100], id="from where they are"),
        pytest.param([4, 4, 4, 4, 100], [R, E, T, R], OLD, 112, [4, 4, 0, 4, 100], id="one dropped"),
        pytest.param([4, 4, 4, 4, 100], [R, E, T, R], OLD, 104, [0, 0, 0, 4, 100], id="execution, then the oldest"),
        pytest.param([128] * 4, [R, R, R, T], [False] * 3 + [True], 512, [64, 64, 64, 128], id="a transition ended"),
        pytest.param([128] * 4, [T, R, R, R], [True] * 4, 512, [128] * 4, id="nothing is earlier"),
        pytest.param([128] * 4, [R, T, E, T], [True] * 4, 512, [32, 64, 64, 128], id="two transitions ended"),
        pytest.param([128] * 4, [R, T, E, T], OLD, 512, [128] * 4, id="long ago"),
        pytest.param([4, 8, 128, 64, 9], [R, R, R, T], [True] * 4, 500, [4, 4, 64, 64, 9], id="not below the least"),
        pytest.param([128] * 4, [R, R, R, T], [True] * 4, 250, [64, 64, 64, 32], id="ended, and too many"),
    ],
)
def test_what_segments_are_thinned_to(
    sizes: list[int], thoughts: list[Thought], since: list[bool], budget: int, left: list[int]
) -> None:
    assert ThinKV().thinned(sizes, thoughts, since, budget) == left


@pytest.mark.parametrize(
    ("least", "steps"),
    [(4, [64, 32, 16, 8, 4, 4]), (1, [64, 32, 16, 8, 4, 1]), (10, [64, 32, 16, 10, 10, 10]), (100, [100, 100])],
)
def test_the_ladder_ends_at_the_least(least: int, steps: list[int]) -> None:
    policy, size, found = ThinKV(least=least), 128, []
    for _ in steps:
        (size, _) = policy.thinned([size, 128], [R, T], [False, True], 256)
        found.append(size)
    assert found == steps
