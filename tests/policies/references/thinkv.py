"""ThinKV's eviction: segments of thought, how many tokens each keeps, and medoids of their keys."""

from __future__ import annotations

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import newest_attention

LADDER = (64, 32, 16, 8, 4)
SHARE = 0.01
# The first to lose tokens comes first.
TRANSITION, EXECUTION, REASONING = range(3)


class ThinKV:
    """A segment is `segment` adjacent places of the text. Only complete ones are thinned.

    A complete one without prompt tokens has a kind by the mean sparsity of its queries on the last `layers` layers:
    a third of those still resident are transition, a third execution, or by the bounds `low` and `high`. Every other
    is reasoning.
    """

    def __init__(self, segment: int, layers: int = 4, low: float | None = None, high: float | None = None) -> None:
        self.segment, self.layers, self.bounds = segment, layers, (low, high)
        # Of the query of each decode token, by its position: sparsity, and the part of it that rounding decides.
        self._sparsity: dict[int, float] = {}
        self._doubt: dict[int, float] = {}

    def decoded(self, now: Snapshot) -> None:
        rows = newest_attention(now)[-self.layers :]
        share = rows / rows.amax(dim=-1, keepdim=True)
        self._sparsity[now.true_len - 1] = float((share < SHARE).double().mean())
        self._doubt[now.true_len - 1] = float(((share / SHARE - 1).abs() < 1e-5).double().mean())

    def keep(self, now: Snapshot) -> Kept:
        layers, heads = now.positions.shape[:2]
        kept, first = [], 0
        for segment, (size, left) in self.sizes(now).items():
            assert (now.positions[:, :, first : first + size] // self.segment == segment).all(), (
                "heads differ in counts"
            )
            rows = torch.arange(size).expand(layers, heads, -1)
            if left < size:
                rows = medoids(now.keys[:, :, first : first + size].double(), left)
            kept.append(first + rows)
            first += size
        certain = torch.inf if self._is_clear(now) else 0.0
        return Kept(torch.cat(kept, dim=-1), torch.full((layers, heads), certain, dtype=torch.float64))

    def sizes(self, now: Snapshot) -> dict[int, tuple[int, int]]:
        """Of each segment with resident tokens, by its number: how many there are, and how many stay."""
        numbers, counts = torch.unique(now.positions[0, 0] // self.segment, return_counts=True)
        before = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        left, kinds = dict(before), self._kinds(now)
        for finished in sorted(kinds):
            since = now.previous_len < (finished + 1) * self.segment
            if kinds[finished] == TRANSITION and since:
                left |= {earlier: lowered(count) for earlier, count in left.items() if earlier < finished}
        # Least important kind first, then oldest.
        order = sorted(kinds, key=lambda number: (kinds[number], number))
        while sum(left.values()) > now.budget and any(left[number] > LADDER[-1] for number in order):
            first = next(number for number in order if left[number] > LADDER[-1])
            left[first] = lowered(left[first])
        for number in order:
            if sum(left.values()) > now.budget:
                left[number] = 0
        return {number: (before[number], left[number]) for number in before}

    def _kinds(self, now: Snapshot) -> dict[int, int]:
        """Of the complete segments with resident tokens."""
        means, _ = self._means(now)
        low, high = self._limits(list(means.values()))
        resident = torch.unique(now.positions[0, 0] // self.segment).tolist()
        kinds = {number: REASONING for number in resident if number < now.true_len // self.segment}
        for number, mean in means.items():
            if mean > high or mean < low:
                kinds[number] = TRANSITION if mean > high else EXECUTION
        return kinds

    def _means(self, now: Snapshot) -> tuple[dict[int, float], float]:
        """Sparsity of the resident complete segments of which it is known, and how far rounding may move one."""
        means, doubt = {}, 1e-6
        for number in torch.unique(now.positions[0, 0] // self.segment).tolist():
            places = range(number * self.segment, (number + 1) * self.segment)
            if places[0] >= now.prompt_len and places[-1] < now.true_len:
                means[number] = sum(self._sparsity[place] for place in places) / self.segment
                doubt = max(doubt, sum(self._doubt[place] for place in places) / self.segment + 1e-6)
        return means, doubt

    def _limits(self, means: list[float]) -> tuple[float, float]:
        """Below the first is execution, above the second transition."""
        low, high = self.bounds
        if low is not None and high is not None:
            return low, high
        if len(means) < 3:
            return -1.0, 2.0
        ordered, third = sorted(means), len(means) // 3
        return ordered[third], ordered[-third - 1]

    def _is_clear(self, now: Snapshot) -> bool:
        """Whether no segment comes so near to a limit that rounding may decide its kind."""
        means, doubt = self._means(now)
        gaps = [abs(mean - limit) for mean in means.values() for limit in self._limits(list(means.values()))]
        return all(gap == 0 or gap > 2 * doubt for gap in gaps)


def lowered(count: int) -> int:
    """The next rung below `count` tokens."""
    return next((rung for rung in LADDER if rung < count), count)


def medoids(keys: torch.Tensor, count: int) -> torch.Tensor:
    """fp64 ``[L, H_kv, n, D]`` -> ``[L, H_kv, count]``, ascending; no token for a `count` of 0.

    K-means from the tokens in the middles of `count` equal stretches, ten times; then each centroid, in order, takes
    the nearest token that is left. Of equally near ones the first; a centroid without tokens stays where it is.
    """
    chosen = []
    for points in keys.flatten(0, 1):
        size = len(points)
        equal = 1e-10 * float(points.square().sum(dim=-1).max())
        centroids = torch.stack([points[int((j + 0.5) * size / count)] for j in range(count)]) if count else points[:0]
        for _ in range(10 if count else 0):
            distance = (points[:, None] - centroids).square().sum(dim=-1)
            nearest = (distance <= distance.amin(dim=1, keepdim=True) + equal).byte().argmax(dim=1)
            before = centroids.clone()
            for j in nearest.unique().tolist():
                centroids[j] = points[nearest == j].mean(dim=0)
            if torch.equal(centroids, before):
                break
        left = list(range(size))
        for centroid in centroids:
            distance = (points[left] - centroid).square().sum(dim=-1)
            left.pop(int((distance <= distance.min() + equal).byte().argmax()))
        chosen.append(torch.tensor(sorted(set(range(size)) - set(left)), dtype=torch.int64))
    return torch.stack(chosen).view(*keys.shape[:2], count)
