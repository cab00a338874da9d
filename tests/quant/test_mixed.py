"""Mixed precision against loops: who is protected, what a reader sees, and what it costs."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from kvpolicy.quant import protection
from kvpolicy.quant.asymmetric import AsymmetricInt
from kvpolicy.quant.codec import Unchanged
from kvpolicy.quant.codecs import codec
from kvpolicy.quant.mixed import SELECTORS, MixedPrecision

INT4 = AsymmetricInt(4, 32)
SHARES = [0.0, 0.05, 0.29, 0.5, 1.0]
BORDERS = [(0, 0), (4, 0), (0, 7), (4, 7), (90, 40), (200, 0)]  # sinks and recent tokens of 100
selectors = pytest.mark.parametrize("selector", SELECTORS)
borders = pytest.mark.parametrize(("sinks", "recent"), BORDERS)
shares = pytest.mark.parametrize("share", SHARES)


def random_rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Tokens of unequal size, each around another mean: range, norm and error order them differently."""
    generator = torch.Generator().manual_seed(shape[-1])
    size, mean = (torch.randn((*shape[:-1], 1), generator=generator) for _ in range(2))
    return (torch.randn(shape, generator=generator) * size.exp() + 2 * mean).to(dtype)


def candidates(tokens: int, sinks: int, recent: int) -> list[int]:
    return [token for token in range(tokens) if token >= sinks and token < tokens - recent]


def scores_by_loops(row: list[list[float]], restored: list[list[float]], selector: str) -> list[float]:
    """Of each token of one head."""
    if selector == "range":
        return [max(token) - min(token) for token in row]
    if selector == "l2":
        return [math.sqrt(sum(x * x for x in token)) for token in row]
    assert selector == "oracle"
    return [sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for a, b in zip(row, restored, strict=True)]


@shares
@borders
@pytest.mark.parametrize("selector", ["range", "l2", "oracle"])
def test_the_highest_of_the_tokens_between_are_protected(selector: str, sinks: int, recent: int, share: float) -> None:
    rows = random_rows(2, 100, 32)
    protected = MixedPrecision(INT4, share, selector, sinks=sinks, recent=recent).protected(rows)
    assert protected.dtype == torch.bool
    between = candidates(100, sinks, recent)
    count = min(math.floor(Fraction(str(share)) * 100), len(between))
    for head, kept in zip(rows, protected.tolist(), strict=True):
        scores = scores_by_loops(head.double().tolist(), INT4.round_trip(head).double().tolist(), selector)
        chosen = sorted(between, key=lambda token, scores=scores: (-scores[token], token))[:count]
        assert [token for token in between if kept[token]] == sorted(chosen)
        assert all(kept[token] for token in range(100) if token not in between)


@shares
@borders
def test_random_tokens_are_others_for_each_head_and_seed(sinks: int, recent: int, share: float) -> None:
    rows = random_rows(3, 2, 100, 32)
    store = MixedPrecision(INT4, share, "random", sinks=sinks, recent=recent, seed=1)
    protected = store.protected(rows)
    between = candidates(100, sinks, recent)
    count = min(math.floor(Fraction(str(share)) * 100), len(between))
    assert (protected[..., between].sum(dim=-1) == count).all()
    outside = [token for token in range(100) if token not in between]
    assert protected[..., outside].all()
    assert torch.equal(store.protected(-rows), protected)
    if 5 <= count <= 50 and len(between) > 80:
        assert len({tuple(kept) for kept in protected.flatten(0, 1).tolist()}) == 6
        assert not torch.equal(MixedPrecision(INT4, share, "random", sinks, recent, seed=2).protected(rows), protected)


def test_random_choice_prefers_nobody() -> None:
    protected = MixedPrecision(INT4, 0.3, "random").protected(random_rows(2000, 20, 32))
    frequency = protected.double().mean(dim=0)
    assert ((frequency - 0.3).abs() < 4 * math.sqrt(0.3 * 0.7 / 2000)).all()


@shares
def test_without_a_selector_sinks_and_recent_tokens_alone_are_protected(share: float) -> None:
    protected = MixedPrecision(INT4, share, "none", sinks=2, recent=3).protected(random_rows(2, 10, 32))
    assert protected.tolist() == [[True] * 2 + [False] * 5 + [True] * 3] * 2


@selectors
def test_a_reader_sees_protected_rows_as_they_are_and_others_restored(selector: str) -> None:
    rows = random_rows(2, 3, 60, 64)
    untouched = rows.clone()
    store = MixedPrecision(INT4, 0.1, selector, sinks=2, recent=5)
    kept, seen, restored = store.protected(rows), store.round_trip(rows), INT4.round_trip(rows)
    assert kept.shape == rows.shape[:-1]
    assert seen.dtype == rows.dtype
    assert torch.equal(seen[kept], rows[kept])
    assert torch.equal(seen[~kept], restored[~kept])
    assert not torch.equal(seen[kept], restored[kept])
    assert torch.equal(rows, untouched)
    assert int(kept.sum()) == 2 * 3 * (7 + (0 if selector == "none" else 6))


@selectors
def test_a_text_shorter_than_its_borders(selector: str) -> None:
    store = MixedPrecision(INT4, 0.5, selector, sinks=4, recent=8)
    for tokens in range(13):
        rows = random_rows(2, tokens, 32)
        assert store.protected(rows).all()
        assert torch.equal(store.round_trip(rows), rows)


@selectors
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_refused_even_where_it_is_protected(selector: str, bad: float) -> None:
    rows = random_rows(2, 30, 32)
    rows[1, 0, 5] = bad
    with pytest.raises(ValueError, match="finite numbers only"):
        MixedPrecision(INT4, 0.1, selector, sinks=1).round_trip(rows)


def test_an_oracle_beats_all_others_and_range_beats_chance() -> None:
    rows = random_rows(4, 200, 64)

    def error(selector: str) -> float:
        return float((MixedPrecision(INT4, 0.1, selector).round_trip(rows).double() - rows.double()).norm())

    assert error("oracle") < error("range") < error("random") < error("none")
    assert error("oracle") < error("l2")


def test_range_is_the_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def newest_widest(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.shape)
        return torch.arange(values.shape[-2]).float().expand(values.shape[:-1])

    monkeypatch.setattr(protection, "value_range", newest_widest)
    protected = MixedPrecision(INT4, 0.2, "range", sinks=1, recent=2).protected(random_rows(3, 10, 32))
    assert protected.tolist() == [[True] + [False] * 5 + [True] * 4] * 3
    assert seen == [(3, 7, 32)]


@pytest.mark.parametrize(
    ("store", "head_dim", "tokens", "expected"),
    [
        pytest.param(MixedPrecision(codec("int4"), 0.05, "range"), 128, 100, 5.55, id="5 % beside int4"),
        pytest.param(MixedPrecision(codec("int4"), 0.05, "random"), 128, 4000, 5.55, id="whoever chooses"),
        pytest.param(MixedPrecision(codec("int4"), 0.05, "range"), 128, 119, 4.75 + 16 * 5 / 119, id="whole tokens"),
        pytest.param(MixedPrecision(codec("int4"), 0.05, "range"), 128, 10, 4.75, id="none yet, but an index"),
        pytest.param(MixedPrecision(codec("int4"), 0.05, "none"), 128, 100, 4.5, id="no selector"),
        pytest.param(MixedPrecision(codec("int4"), 0.0, "range"), 128, 100, 4.5, id="no share"),
        pytest.param(MixedPrecision(codec("int4"), 0.0, "none", 4, 6), 128, 100, 4.75 + 1.6, id="borders alone"),
        pytest.param(MixedPrecision(codec("int4"), 0.05, "l2", 4, 6), 128, 100, 4.75 + 16 * 0.15, id="borders too"),
        pytest.param(MixedPrecision(codec("int4"), 0.5, "l2", 4, 6), 128, 12, 4.75 + 16, id="no more than all"),
        pytest.param(MixedPrecision(codec("int2-g16"), 0.1, "range"), 64, 50, 4 + 1.6 + 0.5, id="2 bits"),
        pytest.param(MixedPrecision(Unchanged(), 0.0, "none"), 80, 50, 16, id="nothing stored otherwise"),
    ],
)
def test_real_bits(store: MixedPrecision, head_dim: int, tokens: int, expected: float) -> None:
    assert store.bits(head_dim, torch.bfloat16, tokens) == pytest.approx(expected, rel=1e-12)


def test_rows_of_32_bits_cost_32() -> None:
    assert MixedPrecision(codec("int4"), 0.05, "range").bits(128, torch.float32, 100) == pytest.approx(5 + 1.6 + 0.25)


@selectors
@shares
@borders
def test_the_bits_are_those_of_the_tokens_that_are_protected(
    selector: str, share: float, sinks: int, recent: int
) -> None:
    rows = random_rows(2, 100, 32)
    store = MixedPrecision(INT4, share, selector, sinks=sinks, recent=recent)
    held = store.protected(rows).double().mean()
    expected = 5 + 16 * held + (1 if held else 0)
    assert store.bits(32, torch.bfloat16, 100) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"selector": "largest"}, "no selector 'largest'; use one of range, l2, random, oracle, none"),
        ({"share": -0.1}, "between 0 and 1, got -0.1"),
        ({"share": 1.5}, "between 0 and 1, got 1.5"),
        ({"share": math.nan}, "between 0 and 1, got nan"),
        ({"sinks": -1}, "must not be negative, got -1 and 0"),
        ({"recent": -1}, "must not be negative, got 0 and -1"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecision(**{"codec": INT4, "share": 0.1, "selector": "range"} | changed)  # type: ignore[arg-type]
