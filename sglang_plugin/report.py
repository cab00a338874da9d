"""`meta_info["kv_policy"]`: what happened to the cache of one response."""

from __future__ import annotations

from typing import Any

from kvpolicy.sglang_plugin.request_settings import RequestSettings
from kvpolicy.sglang_plugin.residency import Residency

META_KEY = "kv_policy"


def response_report(
    state: Residency,
    settings: RequestSettings,
    bytes_per_token: float,
    full_bytes_per_token: float,
    beside: dict[str, int],
    retractions: int,
) -> dict[str, Any]:
    """The policy, and the measured residency in tokens and in bytes over all ranks.

    ``kv_bytes_full_mean`` and ``kv_bytes_full_end`` are what the uncompressed cache, of `full_bytes_per_token`, would
    have held at the same steps. `beside` is what the engine holds beside the cache for this request, whatever its
    policy, because some policy named at launch reads it: ``query_window_bytes``, ``hidden_change_bytes``.
    ``token_state_bytes`` is what this policy carries for its resident tokens: positions, statistics. ``code_bits_end``
    is there under a policy that asks for fewer bits than the cache has: how many a number of the tokens left at the end
    makes use of, on average; they take the bytes of the cache all the same.
    """
    statistics = state.statistics()
    kv_bytes = {
        f"kv_bytes_{name.removeprefix('resident_')}": statistics[name]
        * (full_bytes_per_token if name.startswith("full") else bytes_per_token)
        for name in ("resident_mean", "resident_peak", "resident_end", "full_mean", "full_end")
    }
    report = {
        "policy": settings.arm.policy_name,
        "options": settings.arm.options,
        "budget": settings.budget,
        "period": settings.period,
        "seed": settings.seed,
        "sampling_seed": settings.sampling_seed,
        **statistics,
        "retractions": retractions,
        "kv_bytes_per_token": bytes_per_token,
        **kv_bytes,
        **beside,
        "token_state_bytes": state.tokens.bytes if state.tokens is not None else 0,
    }
    if widths := settings.arm.policy.widths:
        end = statistics["resident_end"]
        report["code_bits_end"] = max(widths) if state.tokens is None else state.tokens.mean_code_bits(int(end))
    return report
