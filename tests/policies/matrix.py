"""Every policy with its options: the rows that all generic policy tests run over.

A new policy is tested by adding one row.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kvpolicy.policies.base import Granularity, Noise, Policy
from kvpolicy.policies.options import build
from kvpolicy.policies.reading import ReadingPolicy
from kvpolicy.policies.registry import policy_type
from tests.policies.statistics_file import random_statistics, statistics_file

# Stands for a file of query statistics of a model with enough layers and heads.
STATISTICS = "STATISTICS"


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvpolicy-test-")


@functools.cache
def statistics_of(head_dim: int) -> str:
    """Of 8 layers and 4 KV heads."""
    return statistics_file(Path(folder().name), random_statistics(8, 4, 2, head_dim), f"{head_dim}.safetensors")


@dataclass(frozen=True)
class Row:
    """A policy under some of its options.

    options : what `kv_options` would say, over the defaults.
    noise : keys of `Noise` that change what is kept; any other key must not.
    permutable : a token's score does not depend on its place among the others.
    fewer : it may keep fewer tokens than it is asked for.
    budgeted : it evicts when a period is above the budget, and cuts to the budget.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    noise: frozenset[str] = frozenset()
    permutable: bool = False
    fewer: bool = False
    budgeted: bool = True

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}:{value}" for name, value in self.options.items())])

    def build(self, head_dim: int = 64, **overrides: str) -> Policy:
        """The policy, with `overrides` for those options that it has."""
        policy = policy_type(self.name)
        options = {**self.options, **{k: v for k, v in overrides.items() if k in fields_of(policy)}}
        for name, text in options.items():
            if STATISTICS in text:
                options[name] = text.replace(STATISTICS, statistics_of(head_dim))
        return build(policy, options)

    def has(self, option: str) -> bool:
        return option in fields_of(policy_type(self.name))

    @property
    def reads_queries(self) -> bool:
        return self.build().needs(1).queries > 0

    @property
    def separate(self) -> bool:
        """Whether each layer and KV head chooses for itself."""
        policy = self.build()
        return policy.shares == Granularity.PER_HEAD and not (policy.spans_layers or policy.spans_heads)

    def fitted(self, period: int, *, recent: int, sinks: int = 4, head_dim: int = 64) -> Policy:
        """The policy with so many sinks and recent tokens, and with a window of queries that fits into these."""
        forced = {"recent": str(recent), "sinks": str(sinks)}
        policy = self.build(head_dim, **forced)
        if policy.accumulates or policy.needs(period).queries <= recent:
            return policy
        return self.build(head_dim, **forced, window=str(max(1, recent)))


def fields_of(policy: type[Policy]) -> set[str]:
    return {option.name for option in dataclasses.fields(policy)}  # type: ignore[arg-type]


ALL = frozenset({"seed", "eviction", "layer"})
ROWS = (
    Row("full"),
    Row("random", noise=ALL),
    Row("streaming-llm"),
    Row("vase-attnv", noise=ALL),
    Row("vase-attnv", {"window": "5"}, noise=ALL),
    Row("vase-attnv", {"n_value_reserve": "8"}, noise=ALL),
    Row("vase-attnv", {"reserve": "variance"}, noise=ALL),
    Row("vase-attnv", {"reserve": "l2"}, noise=ALL),
    Row("vase-attnv", {"reserve": "random"}, noise=ALL),
    Row("vase-attnv", {"reserve": "off"}, noise=ALL),
    Row("vase-attnv", {"sample": "false"}),
    Row("vase-attnv", {"sample": "false", "reserve": "off"}),
    Row("vase-attnv", {"sample": "false", "reserve": "random"}, noise=ALL),
    Row("vase-attnv", {"pooling": "none"}, noise=ALL),
    Row("vase-attnv", {"pooling": "max", "kernel": "7"}, noise=ALL),
    Row("vase-attnv", {"temperature": "0.5"}, noise=ALL),
    Row("vase-dkv", noise=ALL, permutable=True),
    Row("vase-dkv", {"rank": "3"}, noise=ALL, permutable=True),
    Row("vase-dkv", {"projection": "fixed"}, noise=frozenset({"seed", "layer"}), permutable=True),
    Row("evict-large-range", permutable=True),
    Row("evict-large-range", {"measure": "variance"}, permutable=True),
    Row("evict-large-range", {"measure": "l2"}, permutable=True),
    Row("evict-small-range", permutable=True),
    Row("evict-small-range", {"measure": "variance"}, permutable=True),
    Row("evict-small-range", {"measure": "l2"}, permutable=True),
    Row("snapkv"),
    Row("snapkv", {"variant": "rkv"}),
    Row("snapkv", {"variant": "kvpress"}),
    Row("snapkv", {"window": "5", "pooling": "none", "group": "max"}),
    Row("curdkv", noise=frozenset({"seed", "layer"}), permutable=True),
    Row("curdkv", {"variant": "windowed"}),
    Row("curdkv", {"variant": "windowed", "window": "5"}),
    Row("rkv"),
    Row("rkv", {"variant": "paper"}),
    Row("rkv", {"variant": "vase"}),
    Row("rkv", {"window": "5", "threshold": "0", "group": "mean"}),
    Row("tova"),
    Row("keydiff", permutable=True),
    Row("lagkv", {"lag": "4"}),
    Row("lagkv", {"lag": "7"}),
    Row("lagkv-ratio", {"lag": "4"}, budgeted=False),
    Row("lagkv-ratio", {"lag": "5", "ratio": "0.3", "score_v_ratio": "0"}, budgeted=False),
    Row("h2o"),
    Row("h2o", {"recent_share": "0.2"}),
    Row("raas"),
    Row("raas", {"rule": "threshold", "alpha": "0.02"}),
    Row("thinkv", {"segment": "4", "least": "2"}, fewer=True),
    Row("thinkv", {"segment": "8", "low": "0.3", "high": "0.5"}, fewer=True),
    Row("triattention", {"stats": STATISTICS}, noise=frozenset({"layer"})),
    Row("triattention", {"stats": STATISTICS, "mode": "global"}, noise=frozenset({"layer"})),
    Row("triattention", {"stats": STATISTICS, "mode": "layer_head"}, noise=frozenset({"layer"})),
    Row("alpha", {"base": f"triattention[stats:{STATISTICS}]"}, noise=frozenset({"layer"})),
    Row("alpha", {"base": "keydiff"}),
    Row("alpha", {"base": "keydiff", "redundancy": "mean"}),
    Row("alpha", {"base": "keydiff", "redundancy": "sum"}),
    Row("alpha", {"base": "keydiff", "diversity": "0"}),
    Row("alpha", {"base": "vase-dkv"}, noise=ALL),
    Row("epikv"),
    Row("epikv", {"signal": "raw"}),
    Row("epikv", {"signal": "rolling", "window": "5"}),
    Row("epikv", {"signal": "adaptive"}),
    Row("epikv", {"value_reserve": "4"}),
    Row("epikv-seg", {"segment": "8", "keep_high": "4", "keep_middle": "2", "keep_low": "1"}, fewer=True),
    Row("epikv-seg", {"segment": "16", "value_reserve": "3"}, fewer=True),
    Row("epikv-lag", {"chunk": "8"}),
    Row("quest"),
    Row("seerattention-r", {"gates": "somewhere"}),
)
# The others never evict.
SELECTING = tuple(row for row in ROWS if row.name != "full" and not issubclass(policy_type(row.name), ReadingPolicy))
# By default their newest tokens are kept for one eviction period, under all options but `variant`.
RECENT_FOR_A_PERIOD = frozenset(
    {"random", "vase-attnv", "vase-dkv", "evict-large-range", "evict-small-range", "snapkv", "curdkv", "keydiff"}
)


def noise_of(layers: int, *, seed: int = 11, eviction: int = 2, layer: int = 0, head: int = 0) -> Noise:
    """Noise for `layers` layers, the first of which has the id `layer`, and for KV heads from the id `head` on."""
    return Noise(seed, eviction, tuple(range(layer, layer + layers)), first_head=head)
