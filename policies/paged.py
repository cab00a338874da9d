"""Choosing for many requests at once: what a policy with kernels is given in place of one request's tensors.

A policy that has a `select_paged` chooses for all due requests, layers and KV heads in a few launches, whose number
does not depend on how many there are; it must keep exactly what its `select` keeps of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from kvpolicy.kernels import keyed_noise
from kvpolicy.kernels.paged import Pool, Rows


@dataclass(frozen=True)
class PagedCandidates:
    """All resident tokens of ``R`` due requests under one policy, where they lie.

    keys, values : pools of all layers.
    rows : the slots of each request, oldest token first; ``T`` in all.
    queries : ``[R, L, H_q, w, D]``, the newest of each request, as many as the policy needs; None if it needs none.
    n_keep : tokens that each request may keep.
    period : eviction period of all of them.
    seeds, evictions : int64 ``[R]`` on the device; what :class:`Noise` of each request is keyed by.
    layers, first_head : as in :class:`Noise`.
    """

    keys: Pool
    values: Pool
    rows: Rows
    queries: torch.Tensor | None
    n_keep: tuple[int, ...]
    period: int
    seeds: torch.Tensor
    evictions: torch.Tensor
    layers: tuple[int, ...]
    first_head: int = 0

    def uniform(self, stream: int = 0) -> torch.Tensor:
        """fp64 ``[L, H_kv, T]``: of each request what `Noise.uniform` gives it alone."""
        from kvpolicy.kernels.gumbel_keys_paged import uniform_paged

        heads, keys = self.keys.shape[2], (self.seeds, self.evictions, self.layers)
        return uniform_paged(self.rows, *keys, heads, first_head=self.first_head, stream=stream)

    def normal(self, rows: int, columns: int, *, redraw: bool = True) -> torch.Tensor:
        """fp32 ``[R, L, rows, columns]``: of each request what `Noise.normal` gives it alone."""
        device = self.seeds.device
        evictions = self.evictions if redraw else torch.full_like(self.evictions, -1)
        layers = torch.tensor(self.layers).to(device, non_blocking=True)
        row, column = (torch.arange(size, device=device) for size in (rows, columns))
        return keyed_noise.standard_normal(
            self.seeds.view(-1, 1, 1, 1),
            evictions.view(-1, 1, 1, 1),
            layers.view(1, -1, 1, 1),
            row.view(1, 1, -1, 1),
            column,
        )

    def attention(self, older: Sequence[int], **how: Any) -> torch.Tensor:
        """fp32 ``[L, H_kv, T]``: attention of the newest queries to the oldest `older` tokens of each row, +inf beyond;
        `how` as in :func:`window_attention`."""
        from kvpolicy.kernels.window_attention_paged import window_attention_paged

        assert self.queries is not None, "queries were not gathered: declare them in `needs`"
        return window_attention_paged(self.queries, self.keys, self.rows, older, **how)


class PagedChoice(NamedTuple):
    """What is kept: int64 ``[L, H_kv, K]``, each request's indices within its row, ascending, one request after the
    other; and int64 ``[R + 1]``, where each request begins."""

    keep: torch.Tensor
    starts: torch.Tensor


@runtime_checkable
class PagedPolicy(Protocol):
    """A policy that may choose for many requests at once."""

    @property
    def has_kernels(self) -> bool:
        """Whether it can under its options; else it is asked request by request."""

    def select_paged(self, candidates: PagedCandidates) -> PagedChoice:
        """The same tokens as `select` keeps of each request."""
