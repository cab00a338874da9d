"""How far restored rows are from what was stored: of a whole head, per token, and against position."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch


class RowErrors(NamedTuple):
    """Of rows ``[..., N, D]`` over all tokens and channels; each fp64 ``[...]``.

    mse : mean squared error.
    relative : Frobenius norm of the error over that of the rows; 0 where both are 0.
    sqnr_db : ``10 log10`` of the signal's energy over the error's; infinite where there is no error.
    max_abs : largest error.
    cosine : between all of a head's numbers before and after; 1 where both are 0, 0 where only one is.
    """

    mse: torch.Tensor
    relative: torch.Tensor
    sqnr_db: torch.Tensor
    max_abs: torch.Tensor
    cosine: torch.Tensor


class TailRatios(NamedTuple):
    """fp64 ``[...]``: how far the largest of N numbers lie above the median."""

    p99_to_p50: torch.Tensor
    max_to_p50: torch.Tensor


def row_errors(rows: torch.Tensor, restored: torch.Tensor) -> RowErrors:
    """Of `restored` against `rows`, both ``[..., N, D]`` of any float dtype, in fp64."""
    assert rows.shape == restored.shape, f"{rows.shape} must be {restored.shape}"
    before, after = rows.double().flatten(-2), restored.double().flatten(-2)
    error = after - before
    noise, signal, after_energy = (x.square().sum(dim=-1) for x in (error, before, after))
    exact = noise == 0
    norms = (signal * after_energy).sqrt()
    cosine = torch.where(norms > 0, (before * after).sum(dim=-1) / norms, exact.double())
    return RowErrors(
        mse=error.square().mean(dim=-1),
        relative=torch.where(exact, 0.0, (noise / signal).sqrt()),
        sqnr_db=torch.where(exact, torch.inf, 10 * (signal / noise).log10()),
        max_abs=error.abs().amax(dim=-1),
        cosine=cosine,
    )


def token_errors(rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """fp64 ``[..., N]``: squared error of each token, summed over its channels."""
    assert rows.shape == restored.shape, f"{rows.shape} must be {restored.shape}"
    return (restored.double() - rows.double()).square().sum(dim=-1)


def correlation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of two measures ``[..., N]`` of the tokens, fp64 ``[...]``.

    NaN where either is the same for all tokens: then it is undefined. Means over heads take ``nanmean``.
    """
    assert x.shape == y.shape, f"{x.shape} must be {y.shape}"
    x, y = x.double(), y.double()
    constant = (x == x[..., :1]).all(dim=-1) | (y == y[..., :1]).all(dim=-1)
    x, y = (z - z.mean(dim=-1, keepdim=True) for z in (x, y))
    norms = (x.square().sum(dim=-1) * y.square().sum(dim=-1)).sqrt()
    return torch.where(constant, torch.nan, ((x * y).sum(dim=-1) / norms).clamp(-1, 1))


def tail_ratios(ranges: torch.Tensor) -> TailRatios:
    """Of value ranges ``[..., N]``, which are not negative: 99th percentile and maximum over the median.

    Percentiles are interpolated linearly. Over a median of 0 a ratio is infinite, or 1 if its numerator is 0 too.
    """
    quantiles = np.quantile(ranges.double().cpu().numpy(), [0.5, 0.99, 1.0], axis=-1)
    median, p99, largest = (torch.from_numpy(np.asarray(quantile)) for quantile in quantiles)

    def to_median(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == median, 1.0, x / median)

    return TailRatios(to_median(p99), to_median(largest))


def error_share(errors: torch.Tensor, protected: torch.Tensor) -> torch.Tensor:
    """fp64 ``[...]``: the share of the squared errors ``[..., N]`` that `protected` tokens, bool ``[..., N]``, hold.

    0 where there is no error at all.
    """
    errors = errors.double()
    total = errors.sum(dim=-1)
    return torch.where(total == 0, 0.0, torch.where(protected, errors, 0.0).sum(dim=-1) / total)


def error_by_position(errors: torch.Tensor, bins: int) -> torch.Tensor:
    """fp64 ``[..., bins]``: mean of the tokens' squared errors ``[..., N]`` in `bins` stretches of the text.

    Stretch b holds tokens ``b * N // bins`` to ``(b + 1) * N // bins``: lengths differ by at most one.
    """
    tokens = errors.shape[-1]
    assert 1 <= bins <= tokens, f"{bins = } of {tokens} tokens"
    edges = [b * tokens // bins for b in range(bins + 1)]
    stretches = [errors[..., i:j].double().mean(dim=-1) for i, j in pairwise(edges)]
    return torch.stack(stretches, dim=-1)
