"""What one arm did on one task: how often it was right, how it failed, how much it wrote and what it held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicy.lmeval_tasks.grading.verdict import Verdict
from kvpolicy.reports.ab.accuracy import Rate, rate
from kvpolicy.reports.ab.memory import ArmMemory, memory_of
from kvpolicy.reports.ab.pairs import Measure, Pairs, correct, flag, tokens, verdict
from kvpolicy.reports.ab.responses import FLAGS, Response

VERDICTS = tuple(str(each) for each in Verdict)
# What names a method; arms that differ in its budget and period alone are the same method.
METHOD = ("policy", "options", "kv_quant", "kv_quant_group", "kv_quant_keys", "kv_protect")


@dataclass(frozen=True)
class Lengths:
    """Tokens of the responses."""

    mean: float
    median: float
    p95: float
    longest: int


@dataclass(frozen=True)
class Effect:
    """What a policy or a format did, by the records; what no record speaks of is None.

    compacted : responses that were evicted from at least once.
    eviction_seconds : of the scheduler's time.
    read_share : tokens read per token held, of policies that read a part.
    protected_end : share of the tokens with a row in the model's precision at the end of a response.
    denied : tokens that found no such row, the largest count that a response reports.
    """

    records: int
    evictions: int
    compacted: int
    tokens_evicted: int
    deferred: int
    eviction_seconds: float | None
    bits_per_element: float | None
    read_share: float | None
    protected_end: float | None
    denied: int | None


@dataclass(frozen=True)
class Measures:
    """One arm on one task. Rates are means over problems of the mean over their responses.

    verdicts : empty for a task that logs only what is correct.
    flags : None where a response does not tell.
    memory, effect, method : None without records.
    """

    arm: str
    task: str
    problems: int
    responses: int
    accuracy: Rate
    verdicts: Mapping[str, Rate]
    flags: Mapping[str, Rate | None]
    lengths: Lengths | None
    memory: ArmMemory | None
    effect: Effect | None
    method: Mapping[str, Any] | None

    @property
    def is_whole(self) -> bool:
        """Whether the arm is known to hold the whole cache in the precision of the model."""
        return self.method is not None and self.method["policy"] == "full" and self.method["kv_quant"] is None


def measure(pairs: Pairs, name: str, task: str) -> Measures:
    """All of an arm on a task that has at least two problems."""
    arm = pairs.arm(name)
    responses = arm.of_task(task)
    records = [response.record for response in responses if response.record is not None]

    def rate_of(of: Measure) -> Rate | None:
        by_problem = pairs.by_problem(name, task, of)
        return None if by_problem is None else rate(by_problem, len(responses))

    accuracy = rate_of(correct)
    assert accuracy is not None, "every response is correct or not"
    verdicts = {each: rate_of(verdict(each)) for each in _names(responses)}
    return Measures(
        arm=name,
        task=task,
        problems=len(pairs.problems(task)),
        responses=len(responses),
        accuracy=accuracy,
        verdicts={each: found for each, found in verdicts.items() if found is not None},
        flags={each: rate_of(flag(each)) for each in FLAGS},
        lengths=_lengths(responses),
        memory=memory_of(arm, task) if records else None,
        effect=_effect(records) if records else None,
        method={part: records[0].get(part) for part in METHOD} if records else None,
    )


def _names(responses: Sequence[Response]) -> list[str]:
    """All verdicts there are, and any other that a task logs."""
    return list(dict.fromkeys([*VERDICTS, *sorted({each.verdict for each in responses if each.verdict is not None})]))


def _lengths(responses: Sequence[Response]) -> Lengths | None:
    known = [length for response in responses if (length := tokens(response)) is not None]
    if len(known) < len(responses):
        return None
    median, p95 = np.quantile(known, [0.5, 0.95])
    return Lengths(float(np.mean(known)), float(median), float(p95), int(max(known)))


def _effect(records: Sequence[Mapping[str, Any]]) -> Effect:
    def known(name: str) -> list[float]:
        return [record[name] for record in records if name in record]

    seconds, read, protected, denied, bits = map(
        known,
        ("eviction_seconds", "tokens_read_mean", "protected_end", "protected_rows_denied", "bits_per_element"),
    )
    held = sum(record["decode_steps"] * record["resident_mean"] for record in records)
    return Effect(
        records=len(records),
        evictions=sum(record["evictions"] for record in records),
        compacted=sum(record["evictions"] > 0 for record in records),
        tokens_evicted=sum(record["tokens_evicted"] for record in records),
        deferred=sum(record["evictions_deferred"] for record in records),
        eviction_seconds=sum(seconds) if seconds else None,
        bits_per_element=float(np.mean(bits)) if bits else None,
        read_share=(
            sum(record["decode_steps"] * record["tokens_read_mean"] for record in records) / held
            if len(read) == len(records) and held
            else None
        ),
        protected_end=float(np.mean(protected)) if protected else None,
        denied=int(max(denied)) if denied else None,
    )
