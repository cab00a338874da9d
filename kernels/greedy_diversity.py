"""Greedy choice of tokens that score high and differ from those already chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

Redundancy = Literal["max", "mean", "sum"]

GRID = 2.0**26
COLUMNS = 256  # cosines to so many chosen tokens are in memory at a time
BLOCK = (16, 64, 512)  # smallest, first and largest


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of ``[N, D]`` over their norm, fp64, rounded to multiples of ``2^-26``; zeros for one that has no direction.

    A dot product of two such rows adds up multiples of ``2^-52`` and never exceeds 1, so fp64 holds it exactly, in
    whatever order and on whatever device it is computed. Hence cosines of equal rows are equal, and methods that differ
    in how they multiply agree to the last bit.
    """
    rows = rows.double()
    length = rows.norm(dim=-1, keepdim=True)
    unit = torch.where((length > 0) & length.isfinite(), rows / length, 0)
    return (unit * GRID).round() / GRID


def greedy_diversity_reference(
    scores: torch.Tensor,
    signatures: torch.Tensor,
    certain: torch.Tensor,
    n_keep: int,
    *,
    weight: float,
    redundancy: Redundancy = "max",
) -> torch.Tensor:
    """Choose the token with the highest ``score - weight * redundancy``, again and again, until `n_keep` are chosen.

    Of equal ones the oldest is chosen. Redundancy is the largest, mean or sum of the cosines to all tokens chosen so
    far, negative ones too, and 0 while there are none.

    Parameters
    ----------
    scores : ``[N]`` float; NaN counts as the highest
    signatures : ``[N, D]`` float, of any length
    certain : bool ``[N]``
        Tokens that are chosen before all others, at most `n_keep`.
    weight : float
        At least 0.

    Returns
    -------
    int64 ``[n_keep]``, ascending.
    """
    scores, unit = _finite(scores), unit_rows(signatures)
    chosen = certain.nonzero()[:, 0].tolist()
    while len(chosen) < n_keep:
        value = scores.clone()
        if chosen:
            cosines = unit @ unit[chosen].T
            reduced = {"max": cosines.amax(dim=1), "mean": cosines.mean(dim=1), "sum": cosines.sum(dim=1)}
            value -= weight * reduced[redundancy]
        value[chosen] = -torch.inf
        chosen.append(int(value.argmax()))
    return torch.tensor(sorted(chosen), dtype=torch.int64, device=scores.device)


def greedy_diversity(
    scores: torch.Tensor,
    signatures: torch.Tensor,
    certain: torch.Tensor,
    n_keep: int,
    *,
    weight: float,
    redundancy: Redundancy = "max",
) -> torch.Tensor:
    """The same as :func:`greedy_diversity_reference`, faster; never more than ``N * 512`` cosines in memory.

    With the largest cosine, the value of a token only falls as others are chosen. So of the tokens with the highest
    values, a block, the best is the best of all for as long as it is above what the best token outside of the block
    was worth when the block was made: many are chosen with one small matrix of cosines, and then all others are
    brought up to date by one matrix product. A mean may fall, and a sum too where cosines are negative: these take
    a step of ``N * D`` for every token.
    """
    tokens = scores.shape[0]
    assert signatures.shape[:1] == certain.shape == scores.shape, f"{scores.shape}, {signatures.shape}, {certain.shape}"
    chosen = certain.nonzero()[:, 0]
    assert len(chosen) <= n_keep <= tokens, f"{len(chosen)} certain tokens, {n_keep = }, {tokens = }"
    scores, unit = _finite(scores), unit_rows(signatures)
    if len(chosen) == 0 and n_keep > 0:
        chosen = scores.argmax()[None]
    rest = torch.ones_like(certain).index_fill(0, chosen, False).nonzero()[:, 0]
    known = unit[chosen]
    choose = _by_blocks if redundancy == "max" else _one_by_one
    more = choose(scores[rest], unit[rest], known, n_keep - len(chosen), weight, redundancy)
    return torch.cat([chosen, rest[more]]).sort().values


def _finite(scores: torch.Tensor) -> torch.Tensor:
    return scores.double().nan_to_num(nan=torch.finfo(torch.float64).max)


def _parts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    for first in range(0, len(rows), COLUMNS):
        yield rows[first : first + COLUMNS]


def _one_by_one(
    scores: torch.Tensor, unit: torch.Tensor, known: torch.Tensor, count: int, weight: float, redundancy: Redundancy
) -> torch.Tensor:
    total = torch.zeros_like(scores)
    for part in _parts(known):
        total += (unit @ part.T).sum(dim=1)
    picked = torch.empty(count, dtype=torch.int64, device=scores.device)
    scores = scores.clone()
    for step in range(count):
        value = scores - weight * (total if redundancy == "sum" else total / (len(known) + step))
        best = value.argmax()
        picked[step] = best
        scores[best] = -torch.inf
        total += unit @ unit[best]
    return picked


def _by_blocks(
    scores: torch.Tensor, unit: torch.Tensor, known: torch.Tensor, count: int, weight: float, _: Redundancy
) -> torch.Tensor:
    nearest = torch.full_like(scores, -torch.inf)
    left = torch.arange(len(scores), device=scores.device)  # rows of what follows, in age order
    picked: list[torch.Tensor] = []
    size = BLOCK[1]
    while count > 0:
        for part in _parts(known):
            nearest = torch.maximum(nearest, (unit @ part.T).amax(dim=1))
        value = scores - weight * nearest
        inside = _highest(value, min(size, len(value)))
        outside = value.index_fill(0, inside, -torch.inf)
        rival = outside.argmax()
        taken = _best_of_block(
            scores[inside].cpu(),
            nearest[inside].cpu(),
            (unit[inside] @ unit[inside].T).cpu(),
            inside.tolist(),
            float(outside[rival]),
            int(rival),
            weight,
        )[:count]
        now = inside[torch.tensor(taken, device=inside.device)]
        picked.append(left[now])
        known, count = unit[now], count - len(taken)
        if len(taken) > size // 2:
            size = min(2 * size, BLOCK[2])
        elif len(taken) < size // 8:
            size = max(size // 2, BLOCK[0])
        stay = torch.ones_like(left, dtype=torch.bool).index_fill(0, now, False)
        scores, nearest, left, unit = scores[stay], nearest[stay], left[stay], unit[stay]
    return torch.cat([left[:0], *picked])


def _highest(value: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices of the `count` highest, the oldest of equals."""
    lowest = value.topk(count, sorted=False).values.amin()
    above, equal = value > lowest, value == lowest
    return (above | (equal & (equal.cumsum(0) <= count - above.sum()))).nonzero()[:, 0]


def _best_of_block(
    scores: torch.Tensor,
    nearest: torch.Tensor,
    cosines: torch.Tensor,
    place: list[int],
    bound: float,
    rival: int,
    weight: float,
) -> list[int]:
    """Rows of a block in the order in which they are chosen, until one outside may be better.

    bound, rival : highest value outside of the block and the oldest token that has it; place : the block's tokens.
    """
    taken: list[int] = []
    value = scores - weight * nearest
    while len(taken) < len(place):
        best = int(value.argmax())
        worth = float(value[best])
        if worth < bound or (worth == bound and place[best] > rival):
            break
        taken.append(best)
        scores[best] = -torch.inf
        nearest = torch.maximum(nearest, cosines[best])
        value = scores - weight * nearest
    return taken
