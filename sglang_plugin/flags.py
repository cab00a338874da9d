"""The `--kv-…` flags of `sglang serve` and `python -m sglang.launch_server`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvpolicy.policies.registry import POLICIES
from kvpolicy.quant.cache_format import FORMATS, KEY_FORMATS, SINKS
from kvpolicy.sglang_plugin.config import ARGUMENTS

_HELP = {
    "kv_policy": f"eviction policy: {', '.join(POLICIES)}, or package.module:Class. 'full' evicts nothing and "
    "measures; without this flag SGLang is untouched. Several as 'a|b|c': requests choose among them with "
    'custom_params={"kv_policy": "b"}, the first is the default; options of one go behind its name, '
    "'vase-attnv[reserve:random;sample:false]'",
    "kv_budget": "resident tokens per layer and KV head right after an eviction, prompt and recent tokens "
    "included (default 4096)",
    "kv_period": "tokens appended between two evictions of a request (default 64)",
    "kv_seed": "key of all random choices of a policy (default 0)",
    "kv_options": "hyperparameters of the policy as name:value;name:value, over its published defaults",
    "kv_trace": "folder that receives, per finished request, which tokens each layer and KV head kept",
    "kv_quant": f"low-bit storage of values: {', '.join(FORMATS)}. range-… keeps the first {SINKS} tokens, the newest "
    "kv_period and those of largest value range, per layer and KV head, in the model's precision. May be given with a "
    "policy or without one",
    "kv_quant_group": "channels that share a scale: 16, 32, 64 or the head size (default the largest of the three that "
    "divides it)",
    "kv_protect": "share of the resident tokens that range-… protects for their range (default 0.05)",
    "kv_quant_keys": f"low-bit storage of keys too: {', '.join(KEY_FORMATS)} (default none)",
}


def add_flags(parser: argparse.ArgumentParser, check: Callable[[], None] | None = None) -> None:
    """Add the group of flags to `parser`; all default to None, which means not given.

    `check` runs when a flag is met on the command line, and may raise KVPolicyError: the place to find
    out that the hook that reads the flags is missing.
    """

    class Store(argparse.Action):
        def __call__(
            self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, _: str | None = None
        ) -> None:
            if check is not None:
                check()
            setattr(namespace, self.dest, values)

    group = parser.add_argument_group(
        "KV policy (kvpolicy)", "Hold each request's KV cache to a budget, or to few bits."
    )
    for name in ARGUMENTS:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, action=Store, default=None, help=_HELP[name])
