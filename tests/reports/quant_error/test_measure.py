"""Measures of one layer against the definitions, written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpolicy.quant.codecs import codec
from kvpolicy.quant.mixed import MixedPrecision
from kvpolicy.reports.quant_error.arms import AS_THEY_ARE, Arm, comparison, key_arms
from kvpolicy.reports.quant_error.capture import LayerRows, QuantErrorError
from kvpolicy.reports.quant_error.measure import ATTENDING, BINS, Kind, LayerMeasures, Table, measure_layer, restored

TOKENS, KV_HEADS, HEADS, HEAD_DIM, SCALING = 150, 2, 6, 32, 0.3
COMPARISON = comparison(codec("int4-g16"), 0.1, HEAD_DIM, torch.bfloat16, TOKENS)
KEYS = key_arms([codec("int8-g32")])
BOTH = Arm(COMPARISON.plain.values, KEYS[0].keys)
RANGE = COMPARISON.protected["range"]


def layer(number: int = 0, dtype: torch.dtype = torch.bfloat16) -> LayerRows:
    """Tokens of very different ranges, two equal ones and one of zeros."""
    random = torch.Generator().manual_seed(number)
    queries = torch.randn(HEADS, TOKENS, HEAD_DIM, generator=random)
    keys, values = torch.randn(2, KV_HEADS, TOKENS, HEAD_DIM, generator=random)
    values = values * torch.linspace(0.2, 3, TOKENS)[torch.randperm(TOKENS, generator=random), None]
    values[:, 5] = values[:, 4]
    values[:, 7] = 0
    return LayerRows(
        number, queries.transpose(0, 1).contiguous().transpose(0, 1), keys.to(dtype), values.to(dtype), SCALING
    )


@pytest.fixture(scope="module")
def found() -> LayerMeasures:
    return measure_layer(layer(), [*COMPARISON.arms, *KEYS, BOTH])


def wide(x: torch.Tensor) -> Table:
    return np.asarray(x.double().numpy())


def attention_by_loops(rows: LayerRows, keys: torch.Tensor, values: torch.Tensor) -> list[list[Table]]:
    """Output of each head's newest queries."""
    outputs = []
    for head in range(HEADS):
        q, k, v = (wide(x) for x in (rows.queries[head], keys[head // 3], values[head // 3]))
        of_head = []
        for t in range(TOKENS - ATTENDING, TOKENS):
            weights = np.exp(SCALING * k[: t + 1] @ q[t])
            of_head.append(weights @ v[: t + 1] / weights.sum())
        outputs.append(of_head)
    return outputs


@pytest.mark.parametrize("arm", [COMPARISON.plain, RANGE, KEYS[0], BOTH], ids=lambda arm: arm.name)
def test_attention_reads_what_the_arm_stored(arm: Arm, found: LayerMeasures) -> None:
    rows = layer()
    keys, values = arm.keys.round_trip(rows.keys), arm.values.round_trip(rows.values)
    exact, changed = (attention_by_loops(rows, *pair) for pair in ((rows.keys, rows.values), (keys, values)))
    for head in range(HEADS):
        before, after = np.array(exact[head]), np.array(changed[head])
        expected = np.linalg.norm(after - before) / np.linalg.norm(before)
        assert expected > 0.001
        assert float(found.attention[arm.name][head]) == pytest.approx(expected, rel=1e-3)


def test_errors_are_of_what_the_arm_stores_in_few_bits(found: LayerMeasures) -> None:
    rows = layer()
    cases: list[tuple[Arm, Kind]] = [
        (COMPARISON.plain, "values"),
        (RANGE, "values"),
        (KEYS[0], "keys"),
        (BOTH, "keys"),
        (BOTH, "values"),
    ]
    for arm, kind in cases:
        store, source = (arm.values, rows.values) if kind == "values" else (arm.keys, rows.keys)
        for head in range(KV_HEADS):
            before, after = wide(source[head]), wide(store.round_trip(source)[head])
            errors = found.errors[arm.name, kind]
            assert float(errors.mse[head]) == pytest.approx(((after - before) ** 2).mean())
            assert float(errors.max_abs[head]) == pytest.approx(abs(after - before).max())
    assert (KEYS[0].name, "values") not in found.errors
    assert (COMPARISON.plain.name, "keys") not in found.errors
    assert found.errors[RANGE.name, "values"].mse.max() < found.errors[COMPARISON.plain.name, "values"].mse.min()


def test_correlation_is_of_range_and_length_of_the_error(found: LayerMeasures) -> None:
    rows = layer()
    cases: list[tuple[Kind, str, torch.Tensor]] = [
        ("values", "int4-g16", rows.values),
        ("keys", "int8-g32", rows.keys),
    ]
    for kind, name, source in cases:
        for head in range(KV_HEADS):
            before, after = wide(source[head]), wide(codec(name).round_trip(source)[head])
            ranges = before.max(axis=1) - before.min(axis=1)
            expected = np.corrcoef(ranges, np.linalg.norm(after - before, axis=1))[0, 1]
            assert float(found.correlation[kind, name][head]) == pytest.approx(expected)
    unprotected = {arm.values.codec.name for arm in COMPARISON.arms if arm.values.selector == "none"}
    assert set(found.correlation) == {("keys", "int8-g32"), *(("values", name) for name in unprotected)}


def test_tails_are_over_the_tokens_of_a_head(found: LayerMeasures) -> None:
    values = wide(layer().values)
    ranges = values.max(axis=2) - values.min(axis=2)
    median = np.median(ranges, axis=1)
    np.testing.assert_allclose(found.tails["values"].p99_to_p50, np.quantile(ranges, 0.99, axis=1) / median)
    np.testing.assert_allclose(found.tails["values"].max_to_p50, ranges.max(axis=1) / median)


def test_protected_tokens_hold_a_share_of_the_error_without_them(found: LayerMeasures) -> None:
    rows = layer()
    squared = ((wide(codec("int4-g16").round_trip(rows.values)) - wide(rows.values)) ** 2).sum(axis=2)
    values = wide(rows.values)
    ranges = values.max(axis=2) - values.min(axis=2)
    for selector, scores in (("oracle", squared), ("range", ranges), ("l2", np.linalg.norm(values, axis=2))):
        largest = np.argsort(-scores, axis=1, kind="stable")[:, : TOKENS // 10]
        expected = np.take_along_axis(squared, largest, axis=1).sum(axis=1) / squared.sum(axis=1)
        np.testing.assert_allclose(found.held[COMPARISON.protected[selector].name], expected)
    held = {name: float(share.mean()) for name, share in found.held.items()}
    assert held[COMPARISON.protected["random"].name] < held[RANGE.name] <= held[COMPARISON.protected["oracle"].name]
    assert BOTH.name not in held


def test_error_against_position_is_relative_to_the_length_of_the_rows(found: LayerMeasures) -> None:
    rows = layer()
    before, after = wide(rows.values), wide(codec("int4-g16").round_trip(rows.values))
    expected = np.zeros(BINS)
    for head in range(KV_HEADS):
        squared = ((after[head] - before[head]) ** 2).sum(axis=1)
        energy = (before[head] ** 2).sum(axis=1).mean()
        for stretch in range(BINS):
            inside = slice(stretch * TOKENS // BINS, (stretch + 1) * TOKENS // BINS)
            expected[stretch] += squared[inside].mean() / energy / KV_HEADS
    np.testing.assert_allclose(found.by_position["values", "int4-g16"], expected)


def test_points_are_tokens_of_all_heads(found: LayerMeasures) -> None:
    points = found.points["int4-g16"]
    values = wide(layer().values)
    ranges = values.max(axis=2) - values.min(axis=2)
    assert len(points.ranges) == len(points.errors) == TOKENS * KV_HEADS
    np.testing.assert_allclose(points.ranges, ranges.flatten())
    assert points.errors[7] == 0  # the token of zeros


def test_lot_falls_anew_in_each_layer_and_the_same_again() -> None:
    store = COMPARISON.protected["random"].values
    values = layer().values
    first, again, other = (restored(store, values, number) for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_without_error_or_without_spread_are_no_accident() -> None:
    rows = layer()._replace(values=torch.ones(KV_HEADS, TOKENS, HEAD_DIM, dtype=torch.bfloat16))
    found = measure_layer(rows, COMPARISON.arms)
    assert found.errors[COMPARISON.plain.name, "values"].mse.tolist() == [0, 0]
    assert found.attention[COMPARISON.plain.name].tolist() == [0] * HEADS
    assert found.correlation["values", "int4-g16"].isnan().all()
    assert found.by_position["values", "int4-g16"].tolist() == [0] * BINS
    zeros = measure_layer(rows._replace(values=torch.zeros_like(rows.values)), COMPARISON.arms)
    assert zeros.by_position["values", "int4-g16"].tolist() == [0] * BINS


def test_rows_that_cannot_be_stored_name_their_layer() -> None:
    rows = layer(4)
    rows.values[1, 3, 2] = torch.nan
    with pytest.raises(QuantErrorError, match="layer 4: int4-g16 stores finite numbers only"):
        measure_layer(rows, [COMPARISON.plain])


def test_what_is_not_low_bit_is_not_measured() -> None:
    found = measure_layer(layer(), [Arm()])
    assert (found.errors, found.correlation, found.held) == ({}, {}, {})
    assert found.attention["16 bits"].tolist() == [0] * HEADS
    assert MixedPrecision(AS_THEY_ARE.codec, 0.0, "none") == AS_THEY_ARE
