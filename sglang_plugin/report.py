"""`meta_info["kv_policy"]`: what happened to the cache of one response."""

from __future__ import annotations

from typing import Any

from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.residency import Residency

META_KEY = "kv_policy"


def response_report(
    state: Residency, config: KVPolicyConfig, bytes_per_token: float, retractions: int
) -> dict[str, Any]:
    """The policy, and the measured residency in tokens and in bytes over all ranks.

    ``kv_bytes_full_mean`` and ``kv_bytes_full_end`` are what the uncompressed cache would have held
    at the same steps.
    """
    statistics = state.statistics()
    kv_bytes = {
        f"kv_bytes_{name.removeprefix('resident_')}": statistics[name] * bytes_per_token
        for name in ("resident_mean", "resident_peak", "resident_end", "full_mean", "full_end")
    }
    return {
        "policy": config.policy,
        "budget": config.budget,
        "period": config.period,
        "seed": config.seed,
        "options": config.options,
        **statistics,
        "retractions": retractions,
        "kv_bytes_per_token": bytes_per_token,
        **kv_bytes,
    }
