"""What a changed cache does to the next-token distribution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

ROWS_AT_ONCE = 32  # fp64 copies of a vocabulary of 150 000 take 40 MB


class LogitsErrors(NamedTuple):
    """Over T positions.

    kl_mean, kl_p99 : ``KL(reference || changed)`` of the next-token distributions, in nats.
    top1_flips : share of positions whose most likely token is another one.
    nll_delta : mean negative log-likelihood of the targets, changed minus reference, in nats. It may be negative
        where KL is not small: it says what happened to the targets alone.
    """

    kl_mean: float
    kl_p99: float
    top1_flips: float
    nll_delta: float


def logits_errors(reference: torch.Tensor, changed: torch.Tensor, targets: torch.Tensor) -> LogitsErrors:
    """Of `changed` against `reference`, both ``[T, V]`` of any float dtype, in fp64; `targets` ``[T]``: true tokens.

    Raises
    ------
    ValueError
        If there is no position, or a logit is NaN or infinite: what excludes a token belongs behind the logits.
    """
    assert reference.shape == changed.shape, f"{reference.shape} must be {changed.shape}"
    assert targets.shape == reference.shape[:1], f"{targets.shape} must be {reference.shape[:1]}"
    if len(targets) == 0:
        raise ValueError("logits of at least one position are needed")
    kl, deltas = [], []
    for start in range(0, len(targets), ROWS_AT_ONCE):
        chunk = slice(start, start + ROWS_AT_ONCE)
        p, q = (_log_probabilities(logits[chunk]) for logits in (reference, changed))
        kl.append((p.exp() * (p - q)).sum(dim=-1))
        deltas.append((p - q).gather(-1, targets[chunk].long().unsqueeze(-1)).squeeze(-1))
    divergence = torch.cat(kl).cpu().numpy()
    flips = reference.argmax(dim=-1) != changed.argmax(dim=-1)
    return LogitsErrors(
        kl_mean=float(divergence.mean()),
        kl_p99=float(np.quantile(divergence, 0.99)),
        top1_flips=float(flips.double().mean()),
        nll_delta=float(torch.cat(deltas).mean()),
    )


def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    if not bool(logits.isfinite().all()):
        raise ValueError("logits must be finite numbers, and one is NaN or infinite")
    return logits.double().log_softmax(dim=-1)
