"""`thinkv`: segments of the text are thinned in steps, those of least important thoughts first."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import torch

from kvpolicy.kernels.decode_attention import decode_attention
from kvpolicy.kernels.kmeans_medoids import kmeans_medoids
from kvpolicy.policies.base import Candidates, Card, Needs, Noise, Policy

LADDER = (64, 32, 16, 8, 4)  # tokens that a segment is thinned to, one step after the other; second-hand
LADDER_OF_BITS = re.compile("R([248])E([248])T([248])")
SPARSE = 0.01  # share of a row's largest entry below which an entry counts as none; second-hand


class Thought(IntEnum):
    """What a segment is about, the least important first."""

    TRANSITION = 0
    EXECUTION = 1
    REASONING = 2


@dataclass(frozen=True)
class ThinKV(Policy):
    """The eviction part of ThinKV (arXiv 2510.01290), **from second-hand descriptions**.

    No code was found and the paper itself was not read. So neither memory nor accuracy are the paper's.

    The text, prompt included, is cut by position into segments of `segment` tokens. The sparsity of a decode query is
    the share of entries of its softmax row, over all resident tokens, below 1 % of the row's largest; the mean over all
    query heads of the last `layers` layers. The mean sparsity of a complete segment's queries says what it is about:
    transition above `high`, execution below `low`, reasoning between. Reasoning matters most, transition least.

    At an eviction

    1. for each transition segment that was completed since the previous eviction, every earlier segment drops one step
       of the ladder 64, 32, 16, 8, 4, but not below `least`;
    2. while more than the budget is left, the oldest segment above `least` of the least important kind drops one step.

    A segment that drops is clustered by K-means over its resident keys after RoPE, per layer and KV head, and the real
    key nearest to each centroid stays. So each head keeps its own tokens, as many as every other, and often fewer than
    the budget.

    Ours, where the sources are silent or where it differs:

    * Published thresholds are minima of a density over 100 calibration prompts, on 4 layers chosen by calibration;
      neither numbers nor layers are known. Without `low` and `high`: of the n resident complete segments of known
      sparsity the ``n // 3`` lowest are execution and the ``n // 3`` highest transition, save those that equal the next
      one; below 3 all are reasoning. They are ranked anew at each eviction. The last 4 layers are those of the EpiKV
      repository's reimplementation, which differs in the measure and in the retentions.
    * Queries of the prompt are not recorded. A segment with a token whose query was not counts as reasoning.
    * Step 1 is published for the moment a transition ends; here it waits for the next eviction.
    * A segment that drops several steps at one eviction is clustered once, to the last of them. K-means begins at
      evenly spaced tokens and runs `iterations` times (`kernels/kmeans_medoids.py`); neither is published.
    * The newest segment is not thinned before it is complete. If all others are at `least` and more than the budget is
      left, the oldest are dropped wholly, transition before execution before reasoning.

    Its quantization part (TBQ) gives each kind of thought its own bits, R4E4T2 in the end, in groups of 16: here the
    option `ladder`, on top of ``kv_quant=int4``. It has the published widths, by our integer codecs in place of NVFP4
    and ternary numbers, but not the memory: a pool stores all tokens in one width, and two-bit thoughts are four-bit
    codes of which only four are used. Tokens become coarser at the eviction that finds them in a complete segment of
    that kind, and stay so if the segment is ranked otherwise later.

    Labels are shared by all layers and heads, so the policy must see all of them.

    Parameters
    ----------
    segment : int
        Second-hand: 128.
    layers : int
        How many of the last layers sparsity is measured on; all, if the model has fewer.
    low, high : float or None
        Thresholds of sparsity, both or none.
    least : int
        Tokens that a segment is thinned to at most. Second-hand: 4. Steps of the ladder below it are left out.
    iterations : int
        Of K-means.
    ladder : str or None
        Bits of reasoning, execution and transition, of 2, 4 and 8: ``R4E4T2``. The most must be those of ``kv_quant``.
    """

    name: ClassVar[str] = "thinkv"
    card: ClassVar[Card] = Card(
        score="kind of thought of the token's segment, by sparsity of attention; K-means over keys within a segment",
        source="ThinKV, arXiv 2510.01290 (second-hand)",
        code="none found",
        flash_attention=False,
    )
    accumulates: ClassVar[bool] = True

    segment: int = field(default=128, metadata={"least": 1})
    layers: int = field(default=4, metadata={"least": 1})
    low: float | None = None
    high: float | None = None
    least: int = field(default=4, metadata={"least": 1})
    iterations: int = 10
    ladder: str | None = None

    @property
    def spans_heads(self) -> bool:
        return True

    @property
    def spans_layers(self) -> bool:
        return True

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, queries=period, positions=True)

    def check(self, budget: int, period: int) -> None:
        super().check(budget, period)
        if budget < self.segment:
            raise ValueError(
                f"kv_budget={budget} does not hold one segment of {self.segment} tokens, which thinkv thins only when "
                "it is complete; raise kv_budget, or lower the segment option to at most the budget"
            )
        if (self.low is None) != (self.high is None) or (self.low or 0) > (self.high or 0):
            raise ValueError(
                f"thinkv was given low:{self.low} and high:{self.high}; "
                "its thresholds must be two numbers, low at most high, or both none"
            )

        if self.ladder is not None and not LADDER_OF_BITS.fullmatch(self.ladder):
            raise ValueError(
                f"thinkv was given ladder:{self.ladder}; it is written like R4E4T2, the bits (2, 4 or 8) of reasoning, "
                "execution and transition"
            )

    @property
    def bits_of(self) -> dict[Thought, int]:
        """Bits of each kind of thought; empty without a ladder."""
        found = LADDER_OF_BITS.fullmatch(self.ladder or "")
        kinds = (Thought.REASONING, Thought.EXECUTION, Thought.TRANSITION)
        return {} if found is None else dict(zip(kinds, map(int, found.groups()), strict=True))

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.bits_of.values()), reverse=True))

    def observe(self, candidates: Candidates, period: int) -> torch.Tensor:
        """Sparsity of each token's query, of its whole segment once that is complete; NaN where it is not known."""
        positions, statistic = candidates.require("positions"), candidates.require("statistic").clone()
        if candidates.unseen:
            queries, keys = (candidates.require(name)[-self.layers :] for name in ("queries", "keys"))
            rows = decode_attention(queries, keys, candidates.unseen)
            statistic[..., -candidates.unseen :] = torch.stack([_sparsity(of_layer) for of_layer in rows]).mean(dim=0)
        # All heads hold the same tokens of an incomplete segment, and one value for a complete one: one head tells all.
        numbers = positions // self.segment
        complete = candidates.true_len // self.segment
        size = torch.bincount(numbers[0, 0], minlength=complete + 1)
        total = torch.zeros(complete + 1, dtype=torch.float64, device=size.device)
        total.index_add_(0, numbers[0, 0], statistic[0, 0].double())  # exact: the mean of equal values is that value
        return torch.where(numbers < complete, (total / size)[numbers].float(), statistic)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        keys = candidates.require("keys")
        ends, sizes, thoughts = self.segments(candidates)
        since = [end > candidates.previous_len for end in ends]
        kept, first = [], 0
        for size, left in zip(sizes, self.thinned(sizes, thoughts, since, n_keep), strict=True):
            rows = torch.arange(left, device=keys.device).expand(*keys.shape[:2], left)
            if 0 < left < size:
                rows = kmeans_medoids(keys[:, :, first : first + size], left, self.iterations)
            kept.append(rows + first)
            first += size
        return torch.cat(kept, dim=-1)

    def code_bits(self, candidates: Candidates, keep: torch.Tensor) -> torch.Tensor | None:
        if not self.bits_of:
            return None
        _, sizes, thoughts = self.segments(candidates)
        bits = [self.bits_of[thought] for thought in thoughts] + [max(self.widths)] * (len(sizes) - len(thoughts))
        of_tokens = torch.tensor(bits, dtype=torch.uint8).repeat_interleave(torch.tensor(sizes))
        return of_tokens.to(keep.device)[keep]

    def segments(self, candidates: Candidates) -> tuple[list[int], list[int], list[Thought]]:
        """Where each segment with resident tokens ends in the text, how many it has, and what the complete ones are."""
        positions = candidates.require("positions")[0, 0]
        numbers, counts = torch.unique_consecutive(positions // self.segment, return_counts=True)
        sparsity = candidates.require("statistic")[0, 0, counts.cumsum(dim=0) - 1]
        ends = ((numbers + 1) * self.segment).tolist()
        thoughts = self.thoughts(sparsity[: sum(end <= candidates.true_len for end in ends)].tolist())
        return ends, counts.tolist(), thoughts

    def thoughts(self, sparsity: Sequence[float]) -> list[Thought]:
        """What each complete segment of that `sparsity` is about; NaN where it is not known."""
        known = sorted(value for value in sparsity if not math.isnan(value))
        low, high = self.low, self.high
        if low is None or high is None:
            third = len(known) // 3
            low, high = (known[third], known[-1 - third]) if known else (0, 1)
        return [
            Thought.TRANSITION if value > high else Thought.EXECUTION if value < low else Thought.REASONING
            for value in sparsity
        ]

    def thinned(
        self, sizes: Sequence[int], thoughts: Sequence[Thought], since: Sequence[bool], budget: int
    ) -> list[int]:
        """Tokens that each segment is left with.

        Parameters
        ----------
        sizes : resident tokens of each segment, oldest first
        thoughts : of the complete segments, which are all but perhaps the last
        since : whether a segment was completed since the previous eviction
        """
        left = list(sizes)
        for i, thought in enumerate(thoughts):
            if thought == Thought.TRANSITION and since[i]:
                left[:i] = map(self._lower, left[:i])
        by_importance = sorted(range(len(thoughts)), key=lambda i: (thoughts[i], i))
        for i in by_importance:
            while sum(left) > budget and (lower := self._lower(left[i])) < left[i]:
                left[i] = lower
        for i in by_importance:
            if sum(left) > budget:
                left[i] = 0
        assert sum(left) <= budget, f"{sizes[-1] = } tokens of the newest segment do not fit into {budget = }"
        return left

    def _lower(self, size: int) -> int:
        """The next step of the ladder below `size`, or `size` where there is none."""
        ladder = (*(step for step in LADDER if step > self.least), self.least)
        return next((step for step in ladder if step < size), size)


def _sparsity(rows: torch.Tensor) -> torch.Tensor:
    """``[H_kv, G, w, N]`` attention of one layer to fp32 ``[w]``, the mean over its query heads."""
    window, tokens = rows.shape[-2:]
    seen = torch.ones(window, tokens, dtype=torch.bool, device=rows.device).tril(tokens - window)
    sparse = (rows < SPARSE * rows.amax(dim=-1, keepdim=True)) & seen
    return (sparse.sum(dim=-1).double() / seen.sum(dim=-1)).mean(dim=(0, 1)).float()
