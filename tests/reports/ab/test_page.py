"""The page of a comparison says what it must, in plain sight, and needs nothing from elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from kvpolicy.reports.ab import tables as ab_tables
from kvpolicy.reports.ab.origin import Origin, read_all
from kvpolicy.reports.ab.page import page
from kvpolicy.reports.ab.plan import Plan, PlanFile, Run
from kvpolicy.reports.ab.report import Report, make_report
from kvpolicy.reports.ab.sentences import sentence
from tests.reports.ab.made import evicting, packed, samples_of, whole
from tests.reports.ab.runs import TASK, write

NAMES = ("full", "small", "tiny", "int4<8>")
PLAN = PlanFile(
    Plan({name: {} for name in NAMES}, (TASK,), "confirm", (("full", "small"),), (0,)),
    (Run("2026-01-02T12:00:00+00:00", "out/small"),),
)


def made(
    folder: Path, problems: int = 52, records: tuple[Any, ...] = (whole, evicting(128), evicting(64), packed)
) -> Any:
    found = []
    for number, (name, of_arm) in enumerate(zip(NAMES, records, strict=True)):
        verdicts = [["correct" if (n * 7 + number * n) % 5 else "no_answer"] for n in range(problems)]
        samples = samples_of(verdicts, of_arm)
        for each in samples:
            each["responses"][0] |= {"looped": each["doc_id"] % 10 == number, "truncated": None if number else False}
        write(folder / str(number), samples, kv_policy=None)
        found.append(read_all(name, folder / str(number), None))
    return found


def origin(of: Origin) -> Origin:
    return dataclasses.replace(
        of,
        commands=(f"python -m lm_eval run --output_path {of.arm}",),
        started=("2026-01-02T12:00:00+00:00",),
        versions={"sglang": "0.5.23"},
        chat_template="c0ffee",
        task_hashes={TASK: ("abcd",)},
        wall_seconds=100.0,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    found = made(tmp_path_factory.mktemp("arms"))
    origins = [origin(each) for _, each in found]
    return make_report([arm for arm, _ in found], origins, split="confirm", plan=PLAN)


@pytest.fixture(scope="module")
def shown(report: Report) -> str:
    return page(report)


def text_of(shown: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(img|style)\b.*?>(.*?</style>)?", "", shown, flags=re.S)))


def test_it_needs_nothing_from_elsewhere(shown: str) -> None:
    assert not re.search(r'(src|href)="(?!data:)', shown)
    assert not re.search(r"<(script|link|iframe)\b|url\(", shown)
    assert shown.count("<table>") == shown.count("</table>") >= 7


def test_every_comparison_is_said_in_words(report: Report, shown: str) -> None:
    text = text_of(shown)
    for comparison in report.comparisons:
        assert sentence(comparison, 3) in text
    assert "int4<8>" not in shown
    assert "int4&lt;8&gt;" in shown


def test_labels_of_memory_are_in_plain_sight(report: Report, shown: str) -> None:
    before, details, _ = shown.partition("<details")
    assert not details
    labels = re.findall(r'<td class="(matched|unmatched)">(\1), ([\d.]+)</td>', before)
    expected = [match for match in report.memory.values() for _ in range(2)] + [c.memory for c in report.comparisons]
    assert len(labels) == len(expected)
    assert {float(ratio) for _, _, ratio in labels} >= {round(match.ratio, 3) for match in report.memory.values()}


def test_warnings_and_the_plan_are_on_it(shown: str) -> None:
    text = text_of(shown)
    assert f"{TASK}, small: 52 problems are few: below 200" in text
    assert f"SHA-256 {PLAN.plan.digest}" in text
    assert "out/small" in text
    assert "before the first of 1 runs" in text


def test_how_it_was_run_is_on_it(shown: str) -> None:
    text = text_of(shown)
    for name in NAMES:
        assert f"python -m lm_eval run --output_path {name}" in text
    for fact in ("sglang 0.5.23", "c0ffee", "abcd", "org/model"):
        assert fact in text


def test_failure_modes_are_on_it(shown: str) -> None:
    text = text_of(shown)
    assert "studies of 50 such problems would put small between" in text
    assert f"{TASK}: after prefill small has 1.000 times the cache of full" in text
    assert f"{TASK}: int4<8> is" in text.partition("A gain that comes from memory")[2]


def test_pictures_show_something(shown: str) -> None:
    pictures = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)">', shown)
    assert len(pictures) == 10
    for data, alt in pictures:
        pixels = image.imread(io.BytesIO(base64.b64decode(data)))[..., :3]
        assert pixels.shape[1] == 1100
        colours = (255 * pixels).astype(np.int64) @ np.array([65536, 256, 1])
        assert len(np.unique(colours)) > 8, alt


def test_the_same_report_gives_the_same_page(report: Report, shown: str) -> None:
    assert page(report) == shown


def test_a_page_of_stock_arms_says_what_is_not_known(tmp_path: Path) -> None:
    found = made(tmp_path, problems=6, records=(None, None, None, None))
    report = make_report([arm for arm, _ in found], [each for _, each in found], split=None)
    text = text_of(page(report))
    assert "its cache is not known" in text
    assert "at a cache that is not known" in text
    assert "The command was not recorded" in text
    assert "It takes 50 problems to show" in text
    assert "No such arms are here" in text


def rows(table: ab_tables.Rows) -> dict[str, dict[str, str]]:
    assert {len(row) for row in table.rows} == {len(table.header)}
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}


def test_tables_are_complete(report: Report) -> None:
    accuracy = rows(ab_tables.accuracy_rows(report, TASK))
    assert list(accuracy) == list(NAMES)
    assert (accuracy["small"]["truncated"], accuracy["full"]["truncated"]) == ("-", "0.0 %")
    assert accuracy["full"]["looped"] == f"{100 * 6 / 52:.0f} %"
    assert accuracy["tiny"]["no answer"] != "0.0 %"
    memory = rows(ab_tables.memory_rows(report, TASK))
    assert (memory["int4<8>"]["bits a number"], memory["full"]["held of it"]) == ("6.50", "100 %")
    assert memory["int4<8>"]["held of it"] == "40 %"
    differences = rows(ab_tables.comparison_rows(report, TASK))
    assert list(differences) == [f"{name} less full" for name in NAMES[1:]]
    matches = rows(ab_tables.match_rows(report, TASK))
    assert matches["full"]["full"] == ""
    assert matches["int4<8>"]["full"] == "unmatched, 2.500"
    assert matches["full"]["int4<8>"] == "unmatched, 0.400"
    effects = rows(ab_tables.effect_rows(report, TASK))
    assert (effects["full"]["evictions"], effects["int4<8>"]["protected at the end"]) == ("0", "6.0 %")
    assert int(effects["tiny"]["evictions"]) > int(effects["small"]["evictions"]) > 0
    lengths = rows(ab_tables.length_rows(report, TASK))
    assert lengths["full"] == {**lengths["tiny"], "arm": "full"}
    summary = rows(ab_tables.summary_rows(report, TASK))
    assert (summary["full"]["points"], summary["small"]["memory"][:9]) == ("baseline", "unmatched")


def test_throughput_adds_up(report: Report) -> None:
    found = rows(ab_tables.throughput_rows(report))["tiny"]
    responses = report.pairs.arm("tiny").of_task(TASK)
    written = sum(response.tokens or 0 for response in responses)
    steps = sum(response.record["decode_steps"] for response in responses if response.record is not None)
    evicting_ones = sum(bool(response.record["evictions"]) for response in responses if response.record is not None)
    assert found["tokens written"] == str(written)
    assert found["decode steps"] == str(steps)
    assert found["tokens a second"] == f"{written / 100:.1f}"
    assert found["seconds in evictions"] == f"{0.25 * evicting_ones:.1f}"
    unknown = dataclasses.replace(report, origins=[dataclasses.replace(o, wall_seconds=None) for o in report.origins])
    assert rows(ab_tables.throughput_rows(unknown))["tiny"]["tokens a second"] == "-"
