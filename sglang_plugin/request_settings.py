"""What a single request may choose: `custom_params` with `kv_policy`, `kv_budget`, `kv_period`, `kv_seed`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.kernels.keyed_noise import mixed_seed
from kvpolicy.policies.base import Needs
from kvpolicy.sglang_plugin.arms import Arm, canonical
from kvpolicy.sglang_plugin.config import KVPolicyConfig, check_numbers
from kvpolicy.sglang_plugin.errors import KVPolicyError

PARAMETERS = ("kv_policy", "kv_budget", "kv_period", "kv_seed")
# Which of the `n` samples of one request this is. Set by the plugin itself (incoming.SampleNumbers).
SAMPLE_KEY = "__kvpolicy_sample"


@dataclass(frozen=True)
class RequestSettings:
    """How one request's cache is held to its budget.

    seed : keys the evictions.
    sampling_seed : keys the choice of each token, 0 ≤ seed < 2**63; None leaves it to SGLang.
    """

    arm: Arm
    budget: int
    period: int
    seed: int
    sampling_seed: int | None = None

    @property
    def needs(self) -> Needs:
        """What the policy reads."""
        return self.arm.policy.needs(self.period)


def request_settings(
    config: KVPolicyConfig, custom_params: Mapping[str, Any] | None, sampling_seed: int | None = None
) -> RequestSettings:
    """The settings of a request: those of the launch, overridden by its `custom_params`.

    The choice of tokens is keyed by SGLang's own `sampling_seed` (`seed` of the OpenAI API) if the
    request has one, else by its `kv_seed`, if that is given; and by the number of the sample, where
    one request asks for several (`n`).

    A value of None counts as not given.

    Raises
    ------
    KVPolicyError
        On an unknown `kv_` parameter, a policy that was not named at launch, a value that is no whole
        number, or a budget, period or query window beyond what the launch provides for.
    """
    parameters = {str(name): value for name, value in (custom_params or {}).items() if value is not None}
    given = {name: value for name, value in parameters.items() if name.startswith("kv_")}
    for name in given:
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise KVPolicyError(f"custom_params has no {name}: a request may set {', '.join(PARAMETERS)}{hint}")
    arm = _chosen_arm(config, given.get("kv_policy"))
    budget, period = given.get("kv_budget", config.budget), given.get("kv_period", config.period)
    seed = given.get("kv_seed", config.seed)
    check_numbers(budget=budget, period=period, seed=seed)
    for name, value, limit in (("budget", budget, config.budget), ("period", period, config.period)):
        if value > limit:
            raise KVPolicyError(
                f"kv_{name}={value} of a request exceeds the kv_{name}={limit} of the launch; "
                "a request may ask for less, not for more."
            )
    arm.check(budget, period)
    sample = parameters.get(SAMPLE_KEY, 0)
    token_seed = seed if sampling_seed is None and "kv_seed" in given else sampling_seed
    settings = RequestSettings(
        arm,
        budget,
        period,
        seed if sample == 0 else mixed_seed(seed, sample),
        None if token_seed is None else mixed_seed(token_seed, sample),
    )
    if settings.needs.queries > config.query_window:
        raise KVPolicyError(
            f"{arm.name} would read {settings.needs.queries} queries with kv_period={period}, but the launch "
            f"records {config.query_window}; leave kv_period at {config.period}."
        )
    return settings


def _chosen_arm(config: KVPolicyConfig, name: Any) -> Arm:
    if name is None:
        return next(iter(config.arms.values()))
    if isinstance(name, str):
        name = canonical(name)
    if not isinstance(name, str) or name not in config.arms:
        raise KVPolicyError(
            f"kv_policy {name!r} of a request was not named at launch; "
            f"it serves {' | '.join(config.arms)}: add it there as kv_policy='a|b'."
        )
    return config.arms[name]
