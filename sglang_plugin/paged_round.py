"""Eviction of many requests at once, where there are kernels: a few launches for all requests, layers and heads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.policies.paged import PagedCandidates, PagedPolicy
from kvpolicy.sglang_plugin.kernel_switch import kernels_on
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.query_taps import QueryTaps
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import residency_of


class Wanted(NamedTuple):
    """A request that is due, and its place in the batch."""

    place: int
    req: Any
    length: int
    settings: RequestSettings


class Due(NamedTuple):
    """A due request with the slots that it will move to.

    row : int64 ``[length]``, its slots, oldest token first.
    n_keep : tokens that it keeps.
    destination, left_over : int64, where these go, and which of its slots it will not need.
    """

    wanted: Wanted
    row: torch.Tensor
    n_keep: int
    destination: torch.Tensor
    left_over: torch.Tensor

    def keeping(self, count: int) -> Due:
        """The same for a policy that keeps only `count` tokens."""
        return self._replace(
            n_keep=count,
            destination=self.destination[:count],
            left_over=torch.cat([self.destination[count:], self.left_over]),
        )


def groups(due: Iterable[Wanted]) -> list[list[Wanted]]:
    """Requests that the same launches can serve: of one arm and one period."""

    def key(wanted: Wanted) -> tuple[str, int]:
        return wanted.settings.arm.name, wanted.settings.period

    return [list(group) for _, group in itertools.groupby(sorted(due, key=key), key=key)]


class PagedRounds:
    """The kernels' side of one scheduler process' evictions."""

    def __init__(self, pools: Pools, queries: QueryTaps | None, first_head: int) -> None:
        self._pools = pools
        self._queries = queries
        self._first_head = first_head
        self.on = kernels_on(pools.device)
        if self.on:
            self._kinds = [Pool.of(buffers) for buffers in pools.movable]

    def takes(self, req: Any, length: int, settings: RequestSettings) -> bool:
        """Whether a request's tokens are chosen by kernels."""
        policy, true_len = settings.arm.policy, length + residency_of(req).offset
        return (
            self.on
            and self._pools.packed is None  # no kernel chooses by rows that it has to unpack
            and isinstance(policy, PagedPolicy)
            and policy.has_kernels
            and true_len >= settings.needs.queries  # all requests of a launch have as many queries
        )

    def move(self, row: torch.Tensor, keep: torch.Tensor, destination: torch.Tensor) -> None:
        """Write what one request keeps (int64 ``[L, H, K]``, of its slots `row`) into its destination, kind by kind."""
        from kvpolicy.kernels.compact_paged import compact_paged

        compact_paged(self._kinds, Rows.of([row]), keep, Rows.of([destination]), in_place=False)

    def compact(self, due: list[Due]) -> None:
        """Choose for all of `due`, of one arm and period, and move what is kept.

        All rows are read before the first is written, unless every request moves within its own slots: a request
        that had to take slots from the tree may have taken those that another still reads.
        """
        from kvpolicy.kernels.compact_paged import compact_paged
        from kvpolicy.kernels.fill_places_paged import fill_places_paged

        settings = due[0].wanted.settings
        rows = Rows.of([each.row for each in due])
        states = [residency_of(each.wanted.req) for each in due]
        numbers = torch.tensor([[each.wanted.settings.seed for each in due], [state.evictions for state in states]])
        seeds, evictions = numbers.to(self._pools.device, non_blocking=True)
        queries = None
        if (count := settings.needs.queries) > 0:
            assert self._queries is not None, f"{settings.arm.name} reads queries, but none are recorded"
            true_lens = [len(each.row) + state.offset for each, state in zip(due, states, strict=True)]
            queries = self._queries.newest_of([each.wanted.req.kv.req_pool_idx for each in due], true_lens, count)
        policy = settings.arm.policy
        assert isinstance(policy, PagedPolicy)
        keys, values = self._kinds
        choice = policy.select_paged(
            PagedCandidates(
                keys=keys,
                values=values,
                rows=rows,
                queries=queries,
                n_keep=tuple(each.n_keep for each in due),
                period=settings.period,
                seeds=seeds,
                evictions=evictions,
                layers=self._pools.layers,
                first_head=self._first_head,
            )
        )
        destination, keep = Rows.of([each.destination for each in due]), choice.keep
        if not policy.reads_order(settings.period):
            keep = fill_places_paged(keep, destination)
        own = all(len(each.left_over) == len(each.row) - each.n_keep for each in due)
        compact_paged(self._kinds, rows, keep, destination, in_place=own)
