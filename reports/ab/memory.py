"""How much cache an arm held, and whether two arms held the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.reports.ab.responses import Arm
from kvpolicy.reports.lmeval_output import OutputError

TOLERANCE = 0.02
# What the engine holds for a request beside its cache, in bytes, so far as a record tells.
BESIDE = ("query_window_bytes", "hidden_change_bytes", "page_summary_bytes", "token_state_bytes")


@dataclass(frozen=True)
class ArmMemory:
    """The cache of an arm on one task. Means are token-weighted: each decode step counts once.

    A long response holds its cache for longer than a short one, and occupies a server for longer.

    without_record : responses that the numbers leave out.
    kv_bytes_mean : keys and values as they are stored, with scales and protected rows; all ranks together.
    beside_bytes : what `BESIDE` names, mean over decode steps of what each response ended with.
    after_prefill_bytes : mean over responses, when the prompt had been computed and compacted.
    """

    responses: int
    without_record: int
    decode_steps: int
    kv_bytes_mean: float
    kv_bytes_full_mean: float
    kv_bytes_peak: float
    kv_bytes_end: float
    resident_mean: float
    beside_bytes: float
    after_prefill_bytes: float


@dataclass(frozen=True)
class MemoryMatch:
    """Whether two arms held the same mean cache.

    ratio : second over first.
    with_beside : the same, of cache and what is held beside it.
    """

    ratio: float
    with_beside: float

    @property
    def matched(self) -> bool:
        """Whether the caches are within `TOLERANCE` of each other."""
        return within_tolerance(self.ratio)

    @property
    def label(self) -> str:
        """For a heading: matched or unmatched, with the ratio."""
        return f"{'matched' if self.matched else 'unmatched'}, mean cache {self.ratio:.3f} times as large"


@dataclass(frozen=True)
class IsoCache:
    """Two arms by the two cache sizes that they may be said to have: second over first.

    after_prefill : when generation starts. A method that only shrinks the prompt looks small there.
    mean : while it runs, which is what a server pays.
    """

    after_prefill: float
    mean: float

    @property
    def misleading(self) -> bool:
        """Whether the arms are matched after prefill and not on average."""
        return within_tolerance(self.after_prefill) and not within_tolerance(self.mean)


def within_tolerance(ratio: float) -> bool:
    """Whether the larger of two sizes is at most ``1 + TOLERANCE`` times the smaller."""
    return 1 / (1 + TOLERANCE) <= ratio <= 1 + TOLERANCE


def memory_of(arm: Arm, task: str) -> ArmMemory:
    """The cache of an arm on one task.

    Raises
    ------
    OutputError
        If no response carries a record, or none had a decode step.
    """
    responses = arm.of_task(task)
    records = [response.record for response in responses if response.record is not None]
    if not records:
        raise OutputError(
            f"{task}: no response of arm {arm.name} carries a kv_policy record, so its cache is not known; "
            "run it with kv_policy=full if it is to hold the whole cache."
        )
    steps = sum(record["decode_steps"] for record in records)
    if not steps:
        raise OutputError(f"{task}: all responses of arm {arm.name} ended with their first token; raise max_gen_toks.")

    def mean(*names: str) -> float:
        held = [record["decode_steps"] * sum(record.get(name, 0) for name in names) for record in records]
        return float(sum(held) / steps)

    return ArmMemory(
        responses=len(responses),
        without_record=len(responses) - len(records),
        decode_steps=steps,
        kv_bytes_mean=mean("kv_bytes_mean"),
        kv_bytes_full_mean=mean("kv_bytes_full_mean"),
        kv_bytes_peak=max(record["kv_bytes_peak"] for record in records),
        kv_bytes_end=sum(record["kv_bytes_end"] for record in records) / len(records),
        resident_mean=mean("resident_mean"),
        beside_bytes=mean(*BESIDE),
        after_prefill_bytes=sum(map(_after_prefill, records)) / len(records),
    )


def match(first: ArmMemory, second: ArmMemory) -> MemoryMatch:
    """Compare two arms by their token-weighted mean cache."""
    beside = (second.kv_bytes_mean + second.beside_bytes) / (first.kv_bytes_mean + first.beside_bytes)
    return MemoryMatch(second.kv_bytes_mean / first.kv_bytes_mean, beside)


def iso_cache(first: ArmMemory, second: ArmMemory) -> IsoCache:
    """Compare two arms by both cache sizes."""
    return IsoCache(second.after_prefill_bytes / first.after_prefill_bytes, second.kv_bytes_mean / first.kv_bytes_mean)


def _after_prefill(record: Mapping[str, Any]) -> float:
    """Bytes before the first decode step, as far as a record tells.

    It tells the tokens at the end and how many of them were decoded, hence the prompt, and that an evicting policy cuts
    a prompt of budget + period tokens or more to the budget at once. Of a request that was retracted and prefilled
    again it tells too little: steps of each life are counted, so the prompt seems shorter than it was.
    """
    prompt = max(record["full_end"] - record["decode_steps"], 1)
    if record["evictions"] and prompt >= record["budget"] + record["period"]:
        prompt = record["budget"]
    return float(prompt * record["kv_bytes_per_token"])
