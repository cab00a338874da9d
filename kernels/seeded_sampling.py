"""Choose the next token of each request with random numbers that belong to that request alone."""

from __future__ import annotations

import torch

from kvpolicy.kernels.keyed_noise import uniform


def filtered_weights(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Set to zero what top-k, top-p and min-p exclude, with the rules of SGLang's PyTorch sampler.

    A row without filters is left as it is, so that it does not matter whether others of the batch have some.

    Tokens are ranked by a stable sort, so that of equally likely ones the lower id comes first
    whatever else is in the batch. A token is out if its rank is `top_ks` or more, if those before it
    add up to more than `top_ps`, or if it is less likely than `min_ps` times the first.

    Parameters
    ----------
    probs : ``[B, V]`` float
    top_ks, top_ps, min_ps : ``[B]``

    Returns
    -------
    ``[B, V]`` of the dtype of `probs`, not normalised.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    rank = torch.arange(probs.shape[-1], device=probs.device)
    # fp32 sums over a large vocabulary exceed 1, and a top-p of 1 is none.
    over = (before > top_ps[:, None]) & (top_ps < 1)[:, None]
    out = (rank >= top_ks[:, None]) | over | (ranked < min_ps[:, None] * ranked[:, :1])
    return torch.zeros_like(probs).scatter_(-1, order, ranked.masked_fill(out, 0))


def sample_tokens(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per request, drawn in proportion to its `weights`.

    An exponential race, which is the Gumbel trick without a logarithm: the largest of ``w / -log u``
    wins, with ``u`` keyed by (seed, position, token). So a request draws alike in any batch.

    Parameters
    ----------
    weights : ``[B, V]`` float, not negative, some positive
    seeds : int64 ``[B]``
    positions : ``[B]`` integer, of the tokens that are drawn from

    Returns
    -------
    int64 ``[B]``.
    """
    tokens = torch.arange(weights.shape[-1], device=weights.device)
    arrivals = -uniform(seeds[:, None], positions[:, None], tokens).log()
    return (weights.double() / arrivals).argmax(dim=-1)
