"""What part `kl` of ablation.py does in the scheduler process: watch a request's logits, and force its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap

# Columns of a request's step table; a step that was never observed stays NaN.
KL, GREEDY, EVICTIONS = range(3)
# Keys of custom_params. The observer itself is kept in the scheduler's own copy of them.
LOG_PROBS, STEPS, FORCED, OBSERVER = "ablation_log_probs", "ablation_steps", "ablation_forced", "ablation_observer"


class Observer:
    """Watches the steps of one request: records its log-probabilities, or compares them and forces the next token."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._table = open_memmap(parameters[STEPS], mode="r+")
        self._path = parameters[LOG_PROBS]
        self._forced: list[int] | None = parameters.get(FORCED)
        self._rows = None if self._forced is None else open_memmap(self._path, mode="r")
        self._step = 0

    def __call__(self, logits: torch.Tensor, evictions: int) -> None:
        """Take note of the logits ``[V]`` of the next step; where tokens are forced, change them in place.

        Under overlap scheduling one more step may come after the last; it is left alone.
        """
        step, self._step = self._step, self._step + 1
        if step >= len(self._table):
            return
        log_probs = logits.float().log_softmax(-1)
        divergence = 0.0
        if self._forced is None:
            if self._rows is None:
                self._rows = open_memmap(self._path, mode="w+", dtype=np.float32, shape=(len(self._table), len(logits)))
            self._rows[step] = log_probs.cpu().numpy()
        else:
            assert self._rows is not None
            divergence = kl(torch.from_numpy(self._rows[step].copy()).to(logits.device), log_probs)
        self._table[step] = divergence, int(logits.argmax()), evictions
        if self._forced is not None:
            logits.fill_(-torch.inf)
            logits[self._forced[step]] = 0.0


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Exact KL(reference || other) in nats of two rows of log-probabilities."""
    return float((reference.exp() * (reference - other)).sum(dtype=torch.float64))


def observe(logits: torch.Tensor, parameters: Sequence[dict[str, Any]], evictions: Sequence[int]) -> torch.Tensor:
    """What the logit processor does: every row to the observer of its request."""
    for row, own, count in zip(logits, parameters, evictions, strict=True):
        if OBSERVER not in own:
            own[OBSERVER] = Observer(own)
        own[OBSERVER](row, count)
    return logits
