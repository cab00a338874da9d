"""The policies that one engine runs side by side, by the name under which a request asks for one."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.policies.base import ModelShape, Policy
from kvpolicy.policies.options import build, parse_options
from kvpolicy.policies.registry import policy_type
from kvpolicy.sglang_plugin.errors import KVPolicyError


@dataclass(frozen=True)
class Arm:
    """A policy with its options.

    name : as requests call it, brackets included.
    policy_name, options : the two parts of the name, for reports.
    """

    name: str
    policy_name: str
    options: str
    policy: Policy

    def check(self, budget: int, period: int) -> None:
        """Raise KVPolicyError if the policy cannot work with this budget and period."""
        try:
            self.policy.check(budget, period)
        except ValueError as error:
            raise KVPolicyError(f"{error}.") from error

    def fit(self, model: ModelShape) -> None:
        """Raise KVPolicyError if the policy cannot work with this model."""
        try:
            self.policy.fit(model)
        except ValueError as error:
            raise KVPolicyError(f"{error}.") from error


def parse_arms(text: str, options: str) -> dict[str, Arm]:
    """``arm|arm|…`` to arms by name, in order; `options` are those of the only one.

    Raises
    ------
    KVPolicyError
        On an unknown policy or option, a name given twice, or `options` for more than one arm.
    """
    names = [canonical(name) for name in text.split("|")]
    if len(names) > 1 and options:
        raise KVPolicyError(
            f"kv_options={options!r} belongs to one policy, but kv_policy names {len(names)}; "
            f"write a policy's options behind its name: {names[0].partition('[')[0]}[{options}]."
        )
    arms: dict[str, Arm] = {}
    for name in names:
        if name in arms:
            raise KVPolicyError(f"kv_policy names {name!r} twice.")
        arms[name] = _parse_arm(name, options)
    return arms


def canonical(name: str) -> str:
    """An arm's name without spaces, by which requests and reports know it."""
    return "".join(name.split())


def _parse_arm(name: str, options: str) -> Arm:
    policy_name, bracket, own = name.partition("[")
    if bracket:
        if not own.endswith("]"):
            raise KVPolicyError(f"kv_policy {name!r} must end with ']': policy[name:value;name:value].")
        if options:
            raise KVPolicyError(f"kv_policy {name!r} has options of its own, so kv_options must not be given.")
        options = own[:-1]
    try:
        return Arm(name, policy_name, options, build(policy_type(policy_name), parse_options(options)))
    except ValueError as error:
        raise KVPolicyError(f"{error}.") from error
