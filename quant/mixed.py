"""Mixed precision: most tokens in few bits, a share of them, sinks and recent tokens as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from kvpolicy.quant.codec import Codec
from kvpolicy.quant.errors import token_errors
from kvpolicy.quant.protection import protected_tokens, widest

INDEX_BITS = 32  # per token and KV head: where its 16-bit row is, if it has one

# (candidates [..., N, D], count, codec, seed) -> int64 [..., count]
Selector = Callable[[torch.Tensor, int, Codec, int], torch.Tensor]


def _range(rows: torch.Tensor, count: int, codec: Codec, seed: int) -> torch.Tensor:
    return protected_tokens(rows, count)


def _l2(rows: torch.Tensor, count: int, codec: Codec, seed: int) -> torch.Tensor:
    return widest(torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64), count)


def _random(rows: torch.Tensor, count: int, codec: Codec, seed: int) -> torch.Tensor:
    drawn = torch.rand(rows.shape[:-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return widest(drawn, count).to(rows.device)


def _oracle(rows: torch.Tensor, count: int, codec: Codec, seed: int) -> torch.Tensor:
    return widest(token_errors(rows, codec.round_trip(rows)), count)


def _none(rows: torch.Tensor, count: int, codec: Codec, seed: int) -> torch.Tensor:
    return torch.empty(*rows.shape[:-2], 0, dtype=torch.int64, device=rows.device)


SELECTORS: dict[str, Selector] = {"range": _range, "l2": _l2, "random": _random, "oracle": _oracle, "none": _none}


@dataclass(frozen=True)
class MixedPrecision:
    """Rows in `codec`, but for protected tokens, which each layer and KV head chooses for itself.

    Parameters
    ----------
    codec : Codec
    share : float
        Of all N tokens, rounded down to whole tokens, that `selector` protects. 0 to 1.
    selector : {"range", "l2", "random", "oracle", "none"}
        By the largest ``max - min`` over channels, the largest norm, at random, or by the largest squared error that
        `codec` makes, which a cache could not know. ``none`` protects sinks and recent tokens alone.
    sinks, recent : int
        Oldest and newest tokens, protected beside the share and not among what is chosen from.
    seed : int
        Of ``random``.
    """

    codec: Codec
    share: float
    selector: str
    sinks: int = 0
    recent: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.selector not in SELECTORS:
            raise ValueError(f"there is no selector {self.selector!r}; use one of {', '.join(SELECTORS)}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"the protected share must be between 0 and 1, got {self.share}")
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent tokens must not be negative, got {self.sinks} and {self.recent}")

    def protected(self, rows: torch.Tensor) -> torch.Tensor:
        """bool ``[..., N]`` of rows ``[..., N, D]``: the tokens that stay as they are."""
        tokens = rows.shape[-2]
        first, last = self._candidates(tokens)
        chosen = SELECTORS[self.selector](rows[..., first:last, :], self._chosen(tokens), self.codec, self.seed)
        kept = torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        kept[..., first:last] = False
        return kept.scatter_(-1, chosen + first, True)

    def round_trip(self, rows: torch.Tensor) -> torch.Tensor:
        """What a reader of the cache would see of rows ``[..., N, D]``; raises as :meth:`Codec.round_trip` does."""
        return torch.where(self.protected(rows).unsqueeze(-1), rows, self.codec.round_trip(rows))

    def bits(self, head_dim: int, dtype: torch.dtype, tokens: int) -> float:
        """Bits per number that `tokens` tokens (at least one) of a KV head take, ``codec + p * 16 + 32 / D``.

        A protected token's row is stored beside its codes, whose place stays taken; p is the share of tokens that have
        one, sinks and recent tokens among them, and 16 stands for the bits of `dtype`. Each token has an index of 32
        bits, unless nothing is ever protected.
        """
        assert tokens > 0, f"{tokens = } must be positive"
        first, last = self._candidates(tokens)
        held = tokens - (last - first) + self._chosen(tokens)
        bits = self.codec.bits(head_dim, dtype)
        if self.sinks or self.recent or (self.share and self.selector != "none"):
            bits += held / tokens * 8 * dtype.itemsize + INDEX_BITS / head_dim
        return bits

    def _candidates(self, tokens: int) -> tuple[int, int]:
        """First and end of the tokens that are neither sinks nor recent."""
        first = min(self.sinks, tokens)
        return first, max(first, tokens - self.recent)

    def _chosen(self, tokens: int) -> int:
        """How many tokens the selector protects."""
        first, last = self._candidates(tokens)
        if self.selector == "none":
            return 0
        # As the share is written: as a float, 0.29 * 100 is less than 29.
        return min(math.floor(Fraction(str(self.share)) * tokens), last - first)
