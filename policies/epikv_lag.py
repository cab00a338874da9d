"""`epikv-lag`: tokens whose channels lie most unevenly in the ranges of the chunk before their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import functional

from kvpolicy.policies.base import Candidates, Card, Needs, Noise
from kvpolicy.policies.epikv_rule import EpiKVRule, channel_deviation

LEAST_RANGE = 1e-9


@dataclass(frozen=True)
class EpiKVLag(EpiKVRule):
    """EpiKV's adaptation of LagKV (arXiv 2606.26472; ``lag_kv`` of stevenkolawole/epiphany-kv-cache, no licence file).

    LagKV (arXiv 2504.04704) turned round: the reference is the chunk before, which is there while decoding, not the
    one after. Keys, and likewise values, are averaged over the layers, themselves and not their scores. All resident
    tokens, prompt and recent ones included, are cut into chunks. Each channel is shifted and scaled by smallest and
    largest value of the chunk before (plus 1e-9); a token's score is the standard deviation over its channels
    (``D - 1``), mean over heads, of keys plus that of values. The first chunk has no reference and is taken as it
    is, so its scores are on another scale. Scores are computed anew at each eviction, of what is resident then.

    Kept as in `epikv`: the whole prompt, the newest tokens, the highest scores of the others, one set for all layers
    and heads, a fixed budget. All from the code; the paper was not read in full. Different here: true positions and
    prompts that are too long for the budget, as in `epikv`; fp32 where the code averages in the model's dtype.

    Parameters
    ----------
    sinks : int
        Oldest tokens that are always kept; ours: the prompt, which is kept, begins with them.
    recent : int or None
        Newest tokens that are always kept. Published, for which None stands: 128, at most a quarter of the budget.
    chunk : int
        Tokens of a chunk; published: 128.
    """

    name: ClassVar[str] = "epikv-lag"
    card: ClassVar[Card] = Card(
        score="spread of key and value channels, in the ranges of the previous chunk, mean over layers and heads",
        source="EpiKV, arXiv 2606.26472, after LagKV, arXiv 2504.04704",
        code="stevenkolawole/epiphany-kv-cache (no licence file)",
    )

    chunk: int = field(default=128, metadata={"least": 2})

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, values=True, positions=True)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        scores = sum(lag_spread(_mean_of_layers(candidates.require(name)), self.chunk) for name in ("keys", "values"))
        assert isinstance(scores, torch.Tensor)
        return self.one_set(scores, candidates, n_keep)


def lag_spread(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Standard deviation of a token's channels in the ranges of the chunk before, mean over heads.

    fp32 ``[H, N, D]``, oldest first, to ``[N]``.
    """
    heads, tokens, channels = x.shape
    chunks = functional.pad(x, (0, 0, 0, -tokens % chunk)).reshape(heads, -1, chunk, channels)
    smallest, largest = chunks[:, :-1].aminmax(dim=2, keepdim=True)
    relative = (chunks[:, 1:] - smallest) / (largest - smallest + LEAST_RANGE)
    spread = torch.cat([channel_deviation(chunks[:, :1]), channel_deviation(relative)], dim=1)
    return spread.flatten(1)[:, :tokens].mean(dim=0)


def _mean_of_layers(x: torch.Tensor) -> torch.Tensor:
    """``[L, H, N, D]`` of any dtype to fp32 ``[H, N, D]``, a layer at a time."""
    total = torch.zeros(x.shape[1:], dtype=torch.float32, device=x.device)
    for layer in x:
        total += layer
    return total / len(x)
