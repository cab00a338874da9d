"""Whole eviction rounds of several due requests: the choice of a policy by its kernels, then the compaction."""

from __future__ import annotations

from typing import NamedTuple

from kernel_cases import OPERATIONS, Case, Workload

from kvpolicy.kernels.compact_paged import compact_paged
from kvpolicy.kernels.fill_places_paged import fill_places_paged
from kvpolicy.policies.base import Policy
from kvpolicy.policies.paged import PagedChoice, PagedPolicy
from kvpolicy.policies.vase_attnv import VaseAttnV
from kvpolicy.policies.vase_dkv import VaseDKV


def choose(policy: Policy, work: Workload) -> PagedChoice:
    """What `policy` keeps of each request; random numbers are drawn in it."""
    assert isinstance(policy, PagedPolicy), f"{policy.name} chooses for one request at a time"
    return policy.select_paged(work.candidates(policy.needs(work.sizes.period).queries))


def evict(policy: Policy, work: Workload) -> None:
    """The choice, and the compaction in place, as at every eviction of a request but its first."""
    pools, keep = (work.keys, work.values), choose(policy, work).keep
    if not policy.reads_order(work.sizes.period):
        keep = fill_places_paged(keep, work.destination)
    compact_paged(pools, work.rows, keep, work.destination, in_place=True)


class Round(NamedTuple):
    """operations : those that the choice and the compaction consist of."""

    policy: Policy
    operations: tuple[str, ...]

    def case(self, work: Workload) -> Case:
        """The bytes are those of the operations, each as it is timed alone."""
        moved = sum(OPERATIONS[name](work).bytes for name in self.operations)
        return Case(moved, lambda: evict(self.policy, work))


ROUNDS = {
    "vase-dkv": Round(VaseDKV(), ("projected_energy", "keep_highest", "fill_places", "compact_filled")),
    "vase-attnv": Round(
        VaseAttnV(), ("value_range", "keep_highest", "window_attention", "gumbel_keys", "keep_highest", "compact")
    ),
}
