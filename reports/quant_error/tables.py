"""The tables of a quantization-error report: rows of text, for the page and for the terminal."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpolicy.reports.quant_error.arms import AS_THEY_ARE, Arm, Comparison
from kvpolicy.reports.quant_error.measure import Kind
from kvpolicy.reports.quant_error.report import Report

NONE = "-"


class Rows(NamedTuple):
    """A header and rows of as many cells; the first cell of a row is its name."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Block(NamedTuple):
    """The arms of one codec, or of low-bit keys."""

    title: str
    rows: Rows


ARM_HEADER = (
    "arm",
    "V bits",
    "K bits",
    "bytes a token",
    "V error",
    "K error",
    "attention error",
    "KL mean",
    "KL p99",
    "top-1 flips",
    "NLL delta",
)


def arm_blocks(report: Report) -> list[Block]:
    """Every arm with its means over layers and heads; controls stand in the block of the codec they control."""
    blocks = []
    for one in report.comparisons:
        rows = [_arm(report, one.plain.name, one.plain)]
        rows += [_arm(report, arm.name, arm) for arm in one.protected.values()]
        if one.smaller:
            rows.append(_arm(report, f"≤ bits: {one.smaller.name}", one.smaller))
        if one.larger:
            rows.append(_arm(report, f"> bits: {one.larger.name}", one.larger))
        blocks.append(Block(one.codec, Rows(ARM_HEADER, rows)))
    for title, arms in (("keys alone", report.keys), ("keys and values", report.both)):
        if arms:
            blocks.append(Block(title, Rows(ARM_HEADER, [_arm(report, arm.name, arm) for arm in arms])))
    return blocks


def _arm(report: Report, name: str, arm: Arm) -> tuple[str, ...]:
    value_bits, key_bits = report.bits(arm)
    cells = [name, f"{value_bits:.2f}", f"{key_bits:.2f}", f"{report.bytes_per_token(arm):.0f}"]
    cells += [_error(report, arm, kind) for kind in ("values", "keys")]
    cells.append(f"{report.attention(arm).mean():.2%}")
    if arm.name not in report.outputs:
        return (*cells, NONE, NONE, NONE, NONE)
    output = report.outputs[arm.name].summary()
    return (
        *cells,
        f"{output.kl_mean:.5f}",
        f"{output.kl_p99:.4f}",
        f"{output.top1_flips:.2%}",
        f"{output.nll_delta:+.5f}",
    )


def _error(report: Report, arm: Arm, kind: Kind) -> str:
    store = arm.values if kind == "values" else arm.keys
    return NONE if store == AS_THEY_ARE else f"{report.errors(arm, kind, 'relative').mean():.2%}"


def layer_rows(report: Report, one: Comparison) -> Rows:
    """Per layer what its advice follows from; means over heads, the tail's largest head beside it."""
    tails, largest = report.tails("values", "p99_to_p50"), report.tails("values", "max_to_p50")
    with_range = one.protected["range"]
    shown = [one.plain, with_range, *([one.smaller] if one.smaller else []), *([one.larger] if one.larger else [])]
    errors = [report.attention(arm).mean(axis=1) for arm in shown]
    correlation = report.correlation("values", one.codec)
    rows = []
    for layer, advice in enumerate(report.layer_advice(one)):
        rows.append(
            (
                str(layer),
                f"{_mean(tails[layer]):.2f} ({tails[layer].max():.2f})",
                f"{_mean(largest[layer]):.2f}",
                f"{_mean(correlation[layer]):.2f}",
                f"{report.held(with_range)[layer].mean():.1%}",
                *(f"{error[layer]:.2%}" for error in errors),
                f"{verdict(one, advice.verdict)}: {advice.because}; {report.note_on_tail(one, _mean(tails[layer]))}",
            )
        )
    header = ("layer", "p99/p50 (largest head)", "max/p50", "r", "held by the protected")
    return Rows((*header, *(arm.name for arm in shown), "advice"), rows)


def advice_sentences(report: Report) -> list[str]:
    """One for each codec: what to do with it in this model."""
    tail = _mean(report.tails("values", "p99_to_p50"))
    found = []
    for one in report.comparisons:
        advice = report.model_advice(one)
        layers = [each.verdict for each in report.layer_advice(one)]
        counts = ", ".join(f"{verdict(one, name)} in {layers.count(name)}" for name in dict.fromkeys(layers))
        found.append(
            f"{one.codec}: {verdict(one, advice.verdict)}. Mean KL: {advice.because}; "
            f"{report.note_on_tail(one, tail)}.{_next_step(report, one)} By layers: {counts}."
        )
    return found


def _next_step(report: Report, one: Comparison) -> str:
    """What a little more than protection would buy."""
    if one.larger is None:
        return ""
    kl, bits = report.outputs[one.larger.name].kl.mean(), report.bits(one.larger)[0]
    return f" Next above protection, {one.larger.name} with {bits:.2f} bits: {kl:.4f} nats."


def verdict(one: Comparison, name: str) -> str:
    """In words."""
    if name != "control" or one.smaller is None:
        return {"protect": f"protect {100 * one.protected['range'].values.share:g}% by range", "leave": "leave"}[name]
    narrow = one.smaller.values.codec.name.partition("-")[0] == one.codec.partition("-")[0]
    return f"take {'a smaller group' if narrow else 'more bits'}, {one.smaller.name}, and protect nothing"


def _mean(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """Of what is finite; NaN if nothing is."""
    finite = table[np.isfinite(table)]
    return float(finite.mean()) if finite.size else float("nan")
