"""Random numbers, and keys of weighted sampling, for the rows of several requests in one launch.

Each number belongs to one (seed, eviction, layer, head, index in the request's row, stream) and to nothing else: which
other requests are in the launch, and in which order, does not matter.
"""

from __future__ import annotations

import torch

from kvpolicy.kernels.keyed_noise import uniform
from kvpolicy.kernels.paged import Rows
from kvpolicy.kernels.weighted_sample import SMALLEST_WEIGHT, gumbel_keys

# Tokens of a program: two in each thread of 8 warps, whose chains of 64-bit products and fp64 logarithms overlap.
BLOCK, WARPS = 512, 8


def uniform_paged_reference(
    rows: Rows,
    seeds: torch.Tensor,
    evictions: torch.Tensor,
    layers: tuple[int, ...],
    heads: int,
    first_head: int = 0,
    stream: int = 0,
) -> torch.Tensor:
    """The same as :func:`uniform_paged`, request by request."""
    device = seeds.device
    layer = torch.tensor(layers, dtype=torch.int64, device=device)[:, None, None]
    head = torch.arange(first_head, first_head + heads, device=device)[:, None]
    last = torch.tensor(stream, device=device)
    drawn = [
        uniform(seed, eviction, layer, head, torch.arange(tokens, device=device), last)
        for seed, eviction, tokens in zip(seeds, evictions, rows.lengths, strict=True)
    ]
    return torch.cat(drawn, dim=-1)


def uniform_paged(
    rows: Rows,
    seeds: torch.Tensor,
    evictions: torch.Tensor,
    layers: tuple[int, ...],
    heads: int,
    first_head: int = 0,
    stream: int = 0,
) -> torch.Tensor:
    """Uniform numbers in (0, 1) for every token of every request, layer and head: fp64 ``[L, heads, T]``.

    Bit for bit those of ``Noise(seed, eviction, layers, first_head=first_head).uniform(heads, N, stream=stream)`` for
    each request alone, on any device: integer arithmetic modulo 2**64, then two exact steps in fp64.

    Parameters
    ----------
    rows : T tokens in all
        Its slots are not read.
    seeds, evictions : int64 ``[R]``, of each request
    layers : ids of the L layers
    heads : KV heads, of which `first_head` is the first one's id in the whole model
    stream : each stream is independent of the others
    """
    return _launch(None, rows, seeds, evictions, layers, heads, first_head, stream)


def gumbel_keys_paged_reference(
    weights: torch.Tensor,
    rows: Rows,
    seeds: torch.Tensor,
    evictions: torch.Tensor,
    layers: tuple[int, ...],
    first_head: int = 0,
    stream: int = 0,
) -> torch.Tensor:
    """The same as :func:`gumbel_keys_paged`, out of the operations on single requests."""
    drawn = uniform_paged_reference(
        rows, seeds, evictions, layers, weights.shape[1], first_head=first_head, stream=stream
    )
    return gumbel_keys(weights, drawn)


def gumbel_keys_paged(
    weights: torch.Tensor,
    rows: Rows,
    seeds: torch.Tensor,
    evictions: torch.Tensor,
    layers: tuple[int, ...],
    first_head: int = 0,
    stream: int = 0,
) -> torch.Tensor:
    """``log w - log(-log u)`` with the `u` of :func:`uniform_paged`: fp64 ``[L, H, T]``.

    The highest n keys of a request's row are n draws without replacement in proportion to its weights, as
    :func:`kvpolicy.kernels.weighted_sample.weighted_sample` draws them. `u` is the same bit for bit on any device; a
    logarithm in fp64 may differ between devices, and from PyTorch's, in its last bits, so that two samples differ
    only where two keys agree to some 15 digits.

    Parameters
    ----------
    weights : fp32 ``[L, H, T]``, not negative
        Any strides of layers and heads, 0 included; tokens adjacent. What is below `SMALLEST_WEIGHT`, zeros foremost,
        counts as `SMALLEST_WEIGHT`: drawn only once no positive weight is left. NaN gives NaN.
    rows, seeds, evictions, layers, first_head, stream : as of :func:`uniform_paged`
    """
    assert weights.dtype == torch.float32, f"{weights.dtype = } must be float32"
    assert weights.dim() == 3, f"{weights.shape = } must be [L, H, T]"
    found, wanted = (weights.shape[0], weights.shape[2], weights.device), (len(layers), rows.total, seeds.device)
    assert found == wanted, f"layers, tokens and device of weights {found} must be {wanted}"
    assert weights.stride(-1) == 1 or rows.total <= 1, f"{weights.stride() = }: tokens must be adjacent"
    return _launch(weights, rows, seeds, evictions, layers, weights.shape[1], first_head, stream)


def _launch(
    weights: torch.Tensor | None,
    rows: Rows,
    seeds: torch.Tensor,
    evictions: torch.Tensor,
    layers: tuple[int, ...],
    heads: int,
    first_head: int,
    stream: int,
) -> torch.Tensor:
    from kvpolicy.kernels.gumbel_keys_paged_kernel import _gumbel_keys_kernel  # Triton is imported where it is used

    requests, device = len(rows.lengths), seeds.device
    for given in (seeds, evictions):
        assert given.dtype == torch.int64, f"{given.dtype = } of seeds and evictions must be int64"
        assert given.shape == (requests,), f"{given.shape = } of seeds and evictions must be {(requests,)}"
        assert given.is_contiguous(), f"{given.stride() = } of seeds and evictions must be (1,)"
    assert rows.starts.device == evictions.device == device, "rows, seeds and evictions must be on one device"
    assert requests < 2**16, f"{requests = } must be below 65536"
    assert len(layers) * heads < 2**16, f"{len(layers) * heads = } must be below 65536"
    keys = torch.empty(len(layers), heads, rows.total, dtype=torch.float64, device=device)
    if keys.numel() == 0:
        return keys
    layer_ids = torch.tensor(layers, dtype=torch.int64).to(device, non_blocking=True)
    strides = (0, 0) if weights is None else weights.stride()[:2]
    _gumbel_keys_kernel[-(-rows.longest // BLOCK), requests, len(layers) * heads](
        keys if weights is None else weights,
        rows.starts,
        seeds,
        evictions,
        layer_ids,
        keys,
        heads,
        rows.total,
        *strides,
        first_head,
        stream,
        SMALLEST=SMALLEST_WEIGHT,
        USE_WEIGHTS=weights is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return keys
