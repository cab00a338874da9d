"""What the numbers of a report add up to, and the document that holds them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from kvpolicy.reports.quant_error.document import document, plain
from kvpolicy.reports.quant_error.report import Report, shown_layers
from tests.reports.quant_error.random_reports import HEAD_DIM, TOKENS, random_report


@pytest.fixture(scope="module")
def report() -> Report:
    return random_report(("int4-g64", "int2-g32"), ("int8-g64",), run_keys=True)


def saved(report: Report) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(document(report), allow_nan=False))
    return loaded


def test_every_arm_is_there_once_and_controls_beside_what_they_control(report: Report) -> None:
    found = saved(report)
    first, second = found["comparisons"]
    assert (first["control_of_no_more_bits"], first["control_of_more_bits"]) == ("int4-g32", "int4-g16")
    assert (second["control_of_no_more_bits"], second["control_of_more_bits"]) == ("int2-g16", "int4-g64")
    named = {name for one in (first, second) for name in (one["plain"], *one["protected"].values())}
    named |= {one[key] for one in (first, second) for key in ("control_of_no_more_bits", "control_of_more_bits")}
    keys = {"keys int8-g64", *(f"{values}, keys int8-g64" for values in ("int4-g64", "int2-g32"))}
    both = {f"{values} range 5%, keys int8-g64" for values in ("int4-g64", "int2-g32")}
    assert set(found["arms"]) == named | keys | both
    assert all(set(arm["output"]) == {"kl_mean", "kl_p99", "top1_flips", "nll_delta"} for arm in found["arms"].values())


def test_an_arm_has_its_errors_by_layer_and_head(report: Report) -> None:
    arm = saved(report)["arms"]["int4-g64 range 5%, keys int8-g64"]
    assert set(arm["errors"]) == {"values", "keys"}
    for errors in arm["errors"].values():
        assert set(errors) == {"mse", "relative", "sqnr_db", "max_abs", "cosine"}
        assert all(np.shape(table) == (3, 2) for table in errors.values())
        assert np.all(np.diff(np.mean(errors["mse"], axis=1)) > 0)  # rows grow from layer to layer
    assert np.shape(arm["attention_error"]) == (3, 4)
    assert "error_held_by_protected" not in arm
    alone = saved(report)["arms"]["int4-g64 range 5%"]
    assert set(alone["errors"]) == {"values"}
    assert np.shape(alone["error_held_by_protected"]) == (3, 2)


def test_bits_and_bytes_are_counted_together(report: Report) -> None:
    arm = saved(report)["arms"]["int4-g64 range 5%, keys int8-g64"]
    protected = TOKENS * 5 // 100
    assert arm["value_bits"] == pytest.approx(4 + 32 / 64 + 16 * protected / TOKENS + 32 / HEAD_DIM)
    assert arm["key_bits"] == 8.5
    assert arm["bytes_per_token"] == pytest.approx(3 * 2 * HEAD_DIM * (arm["value_bits"] + 8.5) / 8)


def test_advice_follows_from_the_numbers_beside_it(report: Report) -> None:
    found = saved(report)
    for one in found["comparisons"]:
        kl = {name: arm["output"]["kl_mean"] for name, arm in found["arms"].items()}
        assert f"{kl[one['plain']]:.4f} nats without protection" in one["advice"]["because"]
        assert f"{kl[one['protected']['range']]:.4f} nats with it" in one["advice"]["because"]
        assert f"{kl[one['control_of_no_more_bits']]:.4f} nats of the control" in one["advice"]["because"]
        low, high = one["kl_difference_protected_less_control"]
        assert low < kl[one["protected"]["range"]] - kl[one["control_of_no_more_bits"]] < high
        attention = np.mean(found["arms"][one["plain"]]["attention_error"], axis=1)
        tails = np.mean(found["tail_ratios"]["values"]["p99_to_p50"], axis=1)
        for layer, each in enumerate(one["layers"]):
            assert each["layer"] == layer
            assert f"{attention[layer]:.2%} without protection" in each["because"]
            assert each["tail"].startswith(f"tail {tails[layer]:.2f}, below")


def test_correlation_tails_and_positions_are_there_for_keys_and_values(report: Report) -> None:
    found = saved(report)
    codecs = {"values int4-g64", "values int4-g32", "values int4-g16", "values int2-g32", "values int2-g16"}
    assert set(found["correlation"]) == set(found["error_by_position"]) == codecs | {"keys int8-g64"}
    assert all(np.shape(table) == (3, 2) for table in found["correlation"].values())
    assert all(np.shape(table) == (3, 32) for table in found["error_by_position"].values())
    assert {(p["layer"], p["codec"]) for p in found["range_and_error_of_tokens"]} == {
        (layer, codec) for layer in range(3) for codec in ("int4-g64", "int2-g32")
    }


def test_keys_that_were_not_run_have_no_output() -> None:
    found = saved(random_report())
    assert "output" not in found["arms"]["keys int4-g64"]
    assert found["arms"]["keys int4-g64"]["errors"]["keys"]["mse"]


def test_what_is_not_finite_is_null() -> None:
    found = saved(random_report(flat=True))
    assert found["arms"]["int4-g64"]["errors"]["values"]["sqnr_db"] == [[None, None]] * 3
    assert found["correlation"]["values int4-g64"] == [[None, None]] * 3
    assert found["comparisons"][0]["advice"]["verdict"] == "leave"
    assert plain(np.array([1 / 3, np.inf, -np.nan])) == [0.333333, None, None]
    assert plain([1, "a", None, True]) == [1, "a", None, True]


def test_the_same_numbers_give_the_same_document() -> None:
    first, second = (json.dumps(document(random_report())) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("layers", "shown"), [(1, [0]), (3, [0, 1, 2]), (30, [0, 10, 19, 29]), (36, [0, 12, 23, 35])])
def test_some_layers_are_shown_first_and_last_among_them(layers: int, shown: list[int]) -> None:
    assert shown_layers(layers) == shown


def test_means_are_of_layers_and_heads(report: Report) -> None:
    plain_arm = report.comparisons[0].plain
    expected = torch.stack([layer.errors[plain_arm.name, "values"].relative for layer in report.layers])
    np.testing.assert_array_equal(report.errors(plain_arm, "values", "relative"), expected.numpy())
