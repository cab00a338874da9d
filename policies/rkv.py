"""`rkv`: attention of the newest queries, less the redundancy of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from kvpolicy.kernels.key_redundancy import key_redundancy
from kvpolicy.kernels.window_attention import Domain
from kvpolicy.policies.base import Candidates, Card, Noise
from kvpolicy.policies.selecting import keep_highest
from kvpolicy.policies.windowed import Window, WindowedPolicy


class Variant(NamedTuple):
    """What one of the forms in circulation does.

    threshold : similarity above which the newest similar key is not counted; 0: all count.
    compared : keys among which a key is redundant, all resident or only those that may be evicted.
    """

    window: Window
    mix_lambda: float
    threshold: float
    compared: Domain


OFFICIAL = Variant(Window(8, "max", 7, "max", "candidates"), mix_lambda=0.07, threshold=0.5, compared="all")
OF_VASE = Window(None, "avg", 5, "mean", "candidates")
VARIANTS = {
    "official": OFFICIAL,
    "paper": OFFICIAL._replace(mix_lambda=0.1),
    "vase": Variant(OF_VASE, mix_lambda=0.5, threshold=0, compared="candidates"),
}


@dataclass(frozen=True)
class RKV(WindowedPolicy):
    """R-KV (arXiv 2505.24133; Zefan-Cai/R-KV, Apache-2.0): ``lambda * attention - (1 - lambda) * redundancy``.

    Per layer and KV head. Attention is that of the newest `window` queries: softmax over the tokens that may be
    evicted, mean over the queries, pooled. Redundancy is the softmax, over the keys compared, of a key's mean
    cosine similarity to all of these. There a key does not count its newest similar one: of two alike neither is
    redundant, of more the newest is not, and the oldest most.

    Three forms are in circulation, and a result should say which it used:

    * ``variant:official`` (default): defaults of the code's ``R1KV`` class. Window 8, max pooling over 7, the
      group's largest raw logit before the softmax, lambda 0.07, threshold 0.5, all resident keys compared. Where
      no key is more similar than the threshold, the code leaves the oldest uncounted instead; so does this.
    * ``variant:paper``: the same with lambda 0.1, as the repository's README gives the paper's setting. The paper's
      text was not read; the README speaks of up to ``beta`` uncounted keys, the code has one.
    * ``variant:vase``: R-KV of VaSE's tables (mode ``attn_rkv --smooth``). Window and recent tokens are one
      eviction period (64 there), average pooling over 5, mean over the query heads of a group, lambda 0.5, no
      threshold, and only the keys that may be evicted are compared.

    Published eviction period of the first two: 128 tokens. No form protects sinks. The code computes similarity and
    pooling in the model's dtype, this in fp32; kept tokens stay in age order, as in the newer serving code.

    Parameters
    ----------
    window, kernel, pooling, group, mix_lambda
        None: as the variant has it. `window` is the number of queries, `kernel` the tokens pooled into one, odd;
        ``group:max`` takes the largest raw logit of a group, ``group:mean`` the mean attention; `mix_lambda` is at
        most 1.
    threshold : float or None
        Cosine above which keys are similar; 0 switches the rule off, so that all keys count. None: as the variant
        has it.
    recent : int or None
        Newest tokens, always kept, at least the window; None: the window.
    sinks : int
        Oldest tokens that are always kept; 0 in all three forms.
    """

    name: ClassVar[str] = "rkv"
    card: ClassVar[Card] = Card(
        score="attention of the newest queries, less the key's similarity to the other keys",
        source="R-KV, arXiv 2505.24133",
        code="Zefan-Cai/R-KV (Apache-2.0)",
    )

    variant: Literal["official", "paper", "vase"] = "official"
    mix_lambda: float | None = None
    threshold: float | None = None

    @property
    def published(self) -> Window:
        return VARIANTS[self.variant].window

    def check(self, budget: int, period: int) -> None:
        super().check(budget, period)
        if self.mix_lambda is not None and self.mix_lambda > 1:
            raise ValueError(
                f"mix_lambda:{self.mix_lambda:g} would reward redundancy; {self.name} mixes with 0 to 1, "
                "1 being attention alone"
            )

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        variant, keys = VARIANTS[self.variant], candidates.require("keys")
        attention = self.attention(candidates, period)
        older = attention.shape[-1]
        compared = keys if variant.compared == "all" else keys[:, :, :older]
        threshold = variant.threshold if self.threshold is None else self.threshold
        redundancy = key_redundancy(compared, threshold=threshold or None).softmax(dim=-1)[..., :older]
        mix_lambda = variant.mix_lambda if self.mix_lambda is None else self.mix_lambda
        scores = mix_lambda * attention - (1 - mix_lambda) * redundancy
        newest = scores.new_full((*scores.shape[:-1], self.recent_count(period)), torch.inf)
        return keep_highest(torch.cat([scores, newest], dim=-1), n_keep, sinks=self.sinks)
