"""Every policy with its options: the rows that all generic policy tests run over.

A new policy is tested by adding one row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from kvpolicy.policies.base import Noise, Policy
from kvpolicy.policies.options import build
from kvpolicy.policies.registry import policy_type


@dataclass(frozen=True)
class Row:
    """A policy under some of its options.

    options : what `kv_options` would say, over the defaults.
    noise : keys of `Noise` that change what is kept; any other key must not.
    permutable : a token's score does not depend on its place among the others.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    noise: frozenset[str] = frozenset()
    permutable: bool = False

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}:{value}" for name, value in self.options.items())])

    def build(self, **overrides: str) -> Policy:
        """The policy, with `overrides` for those options that it has."""
        policy = policy_type(self.name)
        known = {option.name for option in dataclasses.fields(policy)}
        return build(policy, {**self.options, **{k: v for k, v in overrides.items() if k in known}})


ROWS = (
    Row("full"),
    Row("random", noise=frozenset({"seed", "eviction", "layer"})),
    Row("streaming-llm"),
    Row("vase-dkv", noise=frozenset({"seed", "eviction", "layer"}), permutable=True),
    Row("vase-dkv", {"rank": "3"}, noise=frozenset({"seed", "eviction", "layer"}), permutable=True),
    Row("curdkv", noise=frozenset({"seed", "layer"}), permutable=True),
    Row("curdkv", {"variant": "windowed"}),
    Row("curdkv", {"variant": "windowed", "window": "5"}),
)
# `full` never selects.
SELECTING = tuple(row for row in ROWS if row.name != "full")


def noise_of(layers: int, *, seed: int = 11, eviction: int = 2, layer: int = 0) -> Noise:
    """Noise for `layers` layers, the first of which has the id `layer`."""
    return Noise(seed, eviction, tuple(range(layer, layer + layers)))
