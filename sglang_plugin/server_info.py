"""`/server_info` and `Engine.get_server_info()`: what this launch does to the cache."""

from __future__ import annotations

from typing import Any

from kvpolicy import __version__
from kvpolicy.quant.cache_format import CacheFormat
from kvpolicy.sglang_plugin.config import KVPolicyConfig


def launch_report(config: KVPolicyConfig) -> dict[str, Any]:
    """The configuration in values that JSON has.

    ``policies`` are all that a request may choose, by the names that it calls them; the first is the default.
    ``quant`` is None where the cache is stored in the precision of the model. A ``group`` of None is the largest that
    fits the model's heads, which responses tell as ``kv_quant_group``.
    """
    arms = [{"name": arm.name, "policy": arm.policy_name, "options": arm.options} for arm in config.arms.values()]
    return {
        "version": __version__,
        "policies": arms,
        "budget": config.budget,
        "period": config.period,
        "seed": config.seed,
        "trace": config.trace,
        "quant": None if config.cache_format is None else _quant_report(config.cache_format),
    }


def _quant_report(stored: CacheFormat) -> dict[str, Any]:
    return {
        "name": stored.name,
        "group": stored.group,
        "keys": stored.keys,
        "protect": stored.protect if stored.protects else None,
    }
