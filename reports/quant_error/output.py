"""What low-bit storage does to the model's output, position by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpolicy.quant.logits_errors import LogitsErrors, logits_errors
from kvpolicy.reports.quant_error.arms import Arm
from kvpolicy.reports.quant_error.capture import LayerRows, QuantErrorError, run_reading
from kvpolicy.reports.quant_error.measure import Table, restored

BLOCK = 32  # neighbouring positions that are drawn together: their errors are alike
RESAMPLES = 2000
LEVEL = 0.95


class Interval(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class OutputErrors:
    """At each position of a text but its last, whose next token is not known.

    kl : ``[n]``, ``KL(reference || changed)`` of the next-token distributions, in nats
    flips : ``[n]``, 1 where the most likely token is another one
    nll_delta : ``[n]``, negative log-likelihood of the true token, changed minus reference, in nats
    """

    kl: Table
    flips: Table
    nll_delta: Table

    def summary(self) -> LogitsErrors:
        return LogitsErrors(
            kl_mean=float(self.kl.mean()),
            kl_p99=float(np.quantile(self.kl, 0.99)),
            top1_flips=float(self.flips.mean()),
            nll_delta=float(self.nll_delta.mean()),
        )


def output_errors(
    reference: torch.Tensor, changed: torch.Tensor, ids: Sequence[int], advance: Callable[[], object] = lambda: None
) -> OutputErrors:
    """Of two runs' logits ``[T, V]`` over the tokens `ids`; `advance` is called for each position.

    Raises
    ------
    QuantErrorError
        If a logit is NaN.
    """
    targets = torch.tensor(ids[1:], device=reference.device)
    found = []
    try:
        for t in range(len(targets)):
            found.append(logits_errors(reference[t : t + 1], changed[t : t + 1], targets[t : t + 1]))
            advance()
    except ValueError as error:
        raise QuantErrorError(str(error)) from None
    kl, _, flips, deltas = np.array(found, dtype=np.float64).T
    return OutputErrors(kl, flips, deltas)


def run_arm(
    model: Any, ids: list[int], arm: Arm, cache_dtype: torch.dtype, advance: Callable[[], object] = lambda: None
) -> torch.Tensor:
    """Logits ``[T, V]`` of a text whose cached rows are stored as `arm` says; `advance` is called for each layer."""

    def read(rows: LayerRows) -> tuple[torch.Tensor, torch.Tensor]:
        advance()
        return restored(arm.keys, rows.keys, rows.layer), restored(arm.values, rows.values, rows.layer)

    return run_reading(model, ids, read, cache_dtype)


def kl_difference(one: OutputErrors, other: OutputErrors) -> Interval:
    """Percentile interval, at LEVEL, of ``mean KL of one - mean KL of other``, from blocks of positions drawn anew.

    It says what another text of this kind might have shown, not what another kind of text would.
    """
    difference = one.kl - other.kl
    starts = np.arange(0, len(difference), BLOCK)
    sums = np.add.reduceat(difference, starts)
    lengths = np.diff(np.append(starts, len(difference)))
    drawn = np.random.default_rng(0).integers(len(starts), size=(RESAMPLES, len(starts)))
    means = sums[drawn].sum(axis=1) / lengths[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
