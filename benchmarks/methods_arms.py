"""The arms of methods.py: every method, with options that fit a budget of 128 where its defaults do not."""

from __future__ import annotations

from pathlib import Path

# Methods whose published segments, partitions or windows are longer than a small budget, and what they get instead.
FITTED = {
    "lagkv": "lag:16",
    "lagkv-ratio": "lag:64;sinks:4",
    "epikv-seg": "segment:32;keep_high:16;keep_middle:8;keep_low:2",
    "epikv-lag": "chunk:32",
    "thinkv": "segment:32",
    "alpha": "base:triattention[stats:{statistics};mode:global]",
    "triattention": "stats:{statistics}",
}
# Trained gates exist for few models; they are named by the user.
NEEDS_GATES = ("seerattention-r",)


def small_arms(statistics: Path) -> list[str]:
    """Every registered method, as `kv_policy` names it."""
    from kvpolicy.policies.registry import POLICIES

    arms = []
    for name in POLICIES:
        if name not in NEEDS_GATES:
            options = FITTED.get(name, "").format(statistics=statistics)
            arms.append(f"{name}[{options}]" if options else name)
    return arms
