"""Names of the policies. Each entry is a factory, so that listing names imports no method."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable

from kvpolicy.policies.base import Policy

PolicyType = type[Policy]


def _factory(module: str, attribute: str) -> Callable[[], PolicyType]:
    def load() -> PolicyType:
        policy: PolicyType = getattr(importlib.import_module(f"kvpolicy.policies.{module}"), attribute)
        return policy

    return load


POLICIES: dict[str, Callable[[], PolicyType]] = {
    "full": _factory("full", "Full"),
    "random": _factory("random_eviction", "RandomEviction"),
    "streaming-llm": _factory("streaming_llm", "StreamingLLM"),
    "vase-attnv": _factory("vase_attnv", "VaseAttnV"),
    "vase-dkv": _factory("vase_dkv", "VaseDKV"),
    "evict-large-range": _factory("value_range_eviction", "EvictLargeRange"),
    "evict-small-range": _factory("value_range_eviction", "EvictSmallRange"),
    "snapkv": _factory("snapkv", "SnapKV"),
    "curdkv": _factory("curdkv", "CurDKV"),
    "rkv": _factory("rkv", "RKV"),
    "h2o": _factory("h2o", "H2O"),
    "tova": _factory("tova", "TOVA"),
    "keydiff": _factory("keydiff", "KeyDiff"),
    "lagkv": _factory("lagkv", "LagKV"),
    "lagkv-ratio": _factory("lagkv_ratio", "LagKVRatio"),
    "raas": _factory("raas", "RaaS"),
    "thinkv": _factory("thinkv", "ThinKV"),
    "triattention": _factory("triattention", "TriAttention"),
    "alpha": _factory("alpha", "Alpha"),
    "epikv": _factory("epikv", "EpiKV"),
    "epikv-seg": _factory("epikv_seg", "EpiKVSeg"),
    "epikv-lag": _factory("epikv_lag", "EpiKVLag"),
    "quest": _factory("quest", "Quest"),
    "seerattention-r": _factory("seerattention_r", "SeerAttentionR"),
}


def policy_type(name: str) -> PolicyType:
    """The class behind a policy name, or behind ``package.module:Class`` for a policy of your own.

    Raises
    ------
    ValueError
        If there is no such policy; the message names the nearest and all known ones.
    """
    if ":" in name:
        return _imported(name)
    if name not in POLICIES:
        near = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"kv_policy {name!r} is not known;{hint} known: {', '.join(POLICIES)}")
    return POLICIES[name]()


def _imported(path: str) -> PolicyType:
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"kv_policy {path!r} could not be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"kv_policy {path!r} is not a subclass of kvpolicy.policies.base.Policy")
    if not dataclasses.is_dataclass(found) or inspect.isabstract(found) or not hasattr(found, "name"):
        raise ValueError(f"kv_policy {path!r} must be a dataclass with a name and all methods of Policy")
    return found
