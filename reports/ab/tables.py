"""The tables of a comparison: rows of text, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from kvpolicy.reports.ab.accuracy import Rate
from kvpolicy.reports.ab.memory import MemoryMatch
from kvpolicy.reports.ab.report import Report
from kvpolicy.reports.ab.responses import FLAGS
from kvpolicy.reports.ab.sentences import memory_label, p_value, percent, points

NONE = "-"
MIB = 2**20


class Rows(NamedTuple):
    """A header, and rows of as many cells; the first cell of a row is its name."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary_rows(report: Report, task: str) -> Rows:
    """Per arm what matters most, narrow enough for a terminal."""
    compared = {c.arm: c for c in report.comparisons if c.task == task}
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        found = report.of(arm, task)
        held = NONE if found.memory is None else f"{found.memory.kv_bytes_mean / MIB:.2f}"
        cells = (arm, percent(found.accuracy.value), held)
        if (c := compared.get(arm)) is None:
            rows.append((*cells, "baseline", NONE, NONE))
        else:
            rows.append((*cells, points(c.accuracy.difference), p_value(c.holm), memory_label(c.memory)))
    return Rows(("arm", "accuracy", "KV MiB", "points", "Holm", "memory"), rows)


def accuracy_rows(report: Report, task: str) -> Rows:
    """Per arm accuracy, verdicts and flags."""
    verdicts = _verdicts(report, task)
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        found = report.of(arm, task)
        cells = [arm, str(found.problems), str(found.responses), percent(found.accuracy.value), _range(found.accuracy)]
        cells += [_rate(found.verdicts.get(verdict)) for verdict in verdicts]
        cells += [_rate(found.flags[flag]) for flag in FLAGS]
        rows.append(tuple(cells))
    header = ("arm", "problems", "responses", "accuracy", "95 %", *verdicts, *FLAGS)
    return Rows(tuple(name.replace("_", " ") for name in header), rows)


def _verdicts(report: Report, task: str) -> list[str]:
    """Those beside "correct", which is the accuracy."""
    found = [verdict for arm in report.arms for verdict in report.of(arm, task).verdicts]
    return [verdict for verdict in dict.fromkeys(found) if verdict != "correct"]


def comparison_rows(report: Report, task: str) -> Rows:
    """Paired differences to the baseline."""
    rows: list[tuple[str, ...]] = []
    for c in report.comparisons:
        if c.task == task:
            a = c.accuracy
            rows.append(
                (
                    f"{c.arm} less {c.baseline}",
                    points(a.difference),
                    f"{points(a.low)} … {points(a.high)}",
                    f"{points(a.family_low)} … {points(a.family_high)}",
                    p_value(a.p),
                    p_value(c.bonferroni),
                    p_value(c.holm),
                    NONE if a.detectable is None else f"{100 * a.detectable:.1f}",
                    f"{a.differing} of {a.problems}",
                    memory_label(c.memory),
                )
            )
    header = ("points", "difference", "95 %", "95 % of all together", "p", "Bonferroni", "Holm", "detectable")
    return Rows((*header, "problems that differ", "memory"), rows)


def memory_rows(report: Report, task: str) -> Rows:
    """Per arm residency and bytes."""
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        m = report.of(arm, task).memory
        if m is None:
            rows.append((arm, *[NONE] * 9))
            continue
        effect = report.of(arm, task).effect
        bits = None if effect is None else effect.bits_per_element
        held = (m.kv_bytes_mean, m.kv_bytes_peak, m.kv_bytes_end, m.after_prefill_bytes, m.kv_bytes_full_mean)
        cells = [arm, f"{m.resident_mean:.0f}", *(f"{each / MIB:.2f}" for each in held)]
        cells += [percent(m.kv_bytes_mean / m.kv_bytes_full_mean), NONE if bits is None else f"{bits:.2f}"]
        rows.append((*cells, f"{m.beside_bytes / MIB:.2f}"))
    header = ("arm", "resident tokens, mean", "KV MiB, mean", "largest", "at the end", "after prefill")
    return Rows((*header, "full cache, mean", "held of it", "bits a number", "MiB beside the cache"), rows)


def match_rows(report: Report, task: str) -> Rows:
    """Mean KV bytes of each arm (column) over those of each other (row), with its label."""
    labels: dict[tuple[str, str], str] = {}
    for one, other in combinations(report.arms, 2):
        found = report.memory.get((task, one, other))
        labels[one, other] = memory_label(found)
        backwards = None if found is None else MemoryMatch(1 / found.ratio, 1 / found.with_beside)
        labels[other, one] = memory_label(backwards)
    rows = [(row, *(labels.get((row, column), "") for column in report.arms)) for row in report.arms]
    return Rows(("over", *report.arms), rows)


def length_rows(report: Report, task: str) -> Rows:
    """Tokens of the responses."""
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        found = report.of(arm, task).lengths
        cells = [NONE] * 4 if found is None else [f"{found.mean:.0f}", f"{found.median:.0f}", f"{found.p95:.0f}"]
        rows.append((arm, *cells, *([] if found is None else [str(found.longest)])))
    return Rows(("arm", "tokens, mean", "median", "95 % below", "longest"), rows)


def effect_rows(report: Report, task: str) -> Rows:
    """What the policy and the format did."""
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        found = report.of(arm, task)
        e, method = found.effect, found.method
        if e is None or method is None:
            rows.append((arm, *[NONE] * 8))
            continue
        policy = method["policy"] + (f"[{method['options']}]" if method["options"] else "")
        cells = [arm, policy, method["kv_quant"] or NONE, f"{e.records} of {found.responses}"]
        cells += [str(each) for each in (e.compacted, e.evictions, e.tokens_evicted)]
        read, protected = (NONE if each is None else percent(each) for each in (e.read_share, e.protected_end))
        rows.append((*cells, read, protected))
    header = ("arm", "policy", "format", "records", "responses evicted from", "evictions", "tokens evicted")
    return Rows((*header, "read of what is held", "protected at the end"), rows)


def throughput_rows(report: Report) -> Rows:
    """Per arm, all tasks together."""
    rows: list[tuple[str, ...]] = []
    for arm, origin in zip(report.arms, report.origins, strict=True):
        found = [report.of(arm, task) for task in report.pairs.tasks]
        lengths = [each.lengths for each in found]
        written = _total([None if each is None else each.mean for each in lengths], [each.responses for each in found])
        steps = [None if each.memory is None else float(each.memory.decode_steps) for each in found]
        seconds = [None if each.effect is None else each.effect.eviction_seconds for each in found]
        spent, wall = _total(seconds), origin.wall_seconds
        rows.append(
            (
                arm,
                NONE if written is None else f"{written:.0f}",
                NONE if (total := _total(steps)) is None else f"{total:.0f}",
                NONE if wall is None else f"{wall:.0f}",
                NONE if wall is None or written is None else f"{written / wall:.1f}",
                NONE if spent is None else f"{spent:.1f}",
                NONE if spent is None or wall is None else percent(spent / wall),
            )
        )
    header = ("arm", "tokens written", "decode steps", "seconds of the run", "tokens a second")
    return Rows((*header, "seconds in evictions", "of the run"), rows)


def _total(values: Sequence[float | None], weights: Sequence[int] | None = None) -> float | None:
    """None if one is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value * weight for value, weight in zip(known, weights or [1] * len(known), strict=True))


def _rate(rate: Rate | None) -> str:
    return NONE if rate is None else percent(rate.value)


def _range(rate: Rate) -> str:
    return f"{percent(rate.low)} … {percent(rate.high)}"
