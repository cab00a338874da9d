"""What methods share that score by the attention of a window of the newest queries, in several published forms."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvpolicy.kernels.window_attention import Domain, Group, Pooling, window_attention
from kvpolicy.policies.base import Candidates, Needs, Policy
from kvpolicy.policies.selecting import window_of_recent


class Window(NamedTuple):
    """How a published form looks at the newest queries; a size of None is the eviction period.

    domain : over which tokens attention is normalised, see :func:`window_attention`.
    """

    size: int | None
    pooling: Pooling
    kernel: int
    group: Group
    domain: Domain


@dataclass(frozen=True)
class WindowedPolicy(Policy):
    """A policy that reads a window of queries and keeps the tokens of these queries.

    Parameters
    ----------
    window, pooling, kernel, group
        None: as :attr:`published` has it.
    recent : int or None
        Newest tokens, always kept, at least the window; None: the window.
    sinks : int
        Oldest tokens that are always kept.
    """

    window: int | None = field(default=None, metadata={"least": 1})
    pooling: Pooling | None = None
    kernel: int | None = field(default=None, metadata={"least": 1, "odd": True})
    group: Group | None = None
    recent: int | None = None
    sinks: int = 0

    @property
    @abstractmethod
    def published(self) -> Window:
        """The form that the options start from."""

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, queries=self.window_size(period))

    def forced(self, period: int) -> int:
        return self.sinks + self.recent_count(period)

    def check(self, budget: int, period: int) -> None:
        super().check(budget, period)
        window_of_recent(self.name, self.window_size(period), self.recent_count(period))

    def window_size(self, period: int) -> int:
        """Queries of the window."""
        return self.window or self.published.size or period

    def recent_count(self, period: int) -> int:
        """Tokens that are kept because they are new."""
        return self.window_size(period) if self.recent is None else self.recent

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of :func:`window_attention` beside its tensors."""
        return {
            "domain": self.published.domain,
            "group": self.group or self.published.group,
            "pooling": self.pooling or self.published.pooling,
            "kernel": self.kernel or self.published.kernel,
        }

    def attention(self, candidates: Candidates, period: int) -> torch.Tensor:
        """fp32 ``[L, H_kv, N - recent]``: what the window pays to each older token."""
        older = candidates.shape[-1] - self.recent_count(period)
        return window_attention(candidates.require("queries"), candidates.require("keys"), older, **self.how)
