"""The page, its tables and its figures, of reports that are ordinary and of some that are not."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from kvpolicy.reports.quant_error import figures, maps
from kvpolicy.reports.quant_error.page import page
from kvpolicy.reports.quant_error.report import Report
from kvpolicy.reports.quant_error.tables import advice_sentences, arm_blocks, layer_rows
from tests.reports.quant_error.random_reports import random_report

FIGURES: dict[str, Callable[[Report], bytes]] = {
    **{name: getattr(figures, name) for name in dir(figures) if name.endswith("_png")},
    "attention_map_png": maps.attention_map_png,
    "correlation_map_png": maps.correlation_map_png,
    **{measure: partial(maps.errors_png, measure=measure) for measure in maps.MEASURES},
}
REPORTS: dict[str, Callable[[], Report]] = {
    "ordinary": lambda: random_report(("int4-g64", "int2-g32"), ("int8-g64",), run_keys=True, model="<b>Qwen</b>"),
    "one layer and head": lambda: random_report(layers=1, kv_heads=1),
    "no error at all": lambda: random_report(flat=True),
    "many codecs": lambda: random_report(("int4-g64", "int2-g64", "int8-g16"), ("int8", "int4", "int2"), layers=2),
}


@cache
def report_of(name: str) -> Report:
    return REPORTS[name]()


def test_the_page_holds_everything_itself_and_escapes_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = page(report_of("ordinary"))
    assert not re.search(r'(src|href)="(?!data:)', shown)
    assert "<script" not in shown
    assert "<b>Qwen" not in shown
    assert "&lt;b&gt;Qwen&lt;/b&gt;" in shown
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    assert len(pictures) == len(FIGURES) == 14
    for data in pictures:
        assert imread(io.BytesIO(base64.b64decode(data))).shape[1] == 1100
    assert "It can fall while KL\ngrows" in shown
    for sentence in advice_sentences(report_of("ordinary")):
        assert f"<li>{sentence}</li>" in shown.replace("&gt;", ">")


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        *product(("one layer and head", "no error at all"), ("arms_png", "held_png", "tails_png", "mse")),
        ("no error at all", "correlation_png"),
        ("no error at all", "sqnr_db"),
        ("many codecs", "arms_png"),
        ("many codecs", "attention_map_png"),
        ("many codecs", "position_png"),
    ],
)
def test_figures_can_be_drawn_of_any_report(name: str, figure: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that collapses, a logarithm of 0, a mean of nothing
        drawn = imread(io.BytesIO(FIGURES[figure](report_of(name))))
    assert drawn[..., :3].std() > 0.01  # not blank


def test_what_is_not_finite_is_left_out_of_a_band() -> None:
    axes = Figure().subplots()
    table = np.array([[1.0, 3.0], [np.inf, 4.0], [np.nan, np.nan], [np.nan, 5.0]])
    figures.band(axes, table, "ratio", "black")
    (line,) = axes.lines
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 3])
    np.testing.assert_array_equal(line.get_ydata(), [2, 4, 5])


def test_the_same_report_gives_the_same_picture() -> None:
    first, second = (figures.arms_png(random_report()) for _ in range(2))
    assert first == second


def test_a_figure_shows_other_numbers_otherwise() -> None:
    report = report_of("one layer and head")
    assert figures.held_png(report) != figures.held_png(random_report(("int2-g32",), layers=1, kv_heads=1))


def test_controls_stand_in_the_block_of_what_they_control() -> None:
    first, second, keys, both = arm_blocks(report_of("ordinary"))
    assert [row[0] for row in first.rows.rows] == [
        "int4-g64",
        *(f"int4-g64 {selector} 5%" for selector in ("random", "l2", "range", "oracle")),
        "≤ bits: int4-g32",
        "> bits: int4-g16",
    ]
    assert [row[0] for row in second.rows.rows][-2:] == ["≤ bits: int2-g16", "> bits: int4-g64"]
    assert [row[0] for row in keys.rows.rows] == ["keys int8-g64"]
    assert len(both.rows.rows) == 4


def test_a_row_has_the_numbers_of_its_arm() -> None:
    report = report_of("ordinary")
    block = arm_blocks(report)[3]
    arm = report.both[1]
    row = dict(zip(block.rows.header, block.rows.rows[1], strict=True))
    output = report.outputs[arm.name]
    assert row["arm"] == arm.name == "int4-g64 range 5%, keys int8-g64"
    assert row["V error"] == f"{report.errors(arm, 'values', 'relative').mean():.2%}"
    assert row["K error"] == f"{report.errors(arm, 'keys', 'relative').mean():.2%}"
    assert row["attention error"] == f"{report.attention(arm).mean():.2%}"
    assert row["KL mean"] == f"{output.kl.mean():.5f}"
    assert row["KL p99"] == f"{np.quantile(output.kl, 0.99):.4f}"
    assert row["top-1 flips"] == f"{output.flips.mean():.2%}"
    assert row["NLL delta"] == f"{output.nll_delta.mean():+.5f}"


def test_what_was_not_stored_in_few_bits_or_not_run_is_a_dash() -> None:
    keys = arm_blocks(report_of("many codecs"))[-1]
    row = dict(zip(keys.rows.header, keys.rows.rows[0], strict=True))
    assert row["V error"] == row["KL mean"] == row["NLL delta"] == "-"
    assert row["K error"] != "-"


def test_layers_have_a_row_each_with_their_advice() -> None:
    report = report_of("ordinary")
    header, rows = layer_rows(report, report.comparisons[0])
    assert header[5:] == ("int4-g64", "int4-g64 range 5%", "int4-g32", "int4-g16", "advice")
    assert [row[0] for row in rows] == ["0", "1", "2"]
    tails = report.tails("values", "p99_to_p50")
    for layer, row in enumerate(rows):
        assert row[1] == f"{tails[layer].mean():.2f} ({tails[layer].max():.2f})"
        assert row[4] == f"{report.held(report.comparisons[0].protected['range'])[layer].mean():.1%}"
        assert row[-1].startswith("take a smaller group, int4-g32, and protect nothing: ")
        assert row[-1].endswith(f"tail {tails[layer].mean():.2f}, below 3.3")


def test_advice_says_what_the_next_larger_format_would_do() -> None:
    report = report_of("ordinary")
    first, second = advice_sentences(report)
    assert f" Next above protection, int4-g16 with 6.00 bits: {report.outputs['int4-g16'].kl.mean():.4f} nats." in first
    assert f" Next above protection, int4-g64 with 4.50 bits: {report.outputs['int4-g64'].kl.mean():.4f}" in second
    assert first.endswith("By layers: take a smaller group, int4-g32, and protect nothing in 3.")


def test_without_error_the_advice_is_to_leave() -> None:
    (sentence,) = advice_sentences(report_of("no error at all"))
    assert sentence.startswith("int4-g64: leave. Mean KL: 0.00000 nats without protection are at most 0.001")
    assert sentence.endswith("By layers: leave in 3.")
    assert "nan" in layer_rows(report_of("no error at all"), report_of("no error at all").comparisons[0]).rows[0]
