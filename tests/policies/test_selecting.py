"""The bookkeeping shared by score-based policies: top-k beside forced tokens, in age or in selection order."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.policies.selecting import keep_highest


def reference(scores: list[float], n_keep: int, sinks: int, recent: int) -> list[int]:
    """Forced tokens, then the others from the highest score down, one at a time."""
    n = len(scores)
    forced = [i for i in range(n) if i < sinks or i >= n - recent]
    rest = sorted((i for i in range(n) if i not in forced), key=lambda i: -scores[i])
    return sorted(forced + rest[: n_keep - len(forced)])


@pytest.mark.parametrize(
    ("tokens", "n_keep", "sinks", "recent"),
    [
        pytest.param(1, 1, 0, 0, id="one token"),
        pytest.param(63, 40, 4, 16, id="63 tokens"),
        pytest.param(63, 20, 4, 16, id="nothing but the forced"),
        pytest.param(33, 32, 0, 8, id="budget + 1"),
        pytest.param(111, 50, 4, 0, id="sinks only"),
        pytest.param(111, 50, 0, 0, id="nothing forced"),
        pytest.param(20, 20, 4, 16, id="all forced"),
    ],
)
def test_forced_tokens_and_the_highest_scores_stay(tokens: int, n_keep: int, sinks: int, recent: int) -> None:
    scores = torch.randn(2, 3, tokens, generator=torch.Generator().manual_seed(tokens))
    untouched = scores.clone()
    kept = keep_highest(scores, n_keep, sinks=sinks, recent=recent)
    assert kept.shape == (2, 3, n_keep)
    for row, row_scores in zip(kept.flatten(0, 1).tolist(), scores.flatten(0, 1).tolist(), strict=True):
        assert row == reference(row_scores, n_keep, sinks, recent)
    assert torch.equal(scores, untouched)


@pytest.mark.parametrize(
    ("scores", "n_keep", "kept"),
    [
        pytest.param([1, 1, 1, 1, 1], 3, [0, 1, 2], id="all equal"),
        pytest.param([1, 5, 1, 5, 1], 3, [0, 1, 3], id="equal ones fill up"),
        pytest.param([5, 5, 5, 9, 1], 2, [0, 3], id="one above the equal ones"),
        pytest.param([0, -torch.inf, torch.inf, -torch.inf, 0], 4, [0, 1, 2, 4], id="infinities"),
        pytest.param([0.0, -0.0, 0.0], 2, [0, 1], id="zeros of both signs"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_of_equal_scores_the_oldest_are_kept(
    scores: list[float], n_keep: int, kept: list[int], dtype: torch.dtype
) -> None:
    rows = torch.tensor([[scores, scores]], dtype=dtype)
    assert keep_highest(rows, n_keep).tolist() == [[kept, kept]]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("distinct", [1, 2, 7])
def test_many_equal_scores_beside_sinks_and_recent_tokens(rows: int, distinct: int) -> None:
    scores = torch.randint(distinct, (rows, 500), generator=torch.Generator().manual_seed(distinct)).float()
    kept = keep_highest(scores, 200, sinks=4, recent=16)
    assert kept.tolist() == [reference(row, 200, 4, 16) for row in scores.tolist()]


@pytest.mark.parametrize("age_order", [True, False])
def test_nothing_can_be_kept(age_order: bool) -> None:
    kept = keep_highest(torch.zeros(2, 3, 9), 0, age_order=age_order)
    assert kept.shape == (2, 3, 0)
    assert kept.dtype == torch.int64


def test_selection_order_runs_from_the_highest_score_down() -> None:
    scores = torch.tensor([3.0, 9.0, 1.0, 7.0, 5.0])
    assert keep_highest(scores, 3, age_order=False).tolist() == [1, 3, 4]
    assert keep_highest(scores, 3, recent=1, age_order=False).tolist() == [4, 1, 3]


@pytest.mark.parametrize(
    ("n_keep", "sinks", "recent"),
    [pytest.param(10, 0, 0, id="more than there are"), pytest.param(5, 4, 2, id="fewer than are forced")],
)
def test_impossible_counts_are_programming_errors(n_keep: int, sinks: int, recent: int) -> None:
    with pytest.raises(AssertionError, match=f"n_keep = {n_keep}"):
        keep_highest(torch.zeros(9), n_keep, sinks=sinks, recent=recent)
