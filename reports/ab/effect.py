"""Proof that an arm did what it is named for. A method that silently does nothing scores like the full cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpolicy.reports.ab.responses import Arm
from kvpolicy.reports.cache_summary import SLACK
from kvpolicy.reports.lmeval_output import OutputError

Record = Mapping[str, Any]


class NoEffectError(OutputError):
    """An arm shows no trace of what it was asked for; the message is one sentence for the user."""


def check_effect(arm: Arm) -> None:
    """Refuse an arm that did nothing, task by task.

    Raises
    ------
    NoEffectError
        If a policy or a format was asked for and no response carries a record; if nothing was evicted, although
        responses outgrew what their policy keeps; if a reading policy read everything; if a cache that was to be packed
        has no fewer bytes than one in full precision; or if none of its tokens is protected that should be.
    """
    for task in arm.tasks:
        records = [response.record for response in arm.of_task(task) if response.record is not None]
        asked = {name: value for name, value in arm.asked.get(task, {}).items() if value is not None}
        if not records:
            if named := [f"{name}={asked[name]}" for name in ("kv_policy", "kv_quant") if name in asked]:
                raise NoEffectError(
                    f"{task}: arm {arm.name} was asked for {' and '.join(named)}, and no response carries a "
                    "record of it; its results may be those of stock SGLang."
                )
            continue
        for check in CHECKS:
            if reason := check(records, asked):
                raise NoEffectError(f"{task}: arm {arm.name} {reason}; its results are those of the full cache.")


def _evicted_nothing(records: Sequence[Record], _asked: Mapping[str, Any]) -> str | None:
    outgrown = [record for record in records if _was_due(record)]
    if not outgrown or any(record["evictions"] for record in records):
        return None
    first = outgrown[0]
    return (
        f"({first['policy']}) evicted nothing, although {len(outgrown)} of {len(records)} responses outgrew what "
        f"it keeps (budget {first['budget']}, period {first['period']}; evictions put off for want of free slots: "
        f"{sum(record['evictions_deferred'] for record in records)})"
    )


def _read_everything(records: Sequence[Record], _asked: Mapping[str, Any]) -> str | None:
    """A reading policy attends to at most its budget, and to all of a shorter text."""
    reading = [record for record in records if "tokens_read_mean" in record]
    long = [record for record in reading if record["decode_steps"] and record["resident_mean"] > record["budget"]]
    if not long or any(record["tokens_read_mean"] < record["resident_mean"] for record in long):
        return None
    return (
        f"({long[0]['policy']}) read all of the cache, although {len(long)} of {len(records)} responses "
        f"had more than {long[0]['budget']} tokens"
    )


def _packed_nothing(records: Sequence[Record], asked: Mapping[str, Any]) -> str | None:
    wanted = asked.get("kv_quant")
    formats = {record.get("kv_quant") for record in records}
    if wanted is not None and formats != {wanted}:
        found = " and ".join(sorted(str(name or "none") for name in formats))
        return f"was asked for kv_quant={wanted}, and its records show kv_quant={found}"
    unpacked = [record for record in records if record.get("kv_quant") is not None and not _is_packed(record)]
    if not unpacked:
        return None
    return f"(kv_quant={unpacked[0]['kv_quant']}) shows no packed bytes in {len(unpacked)} of {len(records)} responses"


def _protected_nothing(records: Sequence[Record], _asked: Mapping[str, Any]) -> str | None:
    protecting = [record for record in records if "protected_end" in record]
    if not protecting or any(record["protected_end"] > 0 for record in protecting):
        return None
    return f"(kv_quant={protecting[0]['kv_quant']}) protected no token of any of {len(protecting)} responses"


CHECKS: tuple[Callable[[Sequence[Record], Mapping[str, Any]], str | None], ...] = (
    _evicted_nothing,
    _read_everything,
    _packed_nothing,
    _protected_nothing,
)


def _is_packed(record: Record) -> bool:
    """Whether a stored token takes fewer bytes than in the model's precision, by all that the record says of it."""
    if "bits_per_element" not in record or "kv_bytes_per_token_full" not in record:
        return False
    return bool(record["kv_bytes_per_token"] < record["kv_bytes_per_token_full"])


def _was_due(record: Record) -> bool:
    """Whether a response outgrew its policy for so many decode steps that it must have been compacted."""
    if record["decode_steps"] <= SLACK:
        return False
    due = _rule(record["policy"], record["options"])
    return due(record["full_end"] - SLACK - 1, record["budget"], record["period"])


@functools.cache
def _rule(name: str, options: str) -> Callable[[int, int, int], bool]:
    """When a policy is due, of the tokens, the budget and the period.

    Policies of this package are asked. One of another package is not imported because a results file names it: it is
    taken to evict at budget + period, as policies do unless they say otherwise.
    """
    from kvpolicy.policies import options as of_policy
    from kvpolicy.policies.registry import POLICIES

    if name not in POLICIES:
        return lambda resident, budget, period: resident >= budget + period
    try:
        return of_policy.build(POLICIES[name](), of_policy.parse_options(options)).due
    except ValueError as error:
        raise OutputError(f"records of {name} with options {options!r} are not of this version: {error}.") from error
