"""The contract of an eviction policy.

A policy is a frozen dataclass of hyperparameters with published defaults plus one pure function,
:meth:`Policy.select`. It never sees SGLang, slots or requests: it is given the resident tokens of
one request and answers which of them each KV head keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import torch

from kvpolicy.kernels import keyed_noise


class Granularity(StrEnum):
    """Who shares one set of kept tokens."""

    PER_HEAD = "per_head"  # each layer and KV head keeps its own
    PER_LAYER = "per_layer"  # one set for all KV heads of a layer
    PER_KV_HEAD_INDEX = "per_kv_head_index"  # one set per head index, for all layers
    GLOBAL = "global"  # one set for the request


@dataclass(frozen=True)
class Needs:
    """Observations that a policy reads; the engine records only what some policy asks for."""

    keys: bool = False
    values: bool = False


@dataclass(frozen=True)
class Noise:
    """Random numbers of one eviction round, keyed by (seed, eviction, layer, head, counter)."""

    seed: int
    eviction: int
    layers: tuple[int, ...]  # ids of the layers in this round, in the order of `Candidates.keys`
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def _keys(self, eviction: int, *counters: int) -> list[torch.Tensor]:
        """Key tensors that broadcast to ``[L, *counters]``."""
        rank = 1 + len(counters)
        axes = [torch.tensor(self.layers, device=self.device).view(-1, *[1] * (rank - 1))]
        for axis, size in enumerate(counters, start=1):
            axes.append(torch.arange(size, device=self.device).view(*[1] * axis, size, *[1] * (rank - axis - 1)))
        scalars = [torch.tensor(value, dtype=torch.int64, device=self.device) for value in (self.seed, eviction)]
        return [*scalars, *axes]

    def normal(self, rows: int, columns: int, *, redraw: bool = True) -> torch.Tensor:
        """``[L, rows, columns]`` standard normal fp32, one matrix per layer.

        With `redraw` false the eviction number is left out of the key: the same matrices each round.
        """
        return keyed_noise.standard_normal(*self._keys(self.eviction if redraw else -1, rows, columns))

    def uniform(self, heads: int, tokens: int) -> torch.Tensor:
        """``[L, heads, tokens]`` uniform fp64 in (0, 1)."""
        return keyed_noise.uniform(*self._keys(self.eviction, heads, tokens))


@dataclass(frozen=True)
class Candidates:
    """All resident tokens of one request at one eviction round, oldest first.

    keys, values : ``[L, H_kv, N, D]`` in the cache's dtype, keys after RoPE; None unless needed.
    shape : ``(L, H_kv, N)``, always there.

    Rows are in age order per head: row 0 is the oldest token that this head still holds, so the
    attention sinks of a policy that keeps them are rows ``0 .. sinks - 1`` for good.
    """

    shape: tuple[int, int, int]
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def require(self, name: str) -> torch.Tensor:
        """The tensor called `name`; a policy that did not declare its need is a programming error."""
        tensor: torch.Tensor | None = getattr(self, name)
        assert tensor is not None, f"{name} were not gathered: declare them in `needs`"
        return tensor


class Policy(ABC):
    """Base of all policies. Subclasses are frozen dataclasses; the constructor only stores."""

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs()
    granularity: ClassVar[Granularity] = Granularity.PER_HEAD

    def forced(self, period: int) -> int:
        """Tokens kept whatever their score (sinks + recent); the budget must exceed them."""
        return 0

    def due(self, resident: int, budget: int, period: int) -> bool:
        """Whether a request with `resident` tokens is to be compacted before its next decode step."""
        return resident >= budget + period

    def n_keep(self, resident: int, budget: int) -> int:
        """Resident tokens right after an eviction of `resident` tokens."""
        return min(resident, budget)

    @abstractmethod
    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        """Choose the tokens to keep.

        Returns int64 ``[L, H_kv, n_keep]``: per layer and head distinct indices into ``0 .. N - 1``,
        ascending (age order). Deterministic given `noise`; must not modify `candidates`.
        """
