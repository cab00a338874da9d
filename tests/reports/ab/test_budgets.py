"""Budgets and formats of equal bytes, against a cache that is played through step by step and one that is allocated."""

from __future__ import annotations

import math
from itertools import product, starmap

import pytest

from kvpolicy.quant.cache_format import CacheFormat
from kvpolicy.reports.ab.arms import AbError, parse_arm
from kvpolicy.reports.ab.budgets import (
    Choice,
    Pool,
    Shape,
    Text,
    arm_text,
    choose,
    formats,
    mean_resident,
    stored,
    weighted,
    whole,
)

QWEN = Shape(layers=36, heads=8, head_dim=128, item_bytes=2)
POOL = Pool(8 * 2**30, 16, 64)
TEXTS = [Text(150, 16000), Text(90, 3000), Text(700, 400)]


def played(text: Text, budget: int, period: int) -> float:
    """Step by step: before each step but the first, a row that is due is cut."""
    resident, total = text.prompt, 0
    for step in range(text.steps):
        if step and resident >= budget + period:
            resident = budget
        resident += 1
        total += resident
    return total / text.steps


@pytest.mark.parametrize("period", [1, 7, 64])
@pytest.mark.parametrize("budget", [1, 40, 128])
def test_mean_residency(budget: int, period: int) -> None:
    for text in starmap(Text, product((1, 39, 127, 128, 191, 192, 300), (1, 2, 64, 65, 150, 151, 1000))):
        assert mean_resident(text, budget, period) == pytest.approx(played(text, budget, period), rel=1e-12)


def test_in_the_long_run_it_is_the_budget_and_half_a_period() -> None:
    assert mean_resident(Text(10, 10**7), 2048, 64) == pytest.approx(2048 + 65 / 2, rel=1e-3)
    assert mean_resident(Text(10, 500), 10**6, 64) == whole(Text(10, 500)) == 10 + 501 / 2


def test_long_responses_weigh_more() -> None:
    assert weighted([Text(0, 100), Text(0, 300)], whole) == (100 * 50.5 + 300 * 150.5) / 400


def test_bytes_of_a_token_in_the_precision_of_the_model() -> None:
    assert stored(QWEN, None, POOL) == (2 * 36 * 8 * 128 * 2, 8 * 2**30 // (2 * 36 * 8 * 128 * 2))


@pytest.mark.parametrize("keys", ["none", "int8", "int4"])
@pytest.mark.parametrize(("name", "bits"), [("int4", 4), ("range-int4", 4), ("range-int2", 2)])
def test_bytes_of_a_token_as_it_is_packed(name: str, bits: int, keys: str) -> None:
    """Counted tensor by tensor: codes, scales and minima, index, rows, and the list of free rows."""
    quant = CacheFormat(name, group=32, keys=keys, protect=0.1)
    token_bytes, tokens = stored(QWEN, quant, POOL)
    rows = math.floor(tokens / 10) + 1 + 16 * (2 * 64 + 4) if quant.protects else 0
    of_keys = {"none": 128 * 2, "int8": 128 + 4 * 4, "int4": 64 + 4 * 4}[keys]
    per_head = tokens * (of_keys + 128 * bits // 8 + 4 * 4 + (4 if rows else 0)) + rows * (128 * 2 + 4)
    assert token_bytes * tokens == pytest.approx(36 * 8 * per_head)
    assert token_bytes * tokens <= POOL.size
    assert token_bytes * tokens > POOL.size - 36 * 8 * (of_keys + 128 * bits // 8 + 20 + 260)


def test_a_pool_that_is_too_small() -> None:
    with pytest.raises(AbError, match=r"a pool of 0\.1 MiB holds no token"):
        stored(QWEN, None, Pool(100_000, 1, 64))


def chosen(quant: CacheFormat | None, target: float, least: int = 1, texts: list[Text] | None = None) -> Choice:
    return choose(QWEN, quant, POOL, texts or TEXTS, target, 64, lambda budget: budget >= least)


@pytest.mark.parametrize("quant", [None, CacheFormat("range-int4", group=64), CacheFormat("int2", 64, keys="int4")])
def test_the_budget_is_the_nearest(quant: CacheFormat | None) -> None:
    target = 0.21 * QWEN.token_bytes * weighted(TEXTS, whole)
    choice = chosen(quant, target)
    assert choice.budget is not None

    def off(budget: int) -> float:
        return abs(choice.token_bytes * weighted(TEXTS, lambda text: played(text, budget, 64)) - target)

    assert abs(choice.mean_bytes - target) == pytest.approx(off(choice.budget))
    assert off(choice.budget) <= min(off(choice.budget - 1), off(choice.budget + 1))
    assert choice.matched


def test_a_format_that_is_small_enough_needs_no_budget() -> None:
    quant = CacheFormat("int4", group=64, keys="int4")
    target = QWEN.token_bytes * weighted(TEXTS, whole)
    choice = chosen(quant, target)
    assert (choice.budget, choice.matched) == (None, False)
    assert choice.mean_bytes == choice.whole_bytes < target
    assert chosen(quant, choice.whole_bytes).matched


def test_a_budget_that_the_policy_cannot_work_with() -> None:
    target = QWEN.token_bytes * 60
    assert chosen(None, target, texts=[Text(1, 100)]).budget is None  # the whole cache is smaller
    long = [Text(10, 2000)]
    assert chosen(None, target, texts=long).budget is not None
    none = chosen(None, target, least=100, texts=long)
    assert (none.budget, none.matched) == (None, False)
    assert none.mean_bytes == none.whole_bytes
    assert chosen(None, QWEN.token_bytes, texts=long).budget == 1
    assert not chosen(None, QWEN.token_bytes, texts=long).matched


def test_formats_are_all_combinations_once() -> None:
    found = formats(["int4", "range-int4"], ["none", "int8"], [None, 32], [0.05, 0.1], 128)
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 2)
    assert {each.group for each in found} == {32, 64}
    assert {(each.protects, each.protect) for each in found} == {(False, 0.05), (True, 0.05), (True, 0.1)}
    with pytest.raises(AbError, match="kv_quant='int3' is not a format"):
        formats(["int3"], ["none"], [None], [0.05], 128)
    with pytest.raises(AbError, match="kv_quant_group=48 does not fit"):
        formats(["int4"], ["none"], [48], [0.05], 128)


@pytest.mark.parametrize("quant", [None, CacheFormat("int4", 64), CacheFormat("range-int2", 32, 0.125, "int8")])
def test_arms_are_written_as_the_other_command_reads_them(quant: CacheFormat | None) -> None:
    choice = chosen(quant, 0.2 * QWEN.token_bytes * weighted(TEXTS, whole))
    arguments = parse_arm(arm_text(choice, "vase-dkv", 64)).arguments
    assert arguments is not None
    assert (arguments["kv_policy"], arguments["kv_budget"]) == ("vase-dkv", str(choice.budget))
    if quant is not None:
        read = CacheFormat(
            arguments["kv_quant"],
            int(arguments["kv_quant_group"]),
            float(arguments.get("kv_protect", 0.05)),
            arguments.get("kv_quant_keys", "none"),
        )
        assert read == quant
    assert arm_text(chosen(None, 10 * choice.whole_bytes), "vase-dkv", 64) == "full"
