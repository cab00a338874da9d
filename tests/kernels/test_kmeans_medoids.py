"""K-means medoids by hand, against the plain reference, and what holds for any cloud of points."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvpolicy.kernels.kmeans_medoids import kmeans_medoids, kmeans_medoids_reference

Medoids = Callable[[torch.Tensor, int, int], torch.Tensor]
implementations = pytest.mark.parametrize("medoids", [kmeans_medoids, kmeans_medoids_reference])


def line(*coordinates: float) -> torch.Tensor:
    """One cloud of points on a line."""
    return torch.tensor(coordinates).view(1, -1, 1)


def clouds(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@implementations
@pytest.mark.parametrize(
    ("points", "count", "iterations", "kept"),
    [
        # Begins at points 1 and 3. Means are then 0.5 and 10.5, each between two points: the older one stays.
        pytest.param(line(0, 1, 10, 11), 2, 1, [0, 2], id="equally near"),
        # Begins at points 1 and 3, so {0, 1, 2} and {9}; the mean 2.67 is nearest to 3.
        pytest.param(line(0, 3, 5, 9), 2, 1, [1, 3], id="one step"),
        # Begins at 1 and 10: the first takes 0 .. 5, the second 6, 10, 10, 10, so means of 2.5 and 9.
        pytest.param(line(0, 0, 1, 5, 5, 6, 10, 10, 10, 4), 2, 1, [2, 6], id="ten points"),
        # Begins at 0 and 7, then {0, 1, 2} and {6, 7, 8}.
        pytest.param(line(1, 0, 2, 6, 7, 8), 2, 1, [0, 4], id="mean on a point"),
        # Begins at 2 and 5. {0, 2} and the others have means of 1 and 7.5, so 4 joins them, for means of 2 and 8.67.
        pytest.param(line(0, 2, 9, 4, 5, 12), 2, 1, [0, 2], id="the first of two steps"),
        pytest.param(line(0, 2, 9, 4, 5, 12), 2, 2, [1, 2], id="two steps"),
        pytest.param(line(3, 1, 2), 3, 5, [0, 1, 2], id="all"),
        pytest.param(line(8, 1, 2), 1, 0, [1], id="no step: the middle"),
        pytest.param(line(8, 1, 2), 1, 1, [2], id="the one nearest to the mean"),
        pytest.param(line(*range(10)), 3, 0, [1, 5, 8], id="evenly spaced"),
        # Begins at points 1, 3 and 5, all 7: the first centroid takes all, the others have none and stay.
        pytest.param(line(7, 7, 7, 7, 7, 7), 3, 4, [0, 1, 2], id="equal points"),
        # Begins at 9, 9 and 9. The first takes all and moves to 7.5; the others stay, each with a 9 that is not taken.
        pytest.param(line(0, 9, 9, 9, 9, 9), 3, 1, [1, 2, 3], id="clusters without points"),
    ],
)
def test_worked_examples(medoids: Medoids, points: torch.Tensor, count: int, iterations: int, kept: list[int]) -> None:
    found = medoids(points, count, iterations)
    assert found.dtype == torch.int64
    assert found.tolist() == [kept]


@implementations
def test_clusters_in_a_row_are_found_and_each_keeps_its_mean(medoids: Medoids) -> None:
    # Eight clusters of 5 points around far corners; the last point of each is its mean.
    corners = clouds(2, 3, 8, 1, 6).sign() * 100 + torch.arange(8).view(8, 1, 1) * 1000
    offsets = clouds(2, 3, 8, 5, 6)
    offsets[..., 4, :] = offsets[..., :4, :].mean(dim=-2)
    found = medoids((corners + offsets).flatten(2, 3), 8, 3)
    assert torch.equal(found, torch.arange(4, 40, 5).expand(2, 3, 8))


@pytest.mark.parametrize(
    ("shape", "count", "iterations"),
    [
        ((2, 3, 128, 64), 64, 10),
        ((3, 2, 64, 60), 32, 10),
        ((1, 1, 16, 80), 8, 3),
        ((2, 2, 63, 96), 4, 10),
        ((4, 100, 3), 64, 1),
        ((1, 1, 4), 1, 2),
        ((2, 2, 5, 64), 5, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_the_reference(shape: tuple[int, ...], count: int, iterations: int, dtype: torch.dtype) -> None:
    points = clouds(*shape, seed=count).to(dtype)
    found = kmeans_medoids(points, count, iterations)
    assert found.shape == (*shape[:-2], count)
    assert torch.equal(found, kmeans_medoids_reference(points, count, iterations))


@implementations
@pytest.mark.parametrize("seed", range(5))
def test_points_are_distinct_ascending_and_of_the_number_asked_for(medoids: Medoids, seed: int) -> None:
    # Coordinates of 0 and 1 only: many points are equal, and many centroids are nearest to the same one.
    points = (clouds(2, 2, 30, 2, seed=seed) > 0).float()
    for count in (1, 7, 29, 30):
        found = medoids(points, count, 4)
        assert found.shape == (2, 2, count)
        assert (found.diff(dim=-1) > 0).all()
        assert found.min() >= 0
        assert found.max() < 30


@implementations
def test_points_that_are_not_finite_count_as_the_origin(medoids: Medoids) -> None:
    points = clouds(1, 20, 8)
    points[0, 3], points[0, 7, 2], points[0, 8, 1] = torch.nan, torch.inf, -torch.inf
    zeroed = points.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    assert torch.equal(medoids(points, 8, 5), medoids(zeroed, 8, 5))


def test_a_cloud_is_clustered_alike_among_any_others() -> None:
    points = clouds(3, 4, 40, 16)
    together = kmeans_medoids(points, 8, 10)
    assert torch.equal(kmeans_medoids(points[1:2, 2:], 8, 10), together[1:2, 2:])


@implementations
def test_a_shift_and_a_scale_of_all_points_change_nothing(medoids: Medoids) -> None:
    points = clouds(2, 60, 16)
    assert torch.equal(medoids(points.double() * 4 + 16, 8, 6), medoids(points, 8, 6))


@implementations
def test_inputs_stay_as_they_are(medoids: Medoids) -> None:
    points = clouds(2, 30, 8)
    untouched = points.clone()
    medoids(points, 4, 3)
    assert torch.equal(points, untouched)


@pytest.mark.parametrize("count", [0, 31])
def test_a_number_that_is_not_there_is_a_programming_error(count: int) -> None:
    with pytest.raises(AssertionError, match="must be 1 to"):
        kmeans_medoids(clouds(1, 30, 8), count, 3)
