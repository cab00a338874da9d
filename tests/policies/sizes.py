"""Requests of ugly sizes, and what a policy of the matrix keeps of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvpolicy.policies.base import Candidates, Policy
from tests.policies.candidates import random_candidates
from tests.policies.matrix import Row, noise_of

PERIOD = 16


@dataclass(frozen=True)
class Size:
    label: str
    layers: int
    heads: int
    tokens: int
    head_dim: int
    n_keep: int
    sinks: int
    recent: int
    dtype: torch.dtype = torch.float32
    group: int = 2

    def __str__(self) -> str:
        return self.label

    def policy(self, row: Row) -> Policy:
        return row.fitted(PERIOD, sinks=self.sinks, recent=self.recent, head_dim=self.head_dim)

    def fits(self, row: Row) -> bool:
        """Whether there is room for what the policy keeps in any case, and a recent token for each query it scores."""
        policy = self.policy(row)
        windowed = row.has("window") and policy.needs(PERIOD).queries > self.recent
        return policy.forced(PERIOD) <= self.n_keep and not windowed

    def candidates(self, row: Row, seed: int = 0) -> Candidates:
        """With what the policy of `row` asks for, before it observed anything."""
        policy = self.policy(row)
        needs = policy.needs(PERIOD)
        found = random_candidates(
            self.layers,
            self.heads,
            self.tokens,
            self.head_dim,
            dtype=self.dtype,
            seed=seed,
            group=self.group,
            queries=needs.queries,
            bands=len(needs.hidden_bands),
            alike=not row.separate,
        )
        if not policy.accumulates:
            return found
        unseen = found.true_len - found.previous_len
        return replace(found, statistic=torch.full(found.shape, torch.nan), unseen=unseen)


SIZES = (
    Size("one token", 1, 1, 1, 60, n_keep=1, sinks=1, recent=0),
    Size("63 tokens of one head", 2, 1, 63, 64, n_keep=40, sinks=4, recent=16),
    Size("111 tokens in bf16", 3, 2, 111, 80, n_keep=100, sinks=4, recent=8, dtype=torch.bfloat16),
    Size("budget + 1", 2, 2, 33, 96, n_keep=32, sinks=4, recent=16, group=1),
    Size("nothing but the forced", 1, 3, 50, 128, n_keep=20, sinks=4, recent=16, group=7),
    Size("one recent token and no sink", 2, 2, 31, 60, n_keep=12, sinks=0, recent=1, dtype=torch.float16),
    Size("nothing forced", 2, 2, 63, 64, n_keep=31, sinks=0, recent=0, dtype=torch.float16),
)


def room(row: Row, size: Size, candidates: Candidates) -> int:
    """What the policy is asked to keep, for a budget of the size's."""
    tokens = candidates.shape[2]
    return size.policy(row).n_keep(tokens, size.n_keep, evicted=candidates.true_len - tokens)


def select(row: Row, size: Size, candidates: Candidates | None = None, **noise: int) -> torch.Tensor:
    """What the policy keeps, after it observed the queries that it had not seen."""
    policy, given = size.policy(row), candidates or size.candidates(row)
    if policy.accumulates:
        given = replace(given, statistic=policy.observe(given, PERIOD), unseen=0)
    return policy.select(given, room(row, size, given), PERIOD, noise_of(given.shape[0], **noise))


def declared(row: Row, size: Size) -> dict[str, str]:
    """Each field of `Needs` that the policy sets, and the tensor of `Candidates` that it stands for."""
    needs = size.policy(row).needs(PERIOD)
    tensors = {"hidden_bands": "hidden_change"}
    names = ("keys", "values", "queries", "positions", "hidden_bands")
    return {name: tensors.get(name, name) for name in names if getattr(needs, name)}
