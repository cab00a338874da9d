"""`KVPolicyConfig`: every `kv_*` argument, validated once, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.policies.base import Policy
from kvpolicy.policies.options import build, parse_options
from kvpolicy.policies.registry import policy_type
from kvpolicy.sglang_plugin.errors import KVPolicyError


@dataclass(frozen=True)
class KVPolicyConfig:
    """How the KV cache of every request is held to its budget.

    Parameters
    ----------
    policy : str
        A name of `kvpolicy.policies.registry`, or ``package.module:Class``.
    budget : int
        Resident tokens per layer and KV head right after an eviction, prompt and recent included.
    period : int
        Tokens that are appended before the next eviction.
    seed : int
        Key of all random choices.
    options : str
        ``name:value;name:value``, over the policy's published defaults.
    trace : str or None
        Folder that receives, for each finished request, which tokens every head kept.

    Raises
    ------
    KVPolicyError
        On construction, if any of it cannot work; one sentence says what is allowed.
    """

    policy: str
    budget: int = 4096
    period: int = 64
    seed: int = 0
    options: str = ""
    trace: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("period", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise KVPolicyError(f"kv_{name} must be a whole number, got {value!r}.")
            if not least <= value < 2**63:
                raise KVPolicyError(f"kv_{name} must be at least {least} and fit 64 bits, got {value}.")
        forced = self.build_policy().forced(self.period)
        if self.policy != "full" and self.budget <= forced:
            raise KVPolicyError(
                f"kv_budget={self.budget} leaves nothing to choose: {self.policy} always keeps {forced} tokens "
                f"(sinks + recent), so the budget must be at least {forced + 1}; "
                "raise kv_budget, or lower kv_period or the policy's recent option."
            )

    def build_policy(self) -> Policy:
        """The policy object that this configuration names."""
        try:
            return build(policy_type(self.policy), parse_options(self.options))
        except ValueError as error:
            raise KVPolicyError(f"{error}.") from error


# The argument of each field, as `Engine(...)` keyword and lm-eval model_args key; `--kv-budget` on a command line.
ARGUMENTS = {f"kv_{field.name}": field for field in dataclasses.fields(KVPolicyConfig)}


def config_from(arguments: Mapping[str, Any]) -> KVPolicyConfig | None:
    """The configuration in `kv_*` arguments, or None when no policy is asked for.

    Values may be numbers or their text; a value of None counts as not given.

    Raises
    ------
    KVPolicyError
        On a bad value, or on other `kv_*` arguments without `kv_policy`: they would do nothing.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if "kv_policy" not in given:
        if given:
            raise KVPolicyError(
                f"{', '.join(sorted(given))} would have no effect without kv_policy; "
                "name a policy, or kv_policy=full to measure the uncompressed cache."
            )
        return None
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = ARGUMENTS[name]
        fields[field.name] = _whole_number(name, value) if field.type == "int" else str(value)
    return KVPolicyConfig(**fields)


def _whole_number(name: str, value: Any) -> Any:
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        raise KVPolicyError(f"{name} must be a whole number, got {value!r}.") from None
