"""`epikv`: tokens at which the hidden state changed unusually, at an early layer more than at a late one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvpolicy.policies.base import Band, Candidates, Card, ModelShape, Needs, Noise
from kvpolicy.policies.epikv_rule import EpiKVRule
from kvpolicy.policies.epikv_signal import FORMS, Signal, band_signal
from kvpolicy.policies.selecting import keep_highest
from kvpolicy.policies.value_spread import Measure, value_spread


@dataclass(frozen=True)
class EpiKV(EpiKVRule):
    """EpiKV-Flat (arXiv 2606.26472; ``hs_variance_detrend`` of stevenkolawole/epiphany-kv-cache, no licence file).

    Kept are the whole prompt, the newest `recent` tokens, and of the other decode tokens those with the highest
    signal: how much the output of a decoder layer changed from the token before, in standard deviations over the
    last `window` tokens, at layer A less the same at layer B. The signal is fixed when a token is generated,
    whatever was evicted since. One set serves all layers and heads; no attention is read.

    What was read is the code, not the paper in full. It was made for a model of 32 layers; at other depths the
    default bands here are the same shares of the depth, which nobody has published, and ``kvpolicy epikv-bands``
    measures them for a model. The code evicts one token at every step (``kv_period=1``), of which a comment in it
    says that arrival then decides more than selection; a longer period is not published.

    Different here: new tokens have their true positions, where the authors' harness takes the length of the cache
    for the position once it evicts. A prompt that does not fit beside the recent tokens loses its oldest ones (but
    the sinks), where the code keeps it above the budget and drops decode tokens instead. Of equal signals the oldest
    stay; all is fp64.

    Parameters
    ----------
    sinks : int
        Oldest tokens that are always kept; ours: the prompt, which is kept, begins with them.
    recent : int or None
        Newest tokens that are always kept. Published, for which None stands: 128, at most a quarter of the budget.
    signal : {"zscore", "raw", "rolling", "adaptive"}
        ``zscore`` as above. ``rolling`` is the code's ``hs_variance``: mean of the changes at A less those at B over
        the last `window` tokens. ``adaptive`` is its ``band_adaptive_hs``: changes averaged over the layers 7 to 13
        and 18 to 25 of 32, z-scores as above, A's times 1.29. ``raw`` is ours: the plain difference of the changes.
    window : int
        Tokens of the running mean and deviation; published: 64.
    band_a, band_a_last : float or None
        First and last layer of A: below 1 a share of the depth, else the layer's number. None for both: as
        published for the signal, 10/32 for single layers; without a last the band is the one layer.
    band_b, band_b_last : float or None
        The same of B; published for single layers: 21/32.
    value_reserve : int
        Decode tokens that stay because their values spread most, mean over heads and layers; published, since
        August 2026: 0. Ours: sinks, prompt and recent tokens take none of these places.
    value_measure : {"range", "variance", "l2"}
        How the spread of a value is measured for that.
    """

    name: ClassVar[str] = "epikv"
    card: ClassVar[Card] = Card(
        score="change of the hidden state from the token before, early layer less late layer, in running deviations",
        source="EpiKV, arXiv 2606.26472",
        code="stevenkolawole/epiphany-kv-cache (no licence file)",
    )

    signal: Signal = "zscore"
    window: int = field(default=64, metadata={"least": 1})
    band_a: float | None = None
    band_a_last: float | None = None
    band_b: float | None = None
    band_b_last: float | None = None
    value_reserve: int = 0
    value_measure: Measure = "range"

    @property
    def spans_heads(self) -> bool:
        """Only values differ between heads: without a reserve every rank finds the same set."""
        return self.value_reserve > 0

    @property
    def spans_layers(self) -> bool:
        """As for heads."""
        return self.value_reserve > 0

    @property
    def bands(self) -> tuple[Band, Band]:
        """A and B."""
        form = FORMS[self.signal]
        return (
            form.band_a if self.band_a is None else _band(self.band_a, self.band_a_last),
            form.band_b if self.band_b is None else _band(self.band_b, self.band_b_last),
        )

    def needs(self, period: int) -> Needs:
        return Needs(values=self.value_reserve > 0, positions=True, hidden_bands=self.bands)

    def check(self, budget: int, period: int) -> None:
        super().check(budget, period)
        if self.window == 1 and self.signal in ("zscore", "adaptive"):
            raise ValueError(f"window:1 leaves signal:{self.signal} nothing to compare; window must be at least 2")
        for name in ("band_a", "band_b"):
            first, last = getattr(self, name), getattr(self, f"{name}_last")
            if first is None and last is not None:
                raise ValueError(f"{name}_last:{last:g} ends a band that has no first layer; set {name} too")
            for option, end in ((name, first), (f"{name}_last", last)):
                if end is not None and end >= 1 and end != int(end):
                    raise ValueError(f"{option}:{end:g} is neither a share of the depth below 1 nor a layer's number")
        room = budget - self.sinks - self.recent_count(budget)
        if self.value_reserve > room:
            raise ValueError(
                f"value_reserve:{self.value_reserve} is more than the {room} tokens that kv_budget={budget} has beside "
                f"sinks and recent ones under {self.name}; raise kv_budget, or lower value_reserve"
            )

    def fit(self, model: ModelShape) -> None:
        for name, band in zip(("band_a", "band_b"), self.bands, strict=True):
            try:
                band.layers(model.layers)
            except ValueError as error:
                raise ValueError(
                    f"{name} of {self.name} does not fit the model: {error}; "
                    f"set {name} (and {name}_last) to layers of this model or to shares of its depth below 1"
                ) from None

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        scores = self.signals(candidates)
        if self.value_reserve:
            positions = candidates.require("positions")[0, 0]
            eligible = positions >= candidates.prompt_len
            eligible[: self.sinks] = False
            eligible[len(positions) - self.recent_count(n_keep) :] = False
            scores = scores.masked_fill(self.most_spread(candidates, eligible, self.value_reserve), torch.inf)
        return self.one_set(scores, candidates, n_keep)

    def signals(self, candidates: Candidates) -> torch.Tensor:
        """fp64 ``[N]``: the signal of each resident token, 0 for those of the prompt."""
        change = candidates.require("hidden_change")
        decoded = candidates.true_len - candidates.prompt_len
        assert change.shape[-1] == decoded, f"{change.shape = } for {decoded = } tokens"
        columns = candidates.require("positions")[0, 0] - candidates.prompt_len
        return band_signal(change, columns.clamp_min(-1), self.signal, self.window)

    def most_spread(self, candidates: Candidates, eligible: torch.Tensor, count: int) -> torch.Tensor:
        """bool ``[N]``: of the `eligible` tokens the `count` whose values spread most, mean over heads and layers."""
        spread = torch.zeros(len(eligible), dtype=torch.float64, device=eligible.device)
        for values in candidates.require("values"):
            spread += value_spread(values, self.value_measure).double().mean(dim=0)
        spread = spread.nan_to_num(nan=torch.finfo(spread.dtype).max).masked_fill(~eligible, -torch.inf)
        chosen = keep_highest(spread, min(count, len(eligible)))
        return torch.zeros_like(eligible).index_fill(0, chosen, True) & eligible


def _band(first: float, last: float | None) -> Band:
    return Band(first, first if last is None else last)
