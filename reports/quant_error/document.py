"""The document that holds all numbers of a quantization-error report."""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

import numpy as np
import torch

from kvpolicy.quant.errors import RowErrors, TailRatios
from kvpolicy.reports.quant_error.advice import RULES
from kvpolicy.reports.quant_error.arms import Arm, Comparison
from kvpolicy.reports.quant_error.measure import ATTENDING, KINDS
from kvpolicy.reports.quant_error.report import Report, described, shown_layers

DIGITS = 6  # significant ones


def document(report: Report) -> dict[str, Any]:
    """The report as JSON can hold it; numbers that are not finite become null."""
    return {
        "model": report.model,
        "text": report.source,
        "tokens": report.tokens,
        "dtype": str(report.dtype).removeprefix("torch."),
        "cache_dtype": str(report.cache_dtype).removeprefix("torch."),
        "layers": len(report.layers),
        "kv_heads": report.kv_heads,
        "head_dim": report.head_dim,
        "share": report.share,
        "attending_queries": min(ATTENDING, report.tokens),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "rules": RULES,
        "comparisons": [_comparison(report, one) for one in report.comparisons],
        "arms": {arm.name: _arm(report, arm) for arm in report.arms},
        "tail_ratios": {
            kind: {ratio: plain(report.tails(kind, ratio)) for ratio in TailRatios._fields} for kind in KINDS
        },
        "correlation": {f"{kind} {codec}": plain(report.correlation(kind, codec)) for kind, codec in described(report)},
        "error_by_position": {
            f"{kind} {codec}": plain(report.by_position(kind, codec)) for kind, codec in described(report)
        },
        "range_and_error_of_tokens": [
            {"layer": layer, "codec": one.codec, "range": plain(points.ranges), "error": plain(points.errors)}
            for layer in shown_layers(len(report.layers))
            for one in report.comparisons
            for points in [report.layers[layer].points[one.codec]]
        ],
    }


def plain(x: Any) -> Any:
    """Arrays and tuples as lists, floats with DIGITS significant digits, null for what is not finite."""
    if isinstance(x, np.ndarray):
        x = x.tolist()
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None
    return [plain(each) for each in x] if isinstance(x, (list, tuple)) else x


def _comparison(report: Report, one: Comparison) -> dict[str, Any]:
    difference, advice = report.difference(one), report.model_advice(one)
    tails = report.tails("values", "p99_to_p50").mean(axis=1).tolist()
    return {
        "codec": one.codec,
        "plain": one.plain.name,
        "protected": {selector: arm.name for selector, arm in one.protected.items()},
        "control_of_no_more_bits": one.smaller.name if one.smaller else None,
        "control_of_more_bits": one.larger.name if one.larger else None,
        "kl_difference_protected_less_control": plain(difference),
        "advice": advice._asdict(),
        "layers": [
            {"layer": layer, "tail": report.note_on_tail(one, tail), **each._asdict()}
            for layer, (each, tail) in enumerate(zip(report.layer_advice(one), tails, strict=True))
        ],
    }


def _arm(report: Report, arm: Arm) -> dict[str, Any]:
    value_bits, key_bits = report.bits(arm)
    found: dict[str, Any] = {
        "value_bits": plain(value_bits),
        "key_bits": plain(key_bits),
        "bytes_per_token": plain(report.bytes_per_token(arm)),
        "errors": {
            kind: {measure: plain(report.errors(arm, kind, measure)) for measure in RowErrors._fields}
            for kind in KINDS
            if (arm.name, kind) in report.layers[0].errors
        },
        "attention_error": plain(report.attention(arm)),
    }
    if arm.name in report.layers[0].held:
        found["error_held_by_protected"] = plain(report.held(arm))
    if arm.name in report.outputs:
        found["output"] = {name: plain(value) for name, value in report.outputs[arm.name].summary()._asdict().items()}
    return found
