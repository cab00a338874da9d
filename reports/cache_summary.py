"""What happened to the KV cache in a run of lm-eval, from the records of its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvpolicy.lmeval_tasks.response import mean_held_share
from kvpolicy.reports.lmeval_output import OutputError, TaskRun

# Steps that a due request may still go uncompacted: SGLang prepares the first one before it has
# processed the prefill's result, and the last token of a response is never cached.
SLACK = 2


@dataclass(frozen=True)
class CacheSummary:
    """One task's cache, measured. Tokens are per layer and KV head, bytes over all of them and all ranks.

    Means are over responses (of each response's mean over its decode steps), peaks are the largest
    of any response. `full` is what the uncompressed cache would have held at the same steps.
    """

    task: str
    model: str
    samples_file: str
    policy: str
    budget: int
    period: int
    seed: int
    options: str
    responses: int
    responses_without_record: int
    responses_not_compacted: int
    responses_missed: int  # not compacted although they exceeded budget + period
    decode_steps_mean: float
    evictions: int
    evictions_mean: float
    evictions_deferred: int
    tokens_evicted: int
    resident_mean: float
    resident_peak_mean: float
    resident_peak: int
    resident_end_mean: float
    full_mean: float
    full_end_mean: float
    full_peak: int
    kv_bytes_mean: float
    kv_bytes_full_mean: float
    kv_bytes_peak: float
    kv_bytes_full_peak: float
    held_share: float  # mean over responses of mean bytes / full mean bytes; lm-eval shows it as `kv_policy`


def summarize(run: TaskRun) -> CacheSummary:
    """Add up the `kv_policy` records of one task.

    Raises
    ------
    OutputError
        If no response carries a record; if they were made under another policy than each other or
        than the run asked for; or if an eviction policy evicted nothing although it was due.
    """
    records = [sample["kv_policy"] for sample in run.samples if isinstance(sample.get("kv_policy"), dict)]
    if not records:
        raise OutputError(
            f"{run.task}: none of {len(run.samples)} responses carries a kv_policy record; run lm_eval with "
            "--model sglang and kv_policy=… in --model_args, on a task that logs it (kvp_…)."
        )
    _check_origin(run, records)
    first = records[0]
    not_compacted = [record for record in records if not record["evictions"]]
    missed = [record for record in not_compacted if _was_due(record)]
    summary = CacheSummary(
        task=run.task,
        model=run.model,
        samples_file=str(run.file),
        **{name: first[name] for name in ("policy", "budget", "period", "seed", "options")},
        responses=len(run.samples),
        responses_without_record=len(run.samples) - len(records),
        responses_not_compacted=len(not_compacted),
        responses_missed=len(missed),
        decode_steps_mean=_mean(records, "decode_steps"),
        evictions=_total(records, "evictions"),
        evictions_mean=_mean(records, "evictions"),
        evictions_deferred=_total(records, "evictions_deferred"),
        tokens_evicted=_total(records, "tokens_evicted"),
        resident_mean=_mean(records, "resident_mean"),
        resident_peak_mean=_mean(records, "resident_peak"),
        resident_peak=max(record["resident_peak"] for record in records),
        resident_end_mean=_mean(records, "resident_end"),
        full_mean=_mean(records, "full_mean"),
        full_end_mean=_mean(records, "full_end"),
        full_peak=max(record["full_end"] for record in records),
        kv_bytes_mean=_mean(records, "kv_bytes_mean"),
        kv_bytes_full_mean=_mean(records, "kv_bytes_full_mean"),
        kv_bytes_peak=max(record["kv_bytes_peak"] for record in records),
        kv_bytes_full_peak=max(record["kv_bytes_full_end"] for record in records),
        held_share=mean_held_share(records),
    )
    if missed and not summary.evictions:
        raise OutputError(
            f"{run.task}: {summary.policy} evicted nothing, although {len(missed)} of {len(records)} responses "
            f"exceeded {summary.budget} + {summary.period} tokens (evictions deferred for want of free slots: "
            f"{summary.evictions_deferred}); its results are those of the full cache."
        )
    return summary


def _was_due(record: Mapping[str, Any]) -> bool:
    """Whether a response outgrew its budget for so many decode steps that it must have been compacted."""
    if record["policy"] == "full":
        return False
    over = record["full_end"] - record["budget"] - record["period"]
    return bool(min(over, record["decode_steps"]) > SLACK)


def _check_origin(run: TaskRun, records: Sequence[Mapping[str, Any]]) -> None:
    """A response cache of lm-eval (--use_cache) answers from whatever run filled it."""
    names = ("policy", "budget", "period", "seed", "options")
    origins = {tuple((name, record[name]) for name in names) for record in records}
    if len(origins) > 1:
        found = " and ".join(_describe(dict(origin)) for origin in sorted(origins))
        raise OutputError(f"{run.task}: the responses come from different runs: {found}.")
    for name in names:
        asked = run.model_args.get(f"kv_{name}", records[0][name])
        if str(asked) != str(records[0][name]):
            raise OutputError(
                f"{run.task}: the run asked for kv_{name}={asked}, but its responses were made under "
                f"{_describe(records[0])}; were they taken from a response cache (--use_cache)?"
            )


def _describe(record: Mapping[str, Any]) -> str:
    return f"{record['policy']} with budget {record['budget']}, period {record['period']}, seed {record['seed']}"


def _total(records: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(record[name] for record in records)


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(record[name] for record in records)
