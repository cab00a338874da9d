"""Methods that keep every token and read a part of them at each decode step.

They save no memory: the whole cache stays resident, with summaries of its pages beside it. What they bound is how
many keys and values one decode step attends to, so their `kv_budget` counts tokens read, not tokens kept, and belongs
in no comparison of memory. Prefill attends to everything.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from kvpolicy.policies.base import Candidates, Noise, Policy


class Rotary(NamedTuple):
    """The rotary embedding of a model, as tensors.

    table : gives ``[positions, width]``, the cosines of a position in the first half of its row, the sines in the
        second; asked anew each time, because the engine may replace its table by a longer one.
    interleaved : whether neighbouring channels are rotated together (GPT-J), not those of the two halves (NeoX).
    """

    table: Callable[[], torch.Tensor]
    interleaved: bool = False

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Rotate ``[..., N, width]`` by the int64 `positions` ``[N]``, or back from there; fp32.

        `back` undoes what the model's own rotation did exactly, up to rounding: also a table that was rounded, or
        scaled as YaRN does.
        """
        cos, sin = self.table()[positions].float().chunk(2, dim=-1)
        if back:
            scale = cos.square() + sin.square()
            cos, sin = cos / scale, -sin / scale
        x = x.float()
        first, second = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)


class ServedModel(NamedTuple):
    """A loaded model, as one process of the engine holds it.

    layers : how many, counted from layer 0.
    query_heads, kv_heads : those of this process.
    first_kv_head : number in the whole model of the first of them, under tensor parallelism.
    rotary : None if the model has no single rotary embedding.
    """

    layers: int
    query_heads: int
    kv_heads: int
    first_kv_head: int
    head_dim: int
    device: torch.device
    rotary: Rotary | None = None


class Reader(Protocol):
    """Which pages one decode step reads; pages are runs of `page` tokens, the newest may be incomplete.

    A row of the cache that lost no token is the text itself, so page ``i`` begins at position ``i * page``.
    """

    @property
    def page(self) -> int:
        """Tokens of a page."""

    def reads_all(self, layer: int, length: int, budget: int) -> bool:
        """Whether a step with `length` tokens, its own included, attends to all of them in this layer."""

    def summarise(self, keys: torch.Tensor, first: int, layer: int) -> torch.Tensor:
        """What is remembered of complete pages: ``[H_kv, n, page, D]`` to ``[H_kv, n, S]``.

        keys : after RoPE, in the cache's dtype.
        first : number of the first of these pages.
        """

    def choose(
        self, query: torch.Tensor, summaries: torch.Tensor, length: int, budget: int, layer: int
    ) -> torch.Tensor:
        """Bool ``[H, pages]``: what each query head, or each KV head, reads.

        Parameters
        ----------
        query : ``[H_q, D]`` of the newest token, after RoPE
        summaries : ``[H_kv, length // page, S]`` of all complete pages
        length : resident tokens, the newest included
        budget : tokens that a head may read
        """


@dataclass(frozen=True)
class ReadingPolicy(Policy):
    """Base of the methods that evict nothing and read a part."""

    # Whether each query head chooses for itself; else all query heads of a KV head read the same.
    per_query_head: ClassVar[bool] = False

    @abstractmethod
    def reader(self, model: ServedModel) -> Reader:
        """This policy at work on a loaded model; called once per process.

        Raises
        ------
        ValueError
            If the model is not one that it works with.
        """

    def due(self, resident: int, budget: int, period: int, *, evicted: int = 0) -> bool:
        return False

    def n_keep(self, resident: int, budget: int, *, evicted: int = 0) -> int:
        return resident

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        raise AssertionError(f"{self.name} keeps every token and is never due for an eviction")
