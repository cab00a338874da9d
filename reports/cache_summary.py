"""What happened to the KV cache in a run of lm-eval, from the records of its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvpolicy.lmeval_tasks.response import mean_held_share
from kvpolicy.reports.lmeval_output import OutputError, TaskRun

# What all responses of a task share. Their seeds may differ.
ORIGIN = ("policy", "options", "budget", "period")
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
    seed: int | None  # None: the responses have seeds of their own
    options: str
    kv_quant: str | None
    bits_per_element: float | None
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
    records = [record for sample in run.samples for record in _records(sample)]
    responses = sum(len(sample.get("responses", [0])) for sample in run.samples)
    if not records:
        raise OutputError(
            f"{run.task}: none of {responses} responses carries a kv_policy record; run lm_eval with "
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
        **{name: first[name] for name in ORIGIN},
        kv_quant=first.get("kv_quant"),  # a record of a cache in the model's precision has neither
        bits_per_element=first.get("bits_per_element"),
        seed=first["seed"] if len({record["seed"] for record in records}) == 1 else None,
        responses=responses,
        responses_without_record=responses - len(records),
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


def _records(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each response to a problem the record of its cache, where there is one."""
    logged = sample.get("kv_policy")
    return [record for record in (logged if isinstance(logged, list) else [logged]) if isinstance(record, dict)]


def _was_due(record: Mapping[str, Any]) -> bool:
    """Whether a response outgrew its budget for so many decode steps that it must have been compacted."""
    if record["policy"] == "full":
        return False
    over = record["full_end"] - record["budget"] - record["period"]
    return bool(min(over, record["decode_steps"]) > SLACK)


def _check_origin(run: TaskRun, records: Sequence[Mapping[str, Any]]) -> None:
    """A response cache of lm-eval (--use_cache) answers from whatever run filled it."""
    origins = {_describe(record) for record in records}
    if len(origins) > 1:
        found = " and ".join(sorted(origins))
        raise OutputError(f"{run.task}: the responses come from different runs: {found}.")
    for sample in run.samples:
        for record in _records(sample):
            if asked := _not_asked_for(_asked(run, sample), record):
                raise OutputError(
                    f"{run.task}: the run asked for {asked}, but its responses were made under "
                    f"{_describe(record)}; were they taken from a response cache (--use_cache)?"
                )


def _asked(run: TaskRun, sample: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of the run, overridden by what the request itself chose in `custom_params`; text without spaces."""
    asked = dict(run.model_args)
    for arguments in sample.get("arguments", {}).values():
        for argument in arguments.values():
            if isinstance(argument, dict):
                asked |= argument.get("custom_params") or {}
    return {name: "".join(str(value).split()) for name, value in asked.items() if value is not None}


def _not_asked_for(asked: Mapping[str, str], record: Mapping[str, Any]) -> str | None:
    """The argument that cannot have led to `record`; of several policies the first is the default."""
    policy, options = record["policy"], "".join(record["options"].split())
    if asked.get("kv_quant", record.get("kv_quant")) != record.get("kv_quant"):
        return f"kv_quant={asked['kv_quant']}"
    if "kv_policy" not in asked:  # the run left no results file to read its arguments from
        return None
    arm = asked["kv_policy"].split("|")[0]
    if "[" in arm:
        policy += f"[{options}]"
    elif options != asked.get("kv_options", ""):
        return f"kv_options={asked.get('kv_options', '')!r}"
    if arm != policy:
        return f"kv_policy={asked['kv_policy']}"
    for name in ("budget", "period"):
        if asked.get(f"kv_{name}", str(record[name])) != str(record[name]):
            return f"kv_{name}={asked[f'kv_{name}']}"
    return None


def _describe(record: Mapping[str, Any]) -> str:
    options = f"[{record['options']}]" if record["options"] else ""
    stored = f", kv_quant={record['kv_quant']}" if record.get("kv_quant") else ""
    return f"{record['policy']}{options} with budget {record['budget']} and period {record['period']}{stored}"


def _total(records: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(record[name] for record in records)


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(record[name] for record in records)
