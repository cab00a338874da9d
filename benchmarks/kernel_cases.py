"""What each paged operation is timed on, and how many bytes it cannot avoid to move.

Bytes are those that must cross the memory bus once: every operand that has to be read, every result that has to be
written. An operation that reads its keys twice, as window attention does, has no more for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvpolicy.kernels.compact_paged import compact_paged
from kvpolicy.kernels.fill_places import fill_places
from kvpolicy.kernels.fill_places_paged import fill_places_paged
from kvpolicy.kernels.gumbel_keys_paged import gumbel_keys_paged
from kvpolicy.kernels.keep_highest_paged import keep_highest_paged
from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.projected_energy_paged import projected_energy_paged
from kvpolicy.kernels.value_range_paged import value_range_paged
from kvpolicy.kernels.window_attention_paged import window_attention_paged
from kvpolicy.policies.paged import PagedCandidates
from kvpolicy.policies.vase_attnv import VaseAttnV
from kvpolicy.policies.vase_dkv import VaseDKV


class Sizes(NamedTuple):
    """Of a cache, and of requests that are all due: cut from budget + period tokens to budget."""

    layers: int
    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    budget: int
    period: int
    dtype: torch.dtype

    @property
    def resident(self) -> int:
        return self.budget + self.period

    def pool_bytes(self, requests: int) -> int:
        """Of keys and values together."""
        width = self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * requests * self.resident * width


class Workload:
    """Due requests in the pools of a process, random; the slots of all requests are scattered over the whole pool.

    Each has a seed of its own. `keep` is a random choice as an eviction leaves it, the newest tokens in it, ascending;
    `filled` is the same with kept tokens in their places.
    """

    def __init__(self, sizes: Sizes, requests: int, device: torch.device) -> None:
        self.sizes, self.requests = sizes, requests
        layers, heads, group, head_dim, budget, period, dtype = sizes
        generator = torch.Generator(device).manual_seed(0)
        slots = torch.randperm(requests * sizes.resident, generator=generator, device=device)

        def normal(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

        def pool() -> Pool:
            return Pool.of([normal(len(slots), heads, head_dim, dtype=dtype) for _ in range(layers)])

        def choice() -> torch.Tensor:
            order = torch.rand(layers, heads, sizes.resident, generator=generator, device=device)
            order[..., budget:] = 1
            return order.topk(budget, sorted=False).indices.sort().values

        self.keys, self.values = pool(), pool()
        split = slots.split(sizes.resident)
        self.rows, self.destination = Rows.of(split), Rows.of([row[:budget] for row in split])
        self.older, self.recent, self.n_keep = ([n] * requests for n in (budget, period, budget))
        self.queries = normal(requests, layers, heads * group, period, head_dim, dtype=dtype)
        self.projection = normal(requests, layers, head_dim, VaseDKV().rank, dtype=torch.float32)
        self.scores = torch.rand(layers, heads, self.rows.total, generator=generator, device=device)
        choices = [choice() for _ in range(requests)]
        self.keep, self.filled = torch.cat(choices, dim=-1), torch.cat([fill_places(keep) for keep in choices], dim=-1)
        places = torch.arange(budget, device=device).repeat(requests)
        self.moved, self.moved_to_fill = (int((keep != places).sum()) for keep in (self.keep, self.filled))  # rows
        self.seeds = torch.arange(requests, device=device)
        self.evictions = torch.full_like(self.seeds, 3)
        self.layer_ids = tuple(range(layers))

    def candidates(self, queries: int) -> PagedCandidates:
        """What the plugin would give a policy that reads so many queries, at most a period of them."""
        assert queries <= self.sizes.period, f"{queries = } of {self.sizes.period = }"
        return PagedCandidates(
            keys=self.keys,
            values=self.values,
            rows=self.rows,
            queries=self.queries[:, :, :, self.sizes.period - queries :] if queries else None,
            n_keep=tuple(self.n_keep),
            period=self.sizes.period,
            seeds=self.seeds,
            evictions=self.evictions,
            layers=self.layer_ids,
        )

    def bytes_of(self, tokens: int) -> int:
        """Of so many tokens' keys, or values, in all layers and heads."""
        return tokens * self.sizes.layers * self.sizes.kv_heads * self.sizes.head_dim * self.sizes.dtype.itemsize

    def numbers(self, tokens: int, width: int) -> int:
        """Bytes of a number of `width` bytes for each layer, head and token."""
        return tokens * self.sizes.layers * self.sizes.kv_heads * width


@dataclass(frozen=True)
class Case:
    """bytes : that `run` must move at least, see the file's docstring."""

    bytes: int
    run: Callable[[], object]


def value_range(work: Workload) -> Case:
    """Values and slots read; an fp32 number per token written."""
    tokens = work.rows.total
    moved = work.bytes_of(tokens) + work.rows.slots.nbytes + work.numbers(tokens, 4)
    return Case(moved, lambda: value_range_paged(work.values, work.rows))


def projected_energy(work: Workload) -> Case:
    """Keys, values, slots and projections read; an fp32 number per token written."""
    tokens = work.rows.total
    moved = 2 * work.bytes_of(tokens) + work.rows.slots.nbytes + work.projection.nbytes + work.numbers(tokens, 4)
    return Case(moved, lambda: projected_energy_paged(work.keys, work.values, work.rows, work.projection))


def window_attention(work: Workload) -> Case:
    """Keys of the older tokens, slots and queries read; an fp32 number per token written. As vase-attnv asks."""
    moved = work.bytes_of(sum(work.older)) + work.rows.slots.nbytes + work.queries.nbytes
    policy = VaseAttnV()
    return Case(
        moved + work.numbers(work.rows.total, 4),
        lambda: window_attention_paged(
            work.queries,
            work.keys,
            work.rows,
            work.older,
            domain="candidates",
            group="mean",
            pooling=policy.pooling,
            kernel=policy.kernel,
            temperature=policy.temperature,
        ),
    )


def gumbel_keys(work: Workload) -> Case:
    """An fp32 weight per token read, an fp64 key written."""
    keys = (work.seeds, work.evictions, work.layer_ids)
    return Case(work.numbers(work.rows.total, 4 + 8), lambda: gumbel_keys_paged(work.scores, work.rows, *keys))


def keep_highest(work: Workload) -> Case:
    """An fp32 score per token read, an int64 index per kept token written."""
    moved = work.numbers(work.rows.total, 4) + work.numbers(sum(work.n_keep), 8)
    sinks = VaseDKV().sinks
    return Case(moved, lambda: keep_highest_paged(work.scores, work.rows, work.n_keep, sinks=sinks, recent=work.recent))


def _moving(work: Workload, keep: torch.Tensor, rows: int, *, in_place: bool) -> Case:
    """So many rows of single heads read and written, of keys and of values; slots and indices of all tokens read."""
    tokens = work.destination.total
    indices = work.rows.slots.nbytes + work.destination.slots.nbytes + work.numbers(tokens, 8)
    pools = (work.keys, work.values)
    return Case(
        4 * rows * work.sizes.head_dim * work.sizes.dtype.itemsize + indices,
        lambda: compact_paged(pools, work.rows, keep, work.destination, in_place=in_place),
    )


def compact(work: Workload) -> Case:
    """In age order, in place: in each head all rows from the first evicted token on."""
    return _moving(work, work.keep, work.moved, in_place=True)


def compact_staged(work: Workload) -> Case:
    """All rows, as at a request's first eviction: by way of a buffer, which moves them twice."""
    return _moving(work, work.keep, work.keep.numel(), in_place=False)


def compact_filled(work: Workload) -> Case:
    """With kept tokens in their places: as many rows as are evicted."""
    return _moving(work, work.filled, work.moved_to_fill, in_place=True)


def fill_places_(work: Workload) -> Case:
    """An int64 index per kept token read, another written."""
    moved = work.numbers(work.destination.total, 8 + 8)
    return Case(moved, lambda: fill_places_paged(work.keep, work.destination))


def plain_name(name: str) -> str:
    """The operation whose tests, tests/kernels/test_<name>*.py, are those of `name` too."""
    return name.removesuffix("_staged").removesuffix("_filled")


OPERATIONS: dict[str, Callable[[Workload], Case]] = {
    "value_range": value_range,
    "projected_energy": projected_energy,
    "window_attention": window_attention,
    "gumbel_keys": gumbel_keys,
    "keep_highest": keep_highest,
    "fill_places": fill_places_,
    "compact": compact,
    "compact_staged": compact_staged,
    "compact_filled": compact_filled,
}
