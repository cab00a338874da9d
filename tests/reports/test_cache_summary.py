"""`kvpolicy cache` on output folders written here, in lm-eval's format."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.reports import cache_command
from kvpolicy.reports.cache_summary import summarize
from kvpolicy.reports.lmeval_output import OutputError, newest_runs

OLD, NEW = "2026-01-02T03-04-05.678901", "2026-01-02T13-04-05.678901"
BYTES = 1024


def record(evictions: int = 3, full_end: int = 250, steps: int = 150, **changed: Any) -> dict[str, Any]:
    """A response of `full_end` tokens under budget 100, period 16, that evicted 16 tokens a round."""
    evicted = 16 * evictions
    tokens = {
        "resident_mean": 110.0,
        "resident_peak": 116,
        "resident_end": full_end - evicted,
        "full_mean": 200.0,
        "full_end": full_end,
    }
    return {
        "policy": "vase-dkv",
        "budget": 100,
        "period": 16,
        "seed": 0,
        "sampling_seed": None,
        "options": "",
        "evictions": evictions,
        "tokens_evicted": evicted,
        "evictions_deferred": 0,
        "eviction_seconds": 0.01 * evictions,
        "decode_steps": steps,
        **tokens,
        **{f"kv_bytes_{name.removeprefix('resident_')}": BYTES * value for name, value in tokens.items()},
        "query_window_bytes": 0,
        **changed,
    }


def write(
    folder: Path,
    records: list[dict[str, Any] | None],
    date: str = NEW,
    filters: tuple[str, ...] = ("none",),
    chosen: dict[str, Any] | None = None,
    **model_args: Any,
) -> Path:
    """One run as lm-eval leaves it; a record of None is a response without one, `chosen` are `custom_params`."""
    target = folder / "org__model"
    target.mkdir(parents=True, exist_ok=True)
    generation = {"temperature": 0.0} | ({"custom_params": chosen} if chosen else {})
    arguments = {"arguments": {"gen_args_0": {"arg_0": "a question", "arg_1": generation}}}
    lines = [
        json.dumps({"doc_id": i, "filter": name, **arguments} | ({} if kv is None else {"kv_policy": kv}))
        for name in filters
        for i, kv in enumerate(records)
    ]
    (target / f"samples_kvp_gsm8k_sample_{date}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    results = {"model_name": "org/model", "config": {"model_args": {"pretrained": "org/model", **model_args}}}
    (target / f"results_{date}.json").write_text(json.dumps(results))
    return folder


def command(folder: Path, file: Path | None = None) -> int:
    return cache_command.run(argparse.Namespace(output_dir=folder, json=file))


def test_numbers(tmp_path: Path) -> None:
    write(tmp_path, [record(), record(evictions=5, full_end=330, resident_peak=120, kv_bytes_mean=BYTES * 50.0)])
    (run,) = newest_runs(tmp_path)
    summary = summarize(run)
    assert (summary.task, summary.model) == ("kvp_gsm8k_sample", "org/model")
    assert (summary.policy, summary.budget, summary.period) == ("vase-dkv", 100, 16)
    assert (summary.responses, summary.responses_not_compacted, summary.responses_missed) == (2, 0, 0)
    assert (summary.evictions, summary.evictions_mean, summary.tokens_evicted) == (8, 4.0, 128)
    assert (summary.resident_mean, summary.resident_peak_mean, summary.resident_peak) == (110.0, 118.0, 120)
    assert (summary.resident_end_mean, summary.full_end_mean, summary.full_peak) == (226.0, 290.0, 330)
    assert summary.kv_bytes_mean == BYTES * 80.0
    assert summary.kv_bytes_full_peak == BYTES * 330
    assert summary.held_share == pytest.approx((110 / 200 + 50 / 200) / 2)


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [record(), record()])
    assert command(tmp_path, tmp_path / "new" / "numbers.json") == 0
    printed = capsys.readouterr().out
    assert "vase-dkv, budget 100, period 16" in printed
    assert "55.0%" in printed
    (task,) = json.loads((tmp_path / "new" / "numbers.json").read_text())["tasks"]
    assert task["evictions"] == 6
    assert task["held_share"] == pytest.approx(0.55)


def test_newest_run_counts(tmp_path: Path) -> None:
    write(tmp_path, [record(evictions=9)], date=OLD)
    write(tmp_path, [record(evictions=2)], date=NEW)
    assert [summarize(run).evictions for run in newest_runs(tmp_path)] == [2]


def test_response_counts_once_under_two_filters(tmp_path: Path) -> None:
    write(tmp_path, [record(), record()], filters=("strict", "flexible"))
    (run,) = newest_runs(tmp_path)
    assert summarize(run).responses == 2


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no samples"):
        command(tmp_path)


def test_responses_without_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="none of 2 responses carries a kv_policy record"):
        command(write(tmp_path, [None, None]))


def test_silent_no_op_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="vase-dkv evicted nothing, although 1 of 2 responses exceeded 100 \\+ 16"):
        command(write(tmp_path, [record(evictions=0), record(evictions=0, full_end=90)]))


@pytest.mark.parametrize(
    "harmless",
    [record(0, full_end=116), record(0, full_end=200, steps=1), record(0, policy="full", full_end=999)],
    ids=["within budget", "ended at once", "full cache"],
)
def test_run_that_had_nothing_to_evict_is_no_failure(tmp_path: Path, harmless: dict[str, Any]) -> None:
    assert command(write(tmp_path, [harmless])) == 0


def test_missed_responses_and_missing_records_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(write(tmp_path, [record(), record(evictions=0, evictions_deferred=4), None])) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 responses carry no record" in printed
    assert "1 responses exceeded 100 + 16 tokens and were never compacted" in printed
    assert "4 evictions were put off" in printed


def test_responses_of_another_run_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "mixed", [record(), record(budget=200)])
    write(tmp_path / "cached", [record()], kv_policy="full")
    for folder, message in (("mixed", "different runs"), ("cached", "asked for kv_policy=full")):
        (run,) = newest_runs(tmp_path / folder)
        with pytest.raises(OutputError, match=message):
            summarize(run)


def test_options_tell_different_runs_apart(tmp_path: Path) -> None:
    write(tmp_path, [record(), record(options="rank:8")])
    (run,) = newest_runs(tmp_path)
    with pytest.raises(OutputError, match=r"vase-dkv with budget 100 .* and vase-dkv\[rank:8\] with budget 100"):
        summarize(run)


@pytest.mark.parametrize(("seeds", "seed"), [((3, 3), 3), ((3, 4), None)], ids=["the same", "their own"])
def test_seeds_may_differ_within_a_run(tmp_path: Path, seeds: tuple[int, int], seed: int | None) -> None:
    write(tmp_path, [record(seed=each, sampling_seed=each + 1) for each in seeds], kv_policy="vase-dkv", kv_seed=3)
    (run,) = newest_runs(tmp_path)
    assert summarize(run).seed == seed


SEVERAL = "full | vase-dkv[rank:8]|vase-dkv"


@pytest.mark.parametrize(
    ("asked", "chosen", "made"),
    [
        pytest.param({"kv_policy": "vase-dkv", "kv_options": "rank:8"}, {}, {"options": "rank:8"}, id="options"),
        pytest.param({"kv_policy": "vase-dkv[rank:8]"}, {}, {"options": "rank:8"}, id="brackets"),
        pytest.param({"kv_policy": "vase-dkv[rank:8]|full"}, {}, {"options": "rank:8"}, id="the first of several"),
        pytest.param({"kv_policy": " vase-dkv | full"}, {}, {}, id="spaces"),
        pytest.param({"kv_policy": SEVERAL}, {"kv_policy": "vase-dkv"}, {}, id="chosen"),
        pytest.param({"kv_policy": SEVERAL}, {"kv_policy": "vase-dkv[rank:8]"}, {"options": "rank:8"}, id="brackets 2"),
        pytest.param({"kv_policy": "vase-dkv", "kv_budget": "200"}, {"kv_budget": 100}, {}, id="chosen budget"),
        pytest.param({"kv_policy": "vase-dkv", "kv_budget": "100", "kv_period": 16}, {}, {}, id="numbers as text"),
        pytest.param({}, {}, {}, id="a run without results file"),
    ],
)
def test_responses_of_what_was_asked_for_are_added_up(
    tmp_path: Path, asked: dict[str, Any], chosen: dict[str, Any], made: dict[str, Any]
) -> None:
    write(tmp_path, [record(**made)], chosen=chosen, **asked)
    (run,) = newest_runs(tmp_path)
    assert summarize(run).options == made.get("options", "")


@pytest.mark.parametrize(
    ("asked", "chosen", "sentence"),
    [
        pytest.param({"kv_policy": "vase-dkv[rank:8]"}, {}, r"kv_policy=vase-dkv\[rank:8\], but", id="no options"),
        pytest.param({"kv_policy": "vase-dkv", "kv_options": "rank:8"}, {}, "kv_options='rank:8', but", id="options"),
        pytest.param({"kv_policy": SEVERAL}, {}, "kv_policy=full", id="not the first"),
        pytest.param({"kv_policy": SEVERAL}, {"kv_policy": "full"}, "kv_policy=full, but", id="not the chosen"),
        pytest.param({"kv_policy": "vase-dkv", "kv_period": 32}, {}, "kv_period=32, but", id="period"),
        pytest.param({"kv_policy": "vase-dkv", "kv_budget": 100}, {"kv_budget": 90}, "kv_budget=90, but", id="budget"),
    ],
)
def test_responses_of_something_else_are_refused(
    tmp_path: Path, asked: dict[str, Any], chosen: dict[str, Any], sentence: str
) -> None:
    write(tmp_path, [record()], chosen=chosen, **asked)
    (run,) = newest_runs(tmp_path)
    with pytest.raises(OutputError, match=f"asked for {sentence}"):
        summarize(run)


def test_several_responses_to_a_problem_count_one_by_one(tmp_path: Path) -> None:
    """avg@k: a problem's sample holds a list of records, and what is known of each response."""
    write(tmp_path, [record(), record()], kv_policy="vase-dkv")
    (file,) = tmp_path.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    for sample in samples:
        sample["kv_policy"] = [record(2), record(5), None]
        sample["responses"] = [{}, {}, {}]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (run,) = newest_runs(tmp_path)
    summary = summarize(run)
    assert (summary.responses, summary.responses_without_record, summary.evictions) == (6, 2, 14)


def test_a_cache_in_low_bits_is_named_and_must_be_what_was_asked_for(tmp_path: Path) -> None:
    packed = {"kv_quant": "range-int4", "bits_per_element": 5.5}
    write(tmp_path, [record(**packed)], kv_policy="vase-dkv", kv_quant="range-int4")
    (run,) = newest_runs(tmp_path)
    summary = summarize(run)
    assert (summary.kv_quant, summary.bits_per_element) == ("range-int4", 5.5)
    assert "5.50 bits" in str(cache_command.table_of(summary).title)
    write(tmp_path, [record(**packed)], kv_policy="vase-dkv", kv_quant="int4")
    (run,) = newest_runs(tmp_path)
    with pytest.raises(OutputError, match="kv_quant=int4"):
        summarize(run)
    write(tmp_path, [record(**packed), record()], kv_policy="vase-dkv")
    (run,) = newest_runs(tmp_path)
    with pytest.raises(OutputError, match=r"different runs: .*kv_quant=range-int4"):
        summarize(run)
