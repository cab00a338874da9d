"""`KVPolicyConfig`: every `kv_*` argument, validated once, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.policies.base import Band
from kvpolicy.policies.reading import ReadingPolicy
from kvpolicy.quant.cache_format import FORMATS, CacheFormat
from kvpolicy.sglang_plugin.arms import Arm, parse_arms
from kvpolicy.sglang_plugin.errors import KVPolicyError


@dataclass(frozen=True)
class KVPolicyConfig:
    """How the KV cache of every request is held to its budget.

    Parameters
    ----------
    policy : str
        One or more arms, ``arm|arm|…``, among which requests may choose; the first is the default. An
        arm is a name of `kvpolicy.policies.registry` or ``package.module:Class``, and may be followed
        by options of its own: ``vase-attnv[reserve:random;sample:false]``.
    budget : int
        Resident tokens per layer and KV head right after an eviction, prompt and recent included.
    period : int
        Tokens that are appended before the next eviction.
    seed : int
        Key of all random choices.
    options : str
        ``name:value;name:value``, over the published defaults of the one policy that is named.
    trace : str or None
        Folder that receives, for each finished request, which tokens every head kept.
    quant : str or None
        Low-bit storage of values, a name of `kvpolicy.quant.cache_format`; None stores them in the model's precision.
    quant_group, protect, quant_keys
        Of that format; None is its default. `period` newest tokens of a request are protected by ``range-`` formats.

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
    quant: str | None = None
    quant_group: int | None = None
    protect: float | None = None
    quant_keys: str | None = None

    def __post_init__(self) -> None:
        check_numbers(budget=self.budget, period=self.period, seed=self.seed)
        self._check_quant()
        for arm in self.arms.values():
            arm.check(self.budget, self.period)
            self._check_widths(arm)

    @functools.cached_property
    def arms(self) -> dict[str, Arm]:
        """The arms by the name that a request calls them, the default first."""
        return parse_arms(self.policy, self.options)

    def _check_quant(self) -> None:
        """Raise KVPolicyError if the arguments of low-bit storage make no format, or would have no effect."""
        of_format = {"kv_quant_group": self.quant_group, "kv_protect": self.protect, "kv_quant_keys": self.quant_keys}
        given = [name for name, value in of_format.items() if value is not None]
        if self.quant is None and given:
            raise KVPolicyError(_idle(given))
        if self.cache_format is not None and not self.cache_format.protects and self.protect is not None:
            raise KVPolicyError(
                f"kv_protect would have no effect with kv_quant={self.quant}; use kv_quant=range-{self.quant}."
            )

    def _check_widths(self, arm: Arm) -> None:
        """Raise KVPolicyError unless the cache has the most bits that the policy would store a token in."""
        wanted = max(arm.policy.widths, default=None)
        if wanted is not None and (self.cache_format is None or self.cache_format.value_bits != wanted):
            raise KVPolicyError(
                f"{arm.name} stores tokens in {' or '.join(map(str, arm.policy.widths))} bits, in a cache of {wanted}; "
                f"use kv_quant=int{wanted} or kv_quant=range-int{wanted}, or leave its ladder out."
            )

    @functools.cached_property
    def cache_format(self) -> CacheFormat | None:
        """How the cache is stored; None in the model's precision."""
        if self.quant is None:
            return None
        chosen: dict[str, Any] = {"group": self.quant_group, "protect": self.protect, "keys": self.quant_keys}
        try:
            return CacheFormat(self.quant, **{name: value for name, value in chosen.items() if value is not None})
        except ValueError as error:
            raise KVPolicyError(f"{error}.") from error

    @property
    def query_window(self) -> int:
        """How many of the newest queries of each request some arm reads; 0 if none does."""
        return max(arm.policy.needs(self.period).queries for arm in self.arms.values())

    @property
    def hidden_bands(self) -> tuple[Band, ...]:
        """Bands of layers whose change of hidden state some arm reads."""
        bands = (band for arm in self.arms.values() for band in arm.policy.needs(self.period).hidden_bands)
        return tuple(dict.fromkeys(bands))

    @property
    def reads_a_part(self) -> bool:
        """Whether some arm keeps everything and reads a part of it."""
        return any(isinstance(arm.policy, ReadingPolicy) for arm in self.arms.values())

    @property
    def bounds_requests(self) -> bool:
        """Whether some arm bounds how many tokens a request holds."""
        return any(arm.policy.most_resident(self.budget, self.period) is not None for arm in self.arms.values())

    @property
    def taps(self) -> bool:
        """Whether something of each running request is recorded beside the cache."""
        return bool(self.query_window or self.hidden_bands)


def check_numbers(**numbers: Any) -> None:
    """Raise KVPolicyError unless `budget` and `period` are positive and `seed` not negative, and whole."""
    for name, value in numbers.items():
        least = 0 if name == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, int):
            raise KVPolicyError(f"kv_{name} must be a whole number, got {value!r}.")
        if not least <= value < 2**63:
            raise KVPolicyError(f"kv_{name} must be at least {least} and fit 64 bits, got {value}.")


# Without a policy these have no effect, even if the cache is stored in low bits.
OF_POLICY = ("kv_budget", "kv_seed", "kv_options", "kv_trace")
# Without a format these have none.
OF_FORMAT = ("kv_quant_group", "kv_protect", "kv_quant_keys")
# The argument of each field, as `Engine(...)` keyword and lm-eval model_args key; `--kv-budget` on a command line.
ARGUMENTS = {f"kv_{field.name}": field for field in dataclasses.fields(KVPolicyConfig)}


def config_from(arguments: Mapping[str, Any]) -> KVPolicyConfig | None:
    """The configuration in `kv_*` arguments, or None when no policy is asked for.

    Values may be numbers or their text; a value of None counts as not given.

    Raises
    ------
    KVPolicyError
        On a bad value, or on other `kv_*` arguments without `kv_policy` or `kv_quant`: they would do nothing.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if "kv_policy" not in given:
        idle = set(given) & set(OF_POLICY) if "kv_quant" in given else set(given)
        if "kv_quant" in given and not str(given["kv_quant"]).startswith("range-"):
            idle |= set(given) & {"kv_period"}  # of a range- format it is how many of the newest tokens are protected
        if idle and idle <= set(OF_FORMAT):
            raise KVPolicyError(_idle(name for name in OF_FORMAT if name in idle))
        if idle:
            raise KVPolicyError(
                f"{', '.join(sorted(idle))} would have no effect without kv_policy; "
                "name a policy, or kv_policy=full to measure the uncompressed cache."
            )
        if not given:
            return None
        given["kv_policy"] = "full"
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = ARGUMENTS[name]
        kind = str(field.type).removesuffix(" | None")
        fields[field.name] = str(value) if kind == "str" else _number(name, value, whole=kind == "int")
    return KVPolicyConfig(**fields)


def _idle(names: Iterable[str]) -> str:
    return f"{', '.join(names)} would have no effect without kv_quant; name a format: {', '.join(FORMATS)}."


def _number(name: str, value: Any, *, whole: bool) -> Any:
    try:
        return (int if whole else float)(value) if isinstance(value, str) or not whole else value
    except (TypeError, ValueError):
        raise KVPolicyError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}.") from None
