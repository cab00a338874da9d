"""How a cache stores its keys and values, and what each token costs in it, byte by byte."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from kvpolicy.kernels.pack_rows import check_layout

BITS_OF = {"int8": 8, "int4": 4, "int2": 2}
FORMATS = (*BITS_OF, *(f"range-{name}" for name in BITS_OF))
KEY_FORMATS = ("none", "int8", "int4")
GROUPS = (16, 32, 64)  # and the whole head
SINKS = 4  # the oldest tokens, which keep full precision: every later token attends to them
INDEX_BYTES = 4  # per slot and KV head: which protected row holds the token


@dataclass(frozen=True)
class CacheFormat:
    """Low-bit storage of a paged KV cache.

    Parameters
    ----------
    name : str
        Format of values: one of `FORMATS`. ``range-`` keeps sinks, recent tokens and those of largest value range, per
        layer and KV head, in the precision of the model.
    group : int or None
        Channels that share a scale and a minimum: 16, 32, 64 or the whole head. None is the largest of the three that
        divides the head, or the whole head where none does; see :meth:`fitted`.
    protect : float
        Share of a request's tokens that are protected for their range; only with ``range-``.
    keys : str
        Format of keys: one of `KEY_FORMATS`; "none" keeps them as they are.

    Raises
    ------
    ValueError
        On construction, in one sentence without its full stop.
    """

    name: str
    group: int | None = None
    protect: float = 0.05
    keys: str = "none"

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f"kv_quant={self.name!r} is not a format; use {', '.join(FORMATS)}")
        if self.keys not in KEY_FORMATS:
            raise ValueError(f"kv_quant_keys={self.keys!r} is not a format of keys; use {', '.join(KEY_FORMATS)}")
        if self.group is not None and (isinstance(self.group, bool) or not isinstance(self.group, int)):
            raise ValueError(f"kv_quant_group must be a whole number, got {self.group!r}")
        if not 0 < self.protect <= 0.5:
            raise ValueError(f"kv_protect={self.protect} must be above 0 and at most 0.5")

    @property
    def value_bits(self) -> int:
        return BITS_OF[self.name.removeprefix("range-")]

    @property
    def key_bits(self) -> int | None:
        """None if keys are stored as they are."""
        return BITS_OF.get(self.keys)

    @property
    def protects(self) -> bool:
        return self.name.startswith("range-")

    def fitted(self, head_dim: int) -> CacheFormat:
        """The format with its group chosen for heads of this size.

        Raises
        ------
        ValueError
            If they cannot be stored so.
        """
        of_three = [group for group in GROUPS if head_dim % group == 0]
        group = max(of_three, default=head_dim) if self.group is None else self.group
        if group not in (*of_three, head_dim):
            raise ValueError(
                f"kv_quant_group={group} does not fit the model's heads of {head_dim} channels; use "
                f"{' or '.join(map(str, sorted({*of_three, head_dim})))}"
            )
        for bits in (self.value_bits, self.key_bits):
            if bits is not None:
                check_layout(head_dim, bits, group)
        return replace(self, group=group)

    def slot_bytes(self, heads: int, head_dim: int, item_bytes: int) -> int:
        """Bytes that a slot of one layer takes by itself: keys, values, scales, minima, index."""
        per_head = self._row_bytes(self.key_bits, head_dim, item_bytes)
        per_head += self._row_bytes(self.value_bits, head_dim, item_bytes)
        return heads * (per_head + (INDEX_BYTES if self.protects else 0))

    def _row_bytes(self, bits: int | None, head_dim: int, item_bytes: int) -> int:
        if bits is None:
            return head_dim * item_bytes
        assert self.group is not None, "the format was not fitted to a head"
        return head_dim * bits // 8 + 2 * item_bytes * (head_dim // self.group)

    def protected_row_bytes(self, heads: int, head_dim: int, item_bytes: int) -> int:
        """Bytes of one protected row of one layer, all heads, with its place in the list of free rows."""
        return heads * (head_dim * item_bytes + INDEX_BYTES)

    def protected_rows(self, slots: int, requests: int, recent: int) -> int:
        """Rows that a pool of so many slots needs, all layers alike: the share of all its tokens, and for each running
        request its sinks and at most twice its `recent` tokens, whose older half is decided on when it is complete."""
        if not self.protects:
            return 0
        return min(slots, self.allowed(slots) + self.rows_of_requests(requests, recent))

    @staticmethod
    def rows_of_requests(requests: int, recent: int) -> int:
        """The part of :meth:`protected_rows` that does not grow with the pool."""
        return 1 + requests * (2 * recent + SINKS)

    def allowed(self, tokens: int) -> int:
        """How many of so many tokens may be protected for their range."""
        return math.floor(Fraction(str(self.protect)) * tokens)
