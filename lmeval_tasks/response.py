"""What a generated text remembers of its response, as lm-eval metrics.

Under the plugin each text carries ``meta_info``; under stock SGLang and other backends it is a plain
`str`, and the metrics that need more than the text are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def cut_off(text: str) -> bool | None:
    """Whether the response ended at the token limit; None if the text does not say."""
    reason = getattr(text, "meta_info", {}).get("finish_reason")
    return None if reason is None else reason["type"] == "length"


def metrics_of(text: str) -> dict[str, Any]:
    """``truncated`` (0 or 1) and ``kv_policy`` (the record of what happened to the cache), where known."""
    metrics: dict[str, Any] = {}
    if (truncated := cut_off(text)) is not None:
        metrics["truncated"] = int(truncated)
    if (record := getattr(text, "meta_info", {}).get("kv_policy")) is not None:
        metrics["kv_policy"] = record
    return metrics


def held_share(record: Mapping[str, Any]) -> float:
    """Mean KV bytes of one response over what the full cache would have held at the same steps."""
    full = record["kv_bytes_full_mean"]
    return record["kv_bytes_mean"] / full if full else 1.0


def mean_held_share(records: Sequence[Mapping[str, Any]]) -> float:
    """lm-eval aggregation of ``kv_policy``: the mean of :func:`held_share` over responses."""
    return sum(map(held_share, records)) / len(records)
