"""What a generated text remembers of its response, as lm-eval metrics.

Under the plugin each text carries ``meta_info``; under stock SGLang and other backends it is a plain
`str`, and the metrics that need more than the text are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KVRecord = Mapping[str, Any]


def cut_off(text: str) -> bool | None:
    """Whether the response ended at the token limit; None if the text does not say."""
    reason = _meta_info(text).get("finish_reason")
    return None if reason is None else reason["type"] == "length"


def tokens_of(text: str) -> int | None:
    """Length of the response in tokens, thinking included; None if the text does not say."""
    tokens: int | None = _meta_info(text).get("completion_tokens")
    return tokens


def record_of(text: str) -> KVRecord | None:
    """What happened to the response's KV cache; None if the text does not say."""
    record: KVRecord | None = _meta_info(text).get("kv_policy")
    return record


def _meta_info(text: str) -> Mapping[str, Any]:
    return getattr(text, "meta_info", None) or {}


def held_share(record: KVRecord) -> float:
    """Mean KV bytes of one response over what the full cache would have held at the same steps."""
    full = record["kv_bytes_full_mean"]
    return record["kv_bytes_mean"] / full if full else 1.0


def mean_held_share(items: Sequence[KVRecord | Sequence[KVRecord]]) -> float:
    """lm-eval aggregation of ``kv_policy``: the mean of :func:`held_share` over a document's responses, then over all.

    items : per document its record, or the list of them where it has several.
    """
    shares = []
    for item in items:
        records = [item] if isinstance(item, Mapping) else item
        shares.append(sum(map(held_share, records)) / len(records))
    return sum(shares) / len(shares)
