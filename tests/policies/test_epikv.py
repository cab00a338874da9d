"""EpiKV-Flat: what is kept beside the prompt, one set for all layers and heads."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from kvpolicy.policies.base import Band, Candidates, Granularity, ModelShape, Needs, Noise
from kvpolicy.policies.epikv import EpiKV
from kvpolicy.policies.epikv_signal import Signal
from kvpolicy.policies.value_spread import Measure
from tests.policies.candidates import random_candidates
from tests.policies.near_ties import check_top
from tests.policies.test_epikv_signal import SIGNALS, random_change, signal_by_loops, signals
from tests.policies.test_value_spread import spread_by_loops

NOISE = Noise(0, 0, (0,))
LLAMA_8B = ModelShape(32, 32, 8, 128, 5e5)


def resident(
    positions: list[int], change: torch.Tensor, prompt_len: int, *, layers: int = 2, heads: int = 3
) -> Candidates:
    """A request that still holds the tokens at `positions`, in all layers and heads."""
    return Candidates(
        (layers, heads, len(positions)),
        positions=torch.tensor(positions).expand(layers, heads, -1),
        hidden_change=change,
        prompt_len=prompt_len,
        true_len=prompt_len + change.shape[1],
    )


def kept_positions(policy: EpiKV, candidates: Candidates, n_keep: int) -> list[int]:
    """The one set that all layers and heads keep, as positions."""
    kept = policy.select(candidates, n_keep, 64, NOISE)
    assert kept.shape == (*candidates.shape[:2], n_keep)
    assert kept.dtype == torch.int64
    assert (kept == kept[0, 0]).all()
    positions: list[int] = candidates.require("positions")[0, 0, kept[0, 0]].tolist()
    assert positions == sorted(set(positions))
    return positions


@signals
def test_prompt_recent_and_the_highest_signals_are_kept(signal: Signal) -> None:
    rng = random.Random(SIGNALS.index(signal))
    near_ties = cases = 0
    for case in range(60):
        prompt_len, decoded = rng.randint(1, 40), rng.randint(2, 300)
        change = random_change(decoded, seed=case)
        held = sorted(rng.sample(range(decoded), rng.randint(2, decoded)))
        recent = rng.choice([None, 1, rng.randint(0, len(held) - 1)])
        positions = [*range(prompt_len), *(prompt_len + column for column in held)]
        newest = 0 if recent is None else recent
        n_keep = rng.randint(prompt_len + newest + 4, max(prompt_len + newest + 4, len(positions)))
        newest = min(128, n_keep // 4) if recent is None else recent
        if n_keep > len(positions) or prompt_len + newest > n_keep or newest > len(held):
            continue
        policy = EpiKV(signal=signal, recent=recent, sinks=min(4, prompt_len))
        kept = kept_positions(policy, resident(positions, change, prompt_len), n_keep)
        assert set(range(prompt_len)) <= set(kept)
        older = held[: len(held) - newest]
        assert {prompt_len + column for column in held[len(older) :]} <= set(kept)
        scores = [signal_by_loops(change, column, signal, 64) for column in older]
        chosen = {older.index(p - prompt_len) for p in kept if p - prompt_len in older}
        near_ties += check_top(chosen, scores, n_keep - prompt_len - newest, f"{case = }")
        cases += 1
    assert cases > 20
    assert near_ties <= 0.05 * cases


@pytest.mark.parametrize(("budget", "recent"), [(40, 10), (41, 10), (512, 128), (600, 128), (8, 2), (6, 1)])
def test_by_default_a_quarter_of_the_budget_and_at_most_128_tokens_are_recent(budget: int, recent: int) -> None:
    change = torch.zeros(2, 700)
    change[0] = torch.linspace(9, 1, 700)  # the oldest have the highest raw difference
    kept = kept_positions(EpiKV(signal="raw"), resident(list(range(704)), change, 4), budget)
    assert kept == [*range(budget - recent), *range(704 - recent, 704)]
    assert EpiKV().recent_count(budget) == recent


def test_one_token_a_step_gives_the_published_rhythm() -> None:
    """`kv_period=1`: each step appends a token and evicts the one with the lowest signal that is not recent."""
    prompt_len, budget, decoded = 7, 32, 150
    change, policy = random_change(decoded, seed=3), EpiKV(window=16)
    assert [policy.due(budget + more, budget, 1) for more in (0, 1)] == [False, True]
    held = list(range(prompt_len))
    expected = list(held)
    for column in range(decoded):
        held.append(prompt_len + column)
        expected.append(prompt_len + column)
        if len(held) > budget:
            held = kept_positions(policy, resident(held, change[:, : column + 1], prompt_len), budget)
            older = [p for p in expected[:-8] if p >= prompt_len]
            expected.remove(min(older, key=lambda p: signal_by_loops(change, p - prompt_len, "zscore", 16)))
        assert held == expected
    assert len(held) == budget
    assert held[prompt_len : prompt_len + 1] != [prompt_len]


@pytest.mark.parametrize("decoded", [0, 1, 9, 30])
def test_of_a_prompt_that_is_too_long_the_sinks_and_the_newest_stay(decoded: int) -> None:
    kept = kept_positions(EpiKV(), resident(list(range(100 + decoded)), random_change(decoded), 100), 40)
    first = 100 + decoded - 10  # the recent ones: a quarter of 40
    assert kept == [*range(4), *range(min(first, 100) - 26, min(first, 100)), *range(first, 100 + decoded)]


def test_a_prompt_that_fits_the_budget_but_not_beside_the_recent_tokens_loses_its_oldest() -> None:
    kept = kept_positions(EpiKV(), resident(list(range(65)), random_change(30), 35), 40)
    assert kept == [*range(4), *range(9, 35), *range(55, 65)]


def test_a_prompt_that_just_fits_is_kept_whole() -> None:
    kept = kept_positions(EpiKV(), resident(list(range(100)), random_change(70), 30), 40)
    assert kept == [*range(30), *range(90, 100)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_change_that_is_no_number_never_costs_the_prompt(bad: float) -> None:
    change = random_change(100)
    change[0, 40] = bad
    for signal in SIGNALS:
        kept = kept_positions(EpiKV(signal=signal), resident(list(range(120)), change, 20), 40)
        assert set(kept) >= {*range(20), *range(110, 120)}
        assert 60 in kept or signal == "rolling"


def test_layers_and_heads_that_are_not_given_do_not_matter() -> None:
    whole = resident(list(range(90)), random_change(80), 10)
    part = replace(whole, shape=(1, 1, 90), positions=whole.require("positions")[1:, 2:])
    policy = EpiKV()
    assert (policy.select(whole, 40, 64, NOISE) == policy.select(part, 40, 64, NOISE)).all()
    assert policy.granularity == Granularity.GLOBAL
    assert (policy.spans_heads, policy.spans_layers) == (False, False)
    reserving = EpiKV(value_reserve=1)
    assert (reserving.spans_heads, reserving.spans_layers) == (True, True)


@pytest.mark.parametrize("measure", ["range", "variance", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_value_reserve_takes_the_widest_decode_tokens_between_prompt_and_recent(
    measure: Measure, dtype: torch.dtype
) -> None:
    prompt_len, tokens, recent, n_keep, reserve = 12, 90, 10, 40, 7
    candidates = replace(
        resident(list(range(tokens)), random_change(tokens - prompt_len), prompt_len),
        values=random_candidates(2, 3, tokens, 60, dtype=dtype, seed=4).require("values"),
    )
    candidates.require("values")[:, :, [0, 5, 85]] *= 50  # sinks, prompt and recent tokens take no place
    spreads = [spread_by_loops(values, measure) for values in candidates.require("values").flatten(0, 1)]
    mean = [sum(head[n] for head in spreads) for n in range(prompt_len, tokens - recent)]
    widest = sorted(range(len(mean)), key=lambda n: -mean[n])
    assert mean[widest[reserve - 1]] > (1 + 1e-6) * mean[widest[reserve]]
    reserved = {prompt_len + n for n in widest[:reserve]}
    score = {
        p: signal_by_loops(candidates.require("hidden_change"), p - prompt_len, "zscore", 64) for p in range(12, 80)
    }
    others = sorted(set(score) - reserved, key=lambda p: -score[p])[: n_keep - prompt_len - recent - reserve]
    policy = EpiKV(value_reserve=reserve, value_measure=measure)
    kept = kept_positions(policy, candidates, n_keep)
    assert set(kept) == {*range(prompt_len), *range(tokens - recent, tokens), *reserved, *others}
    assert reserved - set(kept_positions(EpiKV(), candidates, n_keep))
    assert set(kept_positions(EpiKV(value_reserve=26), candidates, n_keep)) >= {*range(prompt_len), *range(80, 90)}


def test_values_that_are_no_numbers_are_reserved_first() -> None:
    values = torch.rand(2, 3, 60, 8)
    values[0, 0, 33] = math.nan
    candidates = replace(resident(list(range(60)), torch.zeros(2, 50), 10), values=values)
    assert 33 in kept_positions(EpiKV(value_reserve=1), candidates, 20)


def test_needs() -> None:
    one = (Band(10 / 32, 10 / 32), Band(21 / 32, 21 / 32))
    assert EpiKV().needs(64) == Needs(positions=True, hidden_bands=one)
    assert EpiKV(signal="rolling").needs(1).hidden_bands == one
    assert EpiKV(value_reserve=1).needs(64) == Needs(values=True, positions=True, hidden_bands=one)
    wide = (Band(7 / 32, 13 / 32), Band(18 / 32, 25 / 32))
    assert EpiKV(signal="adaptive").needs(64).hidden_bands == wide
    assert EpiKV(signal="adaptive", band_b=5).needs(64).hidden_bands == (wide[0], Band(5, 5))
    given = EpiKV(band_a=0, band_a_last=0.25, band_b=12, band_b_last=14).needs(64)
    assert given.hidden_bands == (Band(0, 0.25), Band(12, 14))


@pytest.mark.parametrize(("depth", "layers"), [(28, (9, 18)), (32, (10, 21)), (36, (11, 24)), (64, (20, 42))])
def test_the_default_layers_are_the_published_ones_scaled_to_the_depth(depth: int, layers: tuple[int, int]) -> None:
    bands = [list(band.layers(depth)) for band in EpiKV().bands]
    assert bands == [[layer] for layer in layers]
    EpiKV().fit(LLAMA_8B._replace(layers=depth))


def test_the_adaptive_bands_of_the_published_model() -> None:
    assert [list(band.layers(32)) for band in EpiKV(signal="adaptive").bands] == [[*range(7, 14)], [*range(18, 26)]]


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (EpiKV(band_b=32), "band_b of epikv does not fit the model: layers 32 to 32 .* layers 0 to 31; set band_b"),
        (EpiKV(band_a=9, band_a_last=3), "band_a of epikv .*layers 9 to 3"),
        (EpiKV(band_a=0.999), "band_a of epikv .*layers 32 to 32"),
    ],
)
def test_bands_that_the_model_does_not_have_are_refused(policy: EpiKV, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        policy.fit(LLAMA_8B)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "budget", "sentence"),
    [
        (EpiKV(), 5, "kv_budget=5 .* always keeps 5 tokens .* at least 6"),
        (EpiKV(recent=40), 44, "kv_budget=44 .* always keeps 44 tokens .* at least 45"),
        (EpiKV(sinks=90), 100, "always keeps 100 tokens .* at least 121"),
        (EpiKV(value_reserve=27), 40, "value_reserve:27 is more than the 26 tokens that kv_budget=40"),
        (EpiKV(window=1), 64, "window:1 leaves signal:zscore nothing to compare"),
        (EpiKV(band_a_last=3), 64, "band_a_last:3 ends a band that has no first layer; set band_a too"),
        (EpiKV(band_b=2.5), 64, "band_b:2.5 is neither"),
        (EpiKV(band_b=2, band_b_last=7.5), 64, "band_b_last:7.5 is neither"),
    ],
)
@pytest.mark.parametrize("period", [1, 64])
def test_what_cannot_work_is_refused_in_one_sentence(policy: EpiKV, budget: int, period: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        policy.check(budget, period)
    assert "\n" not in str(refused.value)


def test_what_can_work_is_not_refused() -> None:
    EpiKV().check(6, 1)
    EpiKV(recent=40).check(45, 1)
    EpiKV(sinks=90).check(121, 64)
    EpiKV(value_reserve=26).check(40, 1)
    EpiKV(window=1, signal="rolling").check(64, 1)
    EpiKV(band_a=0.25, band_a_last=12).check(64, 64)


def test_published_defaults() -> None:
    policy = EpiKV()
    assert policy == EpiKV(sinks=4, recent=None, signal="zscore", window=64, value_reserve=0, value_measure="range")
    assert (policy.name, policy.card.flash_attention) == ("epikv", True)
    assert policy.forced(64) == policy.forced(1) == 4
    assert EpiKV(recent=9).forced(64) == 13


def test_a_history_of_another_length_is_noticed() -> None:
    with pytest.raises(AssertionError, match="decoded = 50"):
        EpiKV().select(
            replace(resident(list(range(60)), torch.zeros(2, 50), 10), true_len=60, hidden_change=torch.zeros(2, 49)),
            30,
            64,
            NOISE,
        )
