"""`alpha`: the tokens that another policy scores highest, less their likeness to those already chosen."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvpolicy.kernels.greedy_diversity import Redundancy, greedy_diversity
from kvpolicy.policies.base import Candidates, Card, Granularity, ModelShape, Needs, Noise, Policy
from kvpolicy.policies.options import build, parse_options
from kvpolicy.policies.registry import policy_type
from kvpolicy.policies.selecting import LIFTED, ScoredPolicy, keep_highest
from kvpolicy.policies.standard_scores import standard_scores

SCORERS = "policies that are include triattention, keydiff, vase-dkv and curdkv"


@dataclass(frozen=True)
class Alpha(Policy):
    """alpha (arXiv 2605.14292, "Minimal-Intervention KV Retention"): another policy's score, chosen for diversity.

    Everything is as with the policy `base`, but for how tokens are chosen by its score: one by one, each time the one
    whose score less `diversity` times its redundancy is highest. Redundancy is the cosine similarity of the token's
    V-signature to those of the tokens that are kept already; the V-signature is the mean of the token's values over all
    layers and KV heads. ``diversity:0`` keeps exactly the tokens with the highest scores.

    A token has one signature, so all layers and heads hold the same tokens: one set per request.

    Only abstracts and a summary of the paper could be read, and no code was found. They give: base TriAttention,
    lambda 0.5 (here `diversity`), budgets of 64 and 128 tokens, R1-Distill-Qwen-7B and -Llama-8B on MATH-500,
    signatures as above, and plain top-k for lambda 0. Everything else is our rule:

    * redundancy is the largest of the cosines, negative ones too; their mean or sum are options;
    * the score is in standard deviations of the tokens that compete, so that it compares with a cosine, per layer and
      KV head where the base has a score for each, and then the mean of these. Whether the published base has one set
      per request (``mode:global``) or one per KV head, is not said;
    * what the base keeps in any case (sinks, recent tokens, TriAttention's prompt) is chosen before all others, and
      its redundancy counts;
    * of equal tokens the older is chosen.

    Parameters
    ----------
    base : str
        A policy that is one score per token, with its options in brackets:
        ``base:triattention[stats:FILE;mode:global]``.
    diversity : float
        Published: 0.5.
    redundancy : {"max", "mean", "sum"}
        Of the cosines to the tokens that are kept already.
    sinks, recent : int or None
        Oldest and newest tokens that are always kept. None: as the base has it.
    """

    name: ClassVar[str] = "alpha"
    card: ClassVar[Card] = Card(
        score="another policy's score, less the likeness of the token's value to those kept already",
        source="Minimal-Intervention KV Retention, arXiv 2605.14292",
        code="none found",
    )
    granularity: ClassVar[Granularity] = Granularity.GLOBAL

    base: str = "triattention"
    diversity: float = 0.5
    redundancy: Redundancy = "max"
    sinks: int | None = None
    recent: int | None = None

    @property
    def scorer(self) -> ScoredPolicy:
        """The base, with the sinks and recent tokens that are asked for here. Raises ValueError if there is none."""
        given = {"sinks": self.sinks, "recent": self.recent}
        return replace(_scorer(self.base), **{name: value for name, value in given.items() if value is not None})

    def needs(self, period: int) -> Needs:
        needs = self.scorer.needs(period)
        return replace(needs, values=needs.values or self.diversity > 0)

    def forced(self, period: int) -> int:
        return self.scorer.forced(period)

    def check(self, budget: int, period: int) -> None:
        self.scorer.check(budget, period)

    def fit(self, model: ModelShape) -> None:
        self.scorer.fit(model)

    def due(self, resident: int, budget: int, period: int, *, evicted: int = 0) -> bool:
        return self.scorer.due(resident, budget, period, evicted=evicted)

    def n_keep(self, resident: int, budget: int, *, evicted: int = 0) -> int:
        return self.scorer.n_keep(resident, budget, evicted=evicted)

    def most_resident(self, budget: int, period: int) -> int | None:
        return self.scorer.most_resident(budget, period)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        base = self.scorer
        scores = base.scores(candidates, noise)
        sinks, recent = base.sinks, base.newest(candidates, n_keep, period)
        lifted = base.protected(scores.new_zeros(1, 1, scores.shape[-1]), candidates, n_keep, period)
        stay = lifted.flatten() >= LIFTED
        stay[:sinks] = True
        stay[len(stay) - recent :] = True
        if stay.sum() < n_keep and self.diversity > 0:
            kept = greedy_diversity(
                _one_set(scores, ~stay),
                signatures(candidates.require("values")),
                stay,
                n_keep,
                weight=self.diversity,
                redundancy=self.redundancy,
            )
        else:
            shared = scores if scores.shape[:2] == (1, 1) else _one_set(scores, ~stay)[None, None]
            ranked = base.protected(shared, candidates, n_keep, period)
            kept = keep_highest(ranked, n_keep, sinks=sinks, recent=recent)
        return kept.expand(*candidates.shape[:2], n_keep)


def signatures(values: torch.Tensor) -> torch.Tensor:
    """Mean of ``[L, H_kv, N, D]`` over layers and heads, fp32 ``[N, D]``, one layer at a time."""
    total = torch.zeros(values.shape[2:], device=values.device)
    for layer in values:
        total += layer.float().mean(dim=0)
    return total / len(values)


def _one_set(scores: torch.Tensor, competing: torch.Tensor) -> torch.Tensor:
    """fp64 ``[N]``: standard scores among the `competing` tokens, mean over layers and heads."""
    return standard_scores(scores.double(), competing).mean(dim=(0, 1))


@functools.lru_cache(maxsize=64)
def _scorer(text: str) -> ScoredPolicy:
    """The policy that ``policy[name:value;name:value]`` describes."""
    name, bracket, options = text.partition("[")
    if bracket and not options.endswith("]"):
        raise ValueError(f"base:{text} must end with ']': base:policy[name:value;name:value]")
    try:
        kind = policy_type(name.strip())
        if not issubclass(kind, ScoredPolicy) or kind.select is not ScoredPolicy.select or kind.accumulates:
            raise ValueError(f"{name.strip()!r} is not one score per token alone; {SCORERS}")
        found = build(kind, parse_options(options[:-1]))
    except ValueError as error:
        raise ValueError(f"alpha cannot choose by base:{text}: {error}") from None
    assert isinstance(found, ScoredPolicy)
    return found
