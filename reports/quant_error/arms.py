"""The ways of storing a cache that are compared: codecs, protected shares, and controls of equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpolicy.kernels.pack_rows import BITS
from kvpolicy.quant.asymmetric import AsymmetricInt
from kvpolicy.quant.codec import Codec, Unchanged
from kvpolicy.quant.codecs import codec
from kvpolicy.quant.mixed import MixedPrecision

GROUPS = (64, 32, 16)
SELECTORS = ("random", "l2", "range", "oracle")
PROTECTION = "range"
AS_THEY_ARE = MixedPrecision(Unchanged(), 0.0, "none")


@dataclass(frozen=True)
class Arm:
    """One way of storing keys and values; no sinks or recent tokens are spared beside what `values` protects."""

    values: MixedPrecision = AS_THEY_ARE
    keys: MixedPrecision = AS_THEY_ARE

    @property
    def name(self) -> str:
        parts = [store_name(self.values)] if self.values != AS_THEY_ARE else []
        if self.keys != AS_THEY_ARE:
            parts.append(f"keys {store_name(self.keys)}")
        return ", ".join(parts) or "16 bits"

    def bits(self, head_dim: int, dtype: torch.dtype, tokens: int) -> tuple[float, float]:
        """Real bits per number of values and of keys: scales, minima, protected rows and their index included."""
        return self.values.bits(head_dim, dtype, tokens), self.keys.bits(head_dim, dtype, tokens)


@dataclass(frozen=True)
class Comparison:
    """The arms of one codec of the values.

    plain : nothing protected
    protected : per selector, the same share
    smaller : of all integer codecs without protection that cost more than `plain` and no more than protection, the one
        of most bits: the control that protection must beat; None if there is none
    larger : the one of fewest bits that costs more than protection; None if there is none
    """

    codec: str
    plain: Arm
    protected: dict[str, Arm]
    smaller: Arm | None
    larger: Arm | None

    @property
    def arms(self) -> list[Arm]:
        """In the order in which they are shown."""
        return [arm for arm in (self.plain, *self.protected.values(), self.smaller, self.larger) if arm is not None]


def store_name(store: MixedPrecision) -> str:
    """As in ``int4-g64 range 5%``."""
    protected = "" if store.selector == "none" else f" {store.selector} {100 * store.share:g}%"
    return store.codec.name + protected


def default_codecs(head_dim: int) -> list[Codec]:
    """4 bits in groups of 64 and 2 bits in groups of 32, or the largest groups below that divide the head."""
    return [
        AsymmetricInt(bits, next((group for group in GROUPS if group <= most and head_dim % group == 0), None))
        for bits, most in ((4, 64), (2, 32))
    ]


def codecs_of(names: str) -> list[Codec]:
    """The codecs of a list with commas, each once.

    Raises
    ------
    ValueError
        If there is none of a name, or nothing to measure.
    """
    found = {one.name: one for one in (codec(name.strip()) for name in names.split(","))}
    if "none" in found:
        raise ValueError("the codec none changes nothing, so it has no error; leave it out")
    return list(found.values())


def comparison(plain: Codec, share: float, head_dim: int, dtype: torch.dtype, tokens: int) -> Comparison:
    """The arms of `plain` with a `share` of the tokens protected, in a cache of `dtype`."""
    protected = {selector: Arm(MixedPrecision(plain, share, selector)) for selector in SELECTORS}
    least = plain.bits(head_dim, dtype)
    limit = protected[PROTECTION].values.bits(head_dim, dtype, tokens)
    costs = sorted(
        ((one.bits(head_dim, dtype), one.bits_per_code, one) for one in _unprotected(head_dim)), key=lambda c: c[:2]
    )
    smaller = [one for bits, _, one in costs if least < bits <= limit]
    larger = [one for bits, _, one in costs if bits > limit]
    return Comparison(
        codec=plain.name,
        plain=_without_protection(plain),
        protected=protected,
        smaller=_without_protection(smaller[-1]) if smaller else None,
        larger=_without_protection(larger[0]) if larger else None,
    )


def key_arms(keys: Sequence[Codec]) -> list[Arm]:
    """Low-bit keys alone, with values of 16 bits."""
    return [Arm(keys=MixedPrecision(one, 0.0, "none")) for one in keys]


def both_arms(keys: Sequence[Arm], comparisons: Sequence[Comparison]) -> list[Arm]:
    """Low-bit keys with low-bit values, plain and protected by range."""
    return [
        Arm(values.values, one.keys)
        for one in keys
        for each in comparisons
        for values in (each.plain, each.protected[PROTECTION])
    ]


def _without_protection(one: Codec) -> Arm:
    return Arm(MixedPrecision(one, 0.0, "none"))


def _unprotected(head_dim: int) -> list[AsymmetricInt]:
    """Every integer codec that fits, each layout once."""
    groups = [group for group in GROUPS if head_dim % group == 0]
    layouts = [
        AsymmetricInt(bits, group) for bits in BITS for group in [*groups, *([] if head_dim in GROUPS else [None])]
    ]
    return [one for one in layouts if head_dim * one.bits_per_code % 8 == 0]
