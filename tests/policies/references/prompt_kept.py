"""What the references of prompt-keeping methods share: the cut by score beside tokens that stay in any case."""

from __future__ import annotations

import math

import torch

from tests.policies.oracle import Kept, Snapshot


def highest(scores: dict[int, float], count: int) -> tuple[list[int], float]:
    """The `count` tokens with the highest scores, the oldest of equals, and the margin of the cut (see `Kept`)."""
    order = sorted(scores, key=lambda token: (-scores[token], token))
    if count in (0, len(order)):
        return order[:count], math.inf
    spread = scores[order[0]] - scores[order[-1]]
    gap = scores[order[count - 1]] - scores[order[count]]
    # Scores may be equal but for rounding: two tokens, in standard deviations, are 1 and -1 in each head.
    equal = spread <= 1e-9 * max(1.0, *map(abs, scores.values()))
    return order[:count], 0.0 if equal else gap / spread


def always_kept(positions: torch.Tensor, now: Snapshot, *, recent: int, sinks: int) -> list[int]:
    """Sinks, recent tokens and the prompt; of a prompt too long for the budget, the newest that fit beside the others.

    positions : int ``[N]`` of one head.
    """
    tokens = len(positions)
    stay = {*range(sinks), *range(tokens - recent, tokens)}
    prompt = [token for token in range(tokens) if positions[token] < now.prompt_len and token not in stay]
    room = now.budget - len(stay)
    return sorted(stay | set(prompt[max(0, len(prompt) - room) :]))


def recent_beside_prompt(recent: int, now: Snapshot) -> int:
    """Newest tokens that stay: more than `recent` where the prompt leaves less than a quarter of the budget, or 128."""
    place = min(128, now.budget // 4)
    return max(recent, place) if now.budget - now.prompt_len < place else recent


def keep_by_score(
    scores: torch.Tensor, positions: torch.Tensor, now: Snapshot, *, recent: int, sinks: int
) -> tuple[list[int], float]:
    """Fill the budget of one head with the highest ``scores [N]`` beside those that are always kept.

    Returns the kept tokens in age order, and the margin.
    """
    stay = always_kept(positions, now, recent=recent, sinks=sinks)
    rest = {token: float(scores[token]) for token in range(len(positions)) if token not in set(stay)}
    chosen, margin = highest(rest, now.budget - len(stay))
    return sorted(stay + chosen), margin


def for_all(indices: list[int], margin: float, now: Snapshot) -> Kept:
    """One set for all layers and heads."""
    layers, heads = now.positions.shape[:2]
    return Kept(
        torch.tensor(indices, dtype=torch.int64).expand(layers, heads, -1),
        torch.full((layers, heads), margin, dtype=torch.float64),
    )


def shared_positions(now: Snapshot) -> torch.Tensor:
    """``[N]``: the positions that all layers and heads hold, under a method with one set for all."""
    assert (now.positions == now.positions[0, 0]).all(), "layers and heads hold different tokens"
    return now.positions[0, 0]
