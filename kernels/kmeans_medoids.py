"""K-means over the keys of a segment, each centroid replaced by the real key nearest to it."""

from __future__ import annotations

import torch

# Squared distances that differ by less than this share of the largest squared norm are equal. A mean of two points is
# equally near to both, and which of them stays must not be for the rounding of a matrix product to say.
EQUAL = 1e-10


def _finite(points: torch.Tensor) -> torch.Tensor:
    """``[..., n, D]`` as fp64 ``[B, n, D]``; what is not finite counts as 0."""
    return points.flatten(0, -3).double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _evenly_spaced(points: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 ``[count]``: the middles of `count` equal stretches of ``0 .. points - 1``."""
    return (2 * torch.arange(count, device=device) + 1) * points // (2 * count)


def _nearest(distance: torch.Tensor, equal: torch.Tensor, dim: int) -> torch.Tensor:
    """Index of the least along `dim`, which is kept; of those within `equal` of it the first."""
    return (distance <= distance.amin(dim=dim, keepdim=True) + equal).byte().argmax(dim=dim, keepdim=True)


def kmeans_medoids_reference(points: torch.Tensor, count: int, iterations: int) -> torch.Tensor:
    """`count` of the points, spread as K-means spreads its centroids; one cloud after the other.

    Deterministic: the first centroids are points evenly spaced in order, the middles of `count` equal stretches. Then
    `iterations` times each point joins the nearest centroid, of equally near ones the first, and each centroid moves to
    the mean of its points; one without points stays. At last the centroids, in order, each take the point nearest to
    them that is not taken yet, of equally near ones the first: so the points are distinct and exactly `count`.

    Parameters
    ----------
    points : ``[..., n, D]``
        Any float dtype; computed in fp64. Coordinates that are not finite count as 0.
    count : int
        1 to n.
    iterations : int
        0 leaves the evenly spaced points, unless some points are equal.

    Returns
    -------
    int64 ``[..., count]``, ascending.
    """
    chosen = []
    for cloud in _finite(points):
        equal = EQUAL * cloud.square().sum(dim=-1).amax()
        centroids = cloud[_evenly_spaced(len(cloud), count, cloud.device)]
        for _ in range(iterations):
            nearest = _nearest((cloud[:, None] - centroids).square().sum(dim=-1), equal, dim=1)[:, 0]
            for j in range(count):
                if (nearest == j).any():
                    centroids[j] = cloud[nearest == j].mean(dim=0)
        taken = torch.zeros(len(cloud), dtype=torch.bool, device=cloud.device)
        for centroid in centroids:
            distance = (cloud - centroid).square().sum(dim=-1).masked_fill(taken, torch.inf)
            taken[_nearest(distance, equal, dim=0)] = True
        chosen.append(taken.nonzero()[:, 0])
    return torch.stack(chosen).view(*points.shape[:-2], count)


def kmeans_medoids(points: torch.Tensor, count: int, iterations: int) -> torch.Tensor:
    """The same as :func:`kmeans_medoids_reference`, all clouds at once, up to the rounding of fp64."""
    number = points.shape[-2]
    assert points.dim() >= 3, f"{points.shape = } must be [..., n, D]"
    assert 1 <= count <= number, f"{count = } must be 1 to {number = }"
    clouds = _finite(points)
    norm = clouds.square().sum(dim=-1)[:, None]
    equal = EQUAL * norm.amax(dim=-1, keepdim=True)
    centroids = clouds[:, _evenly_spaced(number, count, points.device)]
    order = torch.arange(count, device=points.device)[:, None]
    for _ in range(iterations):
        # Squared distances [B, count, n], less the norm of the point, which all centroids share.
        nearest = _nearest(centroids.square().sum(dim=-1, keepdim=True) - 2 * centroids @ clouds.mT, equal, dim=1)
        joined = (nearest == order).double()  # a product with it adds up alike on every run; a scatter may not
        size = joined.sum(dim=-1, keepdim=True)
        centroids = torch.where(size > 0, joined @ clouds / size.clamp_min(1), centroids)
    distance = norm - 2 * centroids @ clouds.mT  # less the norm of the centroid
    taken = torch.empty(len(clouds), count, dtype=torch.int64, device=points.device)
    for j in range(count):
        nearest = _nearest(distance[:, j], equal[:, 0], dim=-1)
        taken[:, j] = nearest[:, 0]
        distance.scatter_(2, nearest[:, None].expand(-1, count, 1), torch.inf)
    return taken.sort(dim=-1).values.view(*points.shape[:-2], count)
