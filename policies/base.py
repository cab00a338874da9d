"""The contract of an eviction policy.

A policy is a frozen dataclass of hyperparameters with published defaults plus one pure function,
:meth:`Policy.select`. It never sees SGLang, slots or requests: it is given the resident tokens of
one request and answers which of them each KV head keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, NamedTuple

import torch

from kvpolicy.kernels import keyed_noise
from kvpolicy.kernels.compact import PagedTokens


class Granularity(StrEnum):
    """Who shares one set of kept tokens."""

    PER_HEAD = "per_head"  # each layer and KV head keeps its own
    PER_LAYER = "per_layer"  # one set for all KV heads of a layer
    PER_KV_HEAD_INDEX = "per_kv_head_index"  # one set per head index, for all layers
    GLOBAL = "global"  # one set for the request


class Band(NamedTuple):
    """Adjacent decoder layers, both ends included. Below 1 an end is a share of the depth, else the layer's number."""

    first: float
    last: float

    def layers(self, depth: int) -> range:
        """Numbers of the band's layers in a model of `depth` layers; halves are rounded up.

        Raises
        ------
        ValueError
            If the model has no such layers.
        """
        first, last = (int(end * depth + 0.5) if end < 1 else int(end) for end in self)
        if not 0 <= first <= last < depth:
            raise ValueError(f"layers {first} to {last} are no band of a model with layers 0 to {depth - 1}")
        return range(first, last + 1)


@dataclass(frozen=True)
class Needs:
    """Observations that a policy reads; the engine records only what some policy asks for.

    queries : how many of the newest queries, at most.
    positions : where in the text each resident token stands.
    hidden_bands : layers whose change of hidden state from token to token is measured.
    """

    keys: bool = False
    values: bool = False
    queries: int = 0
    positions: bool = False
    hidden_bands: tuple[Band, ...] = ()


class ModelShape(NamedTuple):
    """What a policy may want to know of the model before it is loaded.

    rope_theta : base of the rotary embedding; rope_scaling is in the model's own configuration.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float


class Card(NamedTuple):
    """A method in the overview of all methods.

    score : one clause, what the score of a token is.
    source : title or name and arXiv number.
    code : official code and its licence, or "none found".
    flash_attention : whether the method as published runs without materialised attention matrices. Here all do.
    """

    score: str
    source: str = ""
    code: str = ""
    flash_attention: bool = True


@dataclass(frozen=True)
class Noise:
    """Random numbers of one eviction round, keyed by (seed, eviction, layer, head, counter)."""

    seed: int
    eviction: int
    layers: tuple[int, ...]  # ids of the layers in this round, in the order of `Candidates.keys`
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    first_head: int = 0  # id in the whole model of the first KV head of `Candidates`, under tensor parallelism

    def _axes(self, *counters: int) -> list[torch.Tensor]:
        """Keys that broadcast to ``[L, *counters]``."""
        rank = 1 + len(counters)
        axes = [torch.tensor(self.layers).to(self.device, non_blocking=True).view(-1, *[1] * (rank - 1))]
        for axis, size in enumerate(counters, start=1):
            axes.append(torch.arange(size, device=self.device).view(*[1] * axis, size, *[1] * (rank - axis - 1)))
        return axes

    def normal(self, rows: int, columns: int, *, redraw: bool = True) -> torch.Tensor:
        """``[L, rows, columns]`` standard normal fp32, one matrix per layer.

        With `redraw` false the eviction number is left out of the key: the same matrices each round.
        """
        return keyed_noise.standard_normal(self.seed, self.eviction if redraw else -1, *self._axes(rows, columns))

    def uniform(self, heads: int, tokens: int, *, stream: int = 0) -> torch.Tensor:
        """``[L, heads, tokens]`` uniform fp64 in (0, 1); each `stream` is independent of the others."""
        layer, head, token = self._axes(heads, tokens)
        stream_key = torch.full((), stream, device=self.device)
        return keyed_noise.uniform(self.seed, self.eviction, layer, head + self.first_head, token, stream_key)


@dataclass(frozen=True)
class Candidates:
    """All resident tokens of one request at one eviction round, oldest first.

    keys, values : ``[L, H_kv, N, D]`` in the cache's dtype, keys after RoPE; None unless needed. Still in the pool
        they may be `PagedTokens`; see :meth:`require` and :meth:`layer_by_layer`.
    queries : ``[L, H_q, w, D]`` in the model's dtype, after RoPE, oldest first: the queries of the `w`
        newest tokens, as many as the policy needs or, early on, as there are. None unless needed.
    positions : int64 ``[L, H_kv, N]``, place of each token in the text, ascending. None unless needed.
    hidden_change : fp32 ``[bands, T]``, ``T = true_len - prompt_len``: Euclidean distance between the hidden states
        (outputs of a decoder layer, residual included) of a token and of the one before it, mean over the layers of
        each band that the policy needs; column ``j`` is of the token at position ``prompt_len + j``, resident or
        not. None unless needed.
    statistic : fp32 ``[L, H_kv, N]``, what :meth:`Policy.observe` last said of each token; NaN for tokens appended
        since. None unless the policy accumulates.
    unseen : of the newest `queries`, how many :meth:`Policy.observe` has not been given yet.
    shape : ``(L, H_kv, N)``, always there.
    prompt_len : tokens of the request's prompt, resident or not.
    true_len : tokens computed so far; the newest stands at position ``true_len - 1``.
    previous_len : `true_len` at the last eviction, 0 before the first.

    Rows are in age order per head: row 0 is the oldest token that this head still holds, so the attention sinks of a
    policy that keeps them are rows ``0 .. sinks - 1`` for good. For a policy that :meth:`Policy.reads_order` says does
    without, only these and the newest `period` are where their age puts them.
    """

    shape: tuple[int, int, int]
    keys: torch.Tensor | PagedTokens | None = None
    values: torch.Tensor | PagedTokens | None = None
    queries: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    hidden_change: torch.Tensor | None = None
    statistic: torch.Tensor | None = None
    unseen: int = 0
    prompt_len: int = 0
    true_len: int = 0
    previous_len: int = 0

    def require(self, name: str) -> torch.Tensor:
        """The tensor called `name`; a policy that did not declare its need is a programming error."""
        tensor = self.layer_by_layer(name)
        return tensor.gathered if isinstance(tensor, PagedTokens) else tensor

    def layer_by_layer(self, name: str) -> torch.Tensor | PagedTokens:
        """The same for one who looks at each layer once, in turn: keys and values that lie in the pool stay there."""
        tensor: torch.Tensor | PagedTokens | None = getattr(self, name)
        assert tensor is not None, f"{name} were not gathered: declare them in `needs`"
        return tensor


class Policy(ABC):
    """Base of all policies. Subclasses are frozen dataclasses; the constructor only stores."""

    name: ClassVar[str]
    card: ClassVar[Card]
    # Who shares one set; a policy with options for it overrides `shares`.
    granularity: ClassVar[Granularity] = Granularity.PER_HEAD
    # Whether :meth:`observe` is to be called.
    accumulates: ClassVar[bool] = False

    @property
    def shares(self) -> Granularity:
        """Who shares one set of kept tokens under this policy's options."""
        return self.granularity

    @property
    def spans_heads(self) -> bool:
        """Whether a choice depends on other KV heads of a layer, which tensor parallelism puts on other ranks."""
        needs = self.needs(1)
        reads_heads = needs.keys or needs.values or needs.queries > 0
        return reads_heads and self.shares in (Granularity.PER_LAYER, Granularity.GLOBAL)

    @property
    def spans_layers(self) -> bool:
        """Whether a choice depends on other layers, so that `candidates` must hold all of them."""
        return self.shares in (Granularity.PER_KV_HEAD_INDEX, Granularity.GLOBAL)

    def needs(self, period: int) -> Needs:
        """What :meth:`select` reads, for an eviction every `period` tokens."""
        return Needs()

    def reads_order(self, period: int) -> bool:
        """Whether a choice depends on the order of the tokens between its sinks and the `period` newest ones.

        If not, kept tokens stay in their places (:mod:`kvpolicy.kernels.fill_places`), and an eviction moves as many
        as it evicts in place of nearly all. Random numbers belong to places then.
        """
        return True

    def forced(self, period: int) -> int:
        """Tokens kept whatever their score (sinks + recent); the budget must exceed them."""
        return 0

    def check(self, budget: int, period: int) -> None:
        """Refuse a budget and period that this policy cannot work with.

        Raises
        ------
        ValueError
            One sentence: what is wrong, and what would be allowed.
        """
        if budget <= (forced := self.forced(period)):
            raise ValueError(
                f"kv_budget={budget} leaves nothing to choose: {self.name} always keeps {forced} tokens "
                f"(sinks + recent), so the budget must be at least {forced + 1}; "
                "raise kv_budget, or lower kv_period or the policy's recent option"
            )

    def fit(self, model: ModelShape) -> None:
        """Refuse a model that this policy cannot work with; called before weights load.

        Raises
        ------
        ValueError
            One sentence: what is wrong, and what would be allowed.
        """
        for band in self.needs(1).hidden_bands:
            band.layers(model.layers)

    def due(self, resident: int, budget: int, period: int, *, evicted: int = 0) -> bool:
        """Whether a request with `resident` tokens, `evicted` before, is to be compacted before its next step."""
        return resident >= budget + period

    def n_keep(self, resident: int, budget: int, *, evicted: int = 0) -> int:
        """Resident tokens right after an eviction of `resident` tokens, at most."""
        return min(resident, budget)

    def most_resident(self, budget: int, period: int) -> int | None:
        """Tokens that a request holds at most once it was evicted from; None if there is no such number.

        A policy with a :meth:`due` or :meth:`n_keep` of its own has none, unless it says so here.
        """
        own_rule = type(self).due is not Policy.due or type(self).n_keep is not Policy.n_keep
        return None if own_rule else budget + period

    def observe(self, candidates: Candidates, period: int) -> torch.Tensor:
        """A number for each resident token that is carried on: ``[L, H_kv, N]`` fp32.

        Called every `period` tokens, and right before each :meth:`select`, if the policy `accumulates`, so that each
        decode query is given exactly once: the newest ``candidates.unseen`` of ``candidates.queries``, whose tokens
        are the newest of every head. The result comes back as ``candidates.statistic``, in the next :meth:`select`
        and in the next call.
        """
        raise NotImplementedError

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per number that :meth:`code_bits` may ask for, the most first; none, if it never does."""
        return ()

    def code_bits(self, candidates: Candidates, keep: torch.Tensor) -> torch.Tensor | None:
        """How many bits of a low-bit cache each kept token deserves: uint8 ``[L, H_kv, n_keep]``, of `widths`.

        Called after each :meth:`select`, with what it returned. None leaves all tokens as they are stored.
        """
        return None

    @abstractmethod
    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        """Choose the tokens to keep.

        Returns int64 ``[L, H_kv, n_keep]``: per layer and head distinct indices into ``0 .. N - 1``,
        ascending. A policy may return fewer than `n_keep`, the same number for all heads.
        Deterministic given `noise`; must not modify `candidates`.
        """
