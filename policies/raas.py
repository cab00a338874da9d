"""`raas`: the tokens that attention used last, the prompt for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvpolicy.kernels.decode_attention import decode_attention
from kvpolicy.policies.base import Candidates, Card, Needs, Noise, Policy
from kvpolicy.policies.selecting import keep_highest, newest_beside_prompt, with_prompt


@dataclass(frozen=True)
class RaaS(Policy):
    """RaaS (arXiv 2502.11147): the prompt stays; of the decode tokens those go that were not used for longest.

    Each decode token has a timestamp: the position of the last query that used it, at first its own. Attention is the
    mean over the query heads of a KV head, softmax over all resident tokens, the prompt too. The oldest timestamps are
    evicted; of equal ones (common: about half of the tokens share the newest) the older token, which is our rule.

    What "used" means is known only second-hand, in two forms, and which of them the paper's main results use is not:

    * ``rule:median`` (default): attention at least the median of the decode tokens', the query's own among them; of an
      even number the lower of the middle two. So does the reimplementation in the EpiKV repository, though with one
      timestamp for all layers and heads.
    * ``rule:threshold``: attention above `alpha`; 0.0001 is an example given for the paper.

    Not modelled: the official code works on pages of 16 tokens, ranked per query head by bounds of their keys, and only
    masks what it would evict. No source protects recent tokens: the newest one stays by its timestamp alone. None says
    what becomes of a prompt that fills the budget: here it leaves a quarter of it (at most 128 tokens) to the newest
    tokens of the text, and loses its own oldest ones (but `sinks`).

    Parameters
    ----------
    rule : {"median", "threshold"}
    alpha : float
        Attention that counts as use, exclusive, for ``rule:threshold``.
    recent, sinks : int
        Newest and oldest tokens that are always kept; none published.
    """

    name: ClassVar[str] = "raas"
    card: ClassVar[Card] = Card(
        score="last decode step that attended to the token; the prompt is kept",
        source="RaaS, arXiv 2502.11147",
        code="DerekHJH/RaaS (licence not seen)",
    )
    accumulates: ClassVar[bool] = True

    rule: Literal["median", "threshold"] = "median"
    alpha: float = 1e-4
    recent: int = 0
    sinks: int = 0

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, queries=period, positions=True)

    def forced(self, period: int) -> int:
        return self.sinks + self._recent

    @property
    def _recent(self) -> int:
        return max(1, self.recent)

    def observe(self, candidates: Candidates, period: int) -> torch.Tensor:
        """Timestamps; exact up to position 2^24."""
        positions, before, unseen = candidates.require("positions"), candidates.require("statistic"), candidates.unseen
        stamps = torch.where(before.isnan(), positions.float(), before)
        if unseen == 0:
            return stamps
        later = torch.ones(unseen, unseen, dtype=torch.bool, device=stamps.device).triu(1)
        queries, keys = candidates.require("queries"), candidates.require("keys")
        for layer, rows in enumerate(decode_attention(queries, keys, unseen)):
            place = positions[layer]
            prompt = (place < candidates.prompt_len)[:, None]
            attention = rows.mean(dim=1).masked_fill(prompt, torch.nan)  # NaN is below any bound
            attention[..., -unseen:].masked_fill_(later, torch.nan)
            if self.rule == "median":
                used = attention >= attention.nanmedian(dim=-1, keepdim=True).values
            else:
                used = attention > self.alpha
            asked = place[:, -unseen:, None].float()
            stamps[layer] = torch.maximum(stamps[layer], torch.where(used, asked, -1.0).amax(dim=1))
        return stamps

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        stamps = candidates.require("statistic").double()
        tokens = stamps.shape[-1]
        scores = stamps * tokens + torch.arange(tokens, device=stamps.device)
        recent = newest_beside_prompt(self._recent, candidates.prompt_len, n_keep)
        scores = with_prompt(scores, candidates, n_keep - recent)
        return keep_highest(scores, n_keep, sinks=self.sinks, recent=recent)
