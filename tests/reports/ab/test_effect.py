"""An arm that did nothing is refused; one that had nothing to do is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.reports.ab.effect import NoEffectError, check_effect
from kvpolicy.reports.ab.responses import Arm, read_arm
from kvpolicy.reports.lmeval_output import OutputError
from tests.reports.ab.runs import TASK, full, record, row, sample, write

IDLE = {"evictions": 0, "tokens_evicted": 0}
PACKED = {"kv_quant": "int4", "bits_per_element": 10.5, "kv_bytes_per_token": 656.0, "kv_bytes_per_token_full": 1000.0}
RANGE = PACKED | {"kv_quant": "range-int4", "kv_protect": 0.05, "protected_end": 0.1}


def arm(folder: Path, records: list[dict[str, Any] | None], **asked: Any) -> Arm:
    samples = [sample(i, [row()], None if each is None else [each]) for i, each in enumerate(records)]
    write(folder, samples, **asked)
    return read_arm("small", folder)


def refusal(folder: Path, records: list[dict[str, Any] | None], **asked: Any) -> str:
    with pytest.raises(NoEffectError) as refused:
        check_effect(arm(folder, records, **asked))
    message = str(refused.value)
    assert message.startswith(f"{TASK}: arm small ")
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_a_policy_that_evicted_nothing(tmp_path: Path) -> None:
    records = [record(**IDLE, evictions_deferred=3), record(steps=30, **IDLE), record(**IDLE, evictions_deferred=4)]
    message = refusal(tmp_path, records)
    assert (
        "(vase-dkv) evicted nothing, although 2 of 3 responses outgrew what it keeps (budget 64, period 16" in message
    )
    assert "put off for want of free slots: 7" in message


def test_one_eviction_anywhere_is_an_effect(tmp_path: Path) -> None:
    check_effect(arm(tmp_path, [record(**IDLE), record()]))


@pytest.mark.parametrize(
    ("harmless", "due"),
    [
        pytest.param(record(prompt=20, steps=62, **IDLE), record(prompt=20, steps=63, **IDLE), id="length"),
        pytest.param(record(prompt=900, steps=2, **IDLE), record(prompt=900, steps=3, **IDLE), id="steps"),
        pytest.param(full(steps=900), record(steps=900, **IDLE), id="full cache"),
        pytest.param(
            record(policy="quest", tokens_read_mean=50.0, **IDLE), record(policy="snapkv", **IDLE), id="reads a part"
        ),
        pytest.param(
            record(policy="lagkv-ratio", options="lag:128", steps=200, **IDLE),
            record(policy="lagkv-ratio", options="lag:32", steps=200, **IDLE),
            id="a policy without a budget, by its own rule",
        ),
        pytest.param(
            record(policy="my.own:Policy", steps=60, **IDLE),
            record(policy="my.own:Policy", **IDLE),
            id="another's policy",
        ),
    ],
)
def test_a_response_counts_once_it_must_have_been_compacted(
    tmp_path: Path, harmless: dict[str, Any], due: dict[str, Any]
) -> None:
    check_effect(arm(tmp_path / "1", [harmless]))
    assert "evicted nothing, although 1 of 2" in refusal(tmp_path / "2", [harmless | IDLE, due])


def test_options_that_the_policy_does_not_know_are_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="records of h2o with options 'old:1' are not of this version"):
        check_effect(arm(tmp_path, [record(policy="h2o", options="old:1", **IDLE)]))


def test_a_reading_policy_that_read_everything(tmp_path: Path) -> None:
    quest = {"policy": "quest", **IDLE}
    lazy = full(steps=200, budget=64, tokens_read_mean=120.5, **quest)
    assert lazy["resident_mean"] == 120.5
    short = full(steps=10, budget=64, tokens_read_mean=25.5, **quest)
    message = refusal(tmp_path / "1", [lazy, short])
    assert "(quest) read all of the cache, although 1 of 2 responses had more than 64 tokens" in message
    check_effect(arm(tmp_path / "2", [lazy | {"tokens_read_mean": 64.0}, short]))
    check_effect(arm(tmp_path / "3", [short]))


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param({"bits_per_element": None}, id="no bits"),
        pytest.param({"kv_bytes_per_token_full": None}, id="nothing to compare with"),
        pytest.param({"kv_bytes_per_token": 1000.0}, id="as many bytes as without"),
    ],
)
def test_a_format_without_packed_bytes(tmp_path: Path, missing: dict[str, Any]) -> None:
    spoilt = {name: value for name, value in (full() | PACKED | missing).items() if value is not None}
    message = refusal(tmp_path / "1", [full(**PACKED), spoilt], kv_quant="int4")
    assert "(kv_quant=int4) shows no packed bytes in 1 of 2 responses" in message
    check_effect(arm(tmp_path / "2", [full(**PACKED)] * 2, kv_quant="int4"))


def test_a_format_that_was_asked_for_and_is_not_there(tmp_path: Path) -> None:
    assert "was asked for kv_quant=int4, and its records show kv_quant=none" in refusal(
        tmp_path / "1", [full(), full()], kv_quant="int4"
    )
    assert "show kv_quant=int4 and none" in refusal(tmp_path / "2", [full(), full(**PACKED)], kv_quant="int4")
    assert "show kv_quant=int4" in refusal(tmp_path / "3", [full(**PACKED)], kv_quant="int2")
    check_effect(arm(tmp_path / "4", [full()], kv_quant=None))


def test_a_protecting_format_that_protects_nothing(tmp_path: Path) -> None:
    records = [full(**RANGE, protected_rows_denied=0) | {"protected_end": 0.0}] * 2
    assert "(kv_quant=range-int4) protected no token of any of 2 responses" in refusal(tmp_path / "1", list(records))
    check_effect(arm(tmp_path / "2", [*records, full(**RANGE)]))


def test_both_effects_are_needed(tmp_path: Path) -> None:
    assert "evicted nothing" in refusal(tmp_path, [record(**IDLE, **PACKED)], kv_quant="int4", kv_policy="vase-dkv")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"kv_policy": "vase-dkv"}, "kv_policy=vase-dkv"),
        ({"kv_policy": "full", "kv_quant": "int4"}, "kv_policy=full and kv_quant=int4"),
    ],
)
def test_no_record_at_all(tmp_path: Path, asked: dict[str, str], named: str) -> None:
    assert f"was asked for {named}, and no response carries a record of it" in refusal(tmp_path, [None], **asked)


def test_stock_sglang_is_no_failure(tmp_path: Path) -> None:
    check_effect(arm(tmp_path, [None, None]))


def test_each_task_is_checked(tmp_path: Path) -> None:
    write(tmp_path, [sample(1, [row()], [record()])], task="kvp_aime24")
    write(tmp_path, [sample(1, [row()], [record(**IDLE)])], task="kvp_aime25")
    with pytest.raises(NoEffectError, match="kvp_aime25: arm x"):
        check_effect(read_arm("x", tmp_path))
