"""All numbers of one quantization-error report, and the document that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvpolicy.quant.asymmetric import AsymmetricInt
from kvpolicy.quant.kv_bytes import kv_bytes_per_token
from kvpolicy.reports.quant_error.advice import Advice, Errors, advise_layer, advise_model, tail_note
from kvpolicy.reports.quant_error.arms import PROTECTION, Arm, Comparison
from kvpolicy.reports.quant_error.measure import KINDS, Kind, LayerMeasures, Table
from kvpolicy.reports.quant_error.output import Interval, OutputErrors, kl_difference

SHOWN = 4


@dataclass(frozen=True)
class Report:
    """What was measured.

    comparisons : of the codecs of the values
    keys : arms of low-bit keys alone
    both : arms of low-bit keys and values
    layers : first to last
    outputs : of each arm with which the model was run
    """

    model: str
    source: str
    tokens: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    share: float
    comparisons: Sequence[Comparison]
    keys: Sequence[Arm]
    both: Sequence[Arm]
    layers: Sequence[LayerMeasures]
    outputs: dict[str, OutputErrors]

    @property
    def arms(self) -> list[Arm]:
        """Each once, in the order in which they are shown."""
        return arms_of(self.comparisons, self.keys, self.both)

    @property
    def kv_heads(self) -> int:
        return len(self.layers[0].tails["values"].p99_to_p50)

    def errors(self, arm: Arm, kind: Kind, measure: str) -> Table:
        """``[L, H_kv]``: one of the measures of :class:`kvpolicy.quant.errors.RowErrors`."""
        return stacked([getattr(layer.errors[arm.name, kind], measure) for layer in self.layers])

    def attention(self, arm: Arm) -> Table:
        """``[L, H_q]``: relative error of the attention output."""
        return stacked([layer.attention[arm.name] for layer in self.layers])

    def tails(self, kind: Kind, ratio: str) -> Table:
        """``[L, H_kv]``: one of the ratios of :class:`kvpolicy.quant.errors.TailRatios`."""
        return stacked([getattr(layer.tails[kind], ratio) for layer in self.layers])

    def correlation(self, kind: Kind, codec: str) -> Table:
        """``[L, H_kv]``."""
        return stacked([layer.correlation[kind, codec] for layer in self.layers])

    def by_position(self, kind: Kind, codec: str) -> Table:
        """``[L, bins]``."""
        return stacked([layer.by_position[kind, codec] for layer in self.layers])

    def held(self, arm: Arm) -> Table:
        """``[L, H_kv]``."""
        return stacked([layer.held[arm.name] for layer in self.layers])

    def bits(self, arm: Arm) -> tuple[float, float]:
        """Of values and of keys."""
        return arm.bits(self.head_dim, self.cache_dtype, self.tokens)

    def bytes_per_token(self, arm: Arm) -> float:
        return kv_bytes_per_token(len(self.layers), self.kv_heads, self.head_dim, sum(self.bits(arm)) / 2)

    def difference(self, one: Comparison) -> Interval | None:
        """Of the mean KL of protection and of the control."""
        if one.smaller is None:
            return None
        return kl_difference(self.outputs[one.protected[PROTECTION].name], self.outputs[one.smaller.name])

    def model_advice(self, one: Comparison) -> Advice:
        plain, protected, smaller = (
            None if arm is None else float(self.outputs[arm.name].kl.mean())
            for arm in (one.plain, one.protected[PROTECTION], one.smaller)
        )
        assert plain is not None
        assert protected is not None
        return advise_model(Errors(plain, protected, smaller), self.difference(one))

    def layer_advice(self, one: Comparison) -> list[Advice]:
        plain, protected = (self.attention(arm).mean(axis=1) for arm in (one.plain, one.protected[PROTECTION]))
        smaller = [None] * len(plain) if one.smaller is None else self.attention(one.smaller).mean(axis=1).tolist()
        return [advise_layer(Errors(*each)) for each in zip(plain.tolist(), protected.tolist(), smaller, strict=True)]

    def note_on_tail(self, one: Comparison, tail: float) -> str:
        codec = one.plain.values.codec
        return tail_note(codec.bits_per_code if isinstance(codec, AsymmetricInt) else None, tail)


def arms_of(comparisons: Sequence[Comparison], keys: Sequence[Arm], both: Sequence[Arm]) -> list[Arm]:
    """All arms, each once."""
    arms = [arm for one in comparisons for arm in one.arms]
    return list({arm.name: arm for arm in (*arms, *keys, *both)}.values())


def stacked(layers: Sequence[torch.Tensor]) -> Table:
    """``[L, …]`` fp64 of one tensor per layer."""
    return np.stack([layer.double().numpy() for layer in layers])


def shown_layers(layers: int) -> list[int]:
    """Layers whose tokens are shown one by one: SHOWN, first and last among them."""
    return sorted(set(np.linspace(0, layers - 1, min(SHOWN, layers)).round().astype(int).tolist()))


def described(report: Report) -> list[tuple[Kind, str]]:
    """Kinds and codecs without protection, values first."""
    return sorted(report.layers[0].correlation, key=lambda each: KINDS.index(each[0]))
