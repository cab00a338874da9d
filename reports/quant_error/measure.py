"""What low-bit storage does to the rows of one layer, and to what attention makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpolicy.kernels.value_range import value_range
from kvpolicy.quant.attention_error import attention_error
from kvpolicy.quant.errors import (
    RowErrors,
    TailRatios,
    correlation,
    error_by_position,
    error_share,
    row_errors,
    tail_ratios,
    token_errors,
)
from kvpolicy.quant.mixed import MixedPrecision
from kvpolicy.reports.quant_error.arms import AS_THEY_ARE, Arm
from kvpolicy.reports.quant_error.capture import LayerRows, QuantErrorError

ATTENDING = 128  # newest queries whose attention is compared: each of them reads most of the text
BINS = 32  # stretches of the text
POINTS = 480  # of one layer's scatter

Kind = Literal["values", "keys"]
KINDS: tuple[Kind, Kind] = ("values", "keys")
Table = npt.NDArray[np.float64]


class Points(NamedTuple):
    """``[n]``: value range and Euclidean error of some tokens of some heads."""

    ranges: Table
    errors: Table


@dataclass(frozen=True)
class LayerMeasures:
    """Of one layer; fp64 on the CPU.

    errors : of each arm's low-bit rows, per kind, ``[H_kv]`` each
    attention : of each arm, relative error of the attention output of the newest queries, ``[H_q]``
    held : of each arm that protects values and leaves keys, the share of squared error, without protection, that lies
        in its protected tokens, ``[H_kv]``
    tails : per kind, of the ranges ``[H_kv]``
    correlation : per kind and codec, of range with Euclidean error of a token, ``[H_kv]``
    by_position : per kind and codec, squared error over mean squared length, mean of heads, in stretches of the text,
        ``[BINS]``
    points : per codec of the values
    """

    errors: dict[tuple[str, Kind], RowErrors]
    attention: dict[str, torch.Tensor]
    held: dict[str, torch.Tensor]
    tails: dict[Kind, TailRatios]
    correlation: dict[tuple[Kind, str], torch.Tensor]
    by_position: dict[tuple[Kind, str], torch.Tensor]
    points: dict[str, Points]


def restored(store: MixedPrecision, rows: torch.Tensor, layer: int) -> torch.Tensor:
    """What a reader of layer `layer` sees of ``[H_kv, T, D]``; random choice is another one in each layer."""
    try:
        return replace(store, seed=layer).round_trip(rows)
    except ValueError as error:
        raise QuantErrorError(f"layer {layer}: {error}") from None


def measure_layer(rows: LayerRows, arms: Sequence[Arm]) -> LayerMeasures:
    """Of the rows of one layer under each of `arms`; those without protection say what a codec does.

    Raises
    ------
    QuantErrorError
        If a codec cannot store the rows.
    """
    sources: dict[Kind, torch.Tensor] = {"values": rows.values, "keys": rows.keys}
    ranges = {kind: value_range(sources[kind]) for kind in KINDS}
    found = LayerMeasures({}, {}, {}, {kind: tail_ratios(ranges[kind]) for kind in KINDS}, {}, {}, {})
    done: dict[tuple[Kind, MixedPrecision], torch.Tensor] = {}
    for arm in arms:
        stores: dict[Kind, MixedPrecision] = {"values": arm.values, "keys": arm.keys}
        seen: dict[Kind, torch.Tensor] = {}
        for kind, store in stores.items():
            source = sources[kind]
            if (kind, store) not in done:
                done[kind, store] = restored(store, source, rows.layer)
            seen[kind] = done[kind, store]
            if store.codec.name == "none":
                continue
            found.errors[arm.name, kind] = RowErrors(*(x.cpu() for x in row_errors(source, seen[kind])))
            if store.selector == "none" and (kind, store.codec.name) not in found.correlation:
                _describe(found, kind, store, source, seen[kind], ranges[kind])
        if arm.values.selector != "none" and arm.keys == AS_THEY_ARE:
            found.held[arm.name] = _held(arm.values, rows)
        found.attention[arm.name] = _attention(rows, seen["keys"], seen["values"])
    return found


def _describe(
    found: LayerMeasures,
    kind: Kind,
    store: MixedPrecision,
    source: torch.Tensor,
    seen: torch.Tensor,
    ranges: torch.Tensor,
) -> None:
    """How the errors of a codec without protection lie over the tokens."""
    squared = token_errors(source, seen)
    lengths = squared.sqrt()
    found.correlation[kind, store.codec.name] = correlation(ranges, lengths).cpu()
    energy = source.double().square().sum(dim=-1).mean(dim=-1, keepdim=True)
    relative = torch.where(squared == 0, 0.0, squared / energy)
    found.by_position[kind, store.codec.name] = error_by_position(relative, min(BINS, relative.shape[-1])).mean(0).cpu()
    if kind == "values":
        heads, tokens = squared.shape
        some = torch.linspace(0, tokens - 1, min(tokens, max(1, POINTS // heads))).round().long()
        ours = (x.cpu()[:, some].flatten().double().numpy() for x in (ranges, lengths))
        found.points[store.codec.name] = Points(*ours)


def _held(store: MixedPrecision, rows: LayerRows) -> torch.Tensor:
    store = replace(store, seed=rows.layer)
    errors = token_errors(rows.values, store.codec.round_trip(rows.values))
    return error_share(errors, store.protected(rows.values)).cpu()


def _attention(rows: LayerRows, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    queries = rows.queries[:, -ATTENDING:].contiguous()
    return attention_error(queries, rows.keys, rows.values, keys, values, scale=rows.scaling).double().cpu()
