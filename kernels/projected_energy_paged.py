"""Projected key and value energy of several requests, read from the paged buffers of all layers at once."""

from __future__ import annotations

import torch

from kvpolicy.kernels.compact import gather_layers
from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.projected_energy import projected_energy

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What the shared memory of an H100 or H200 has room for.
LARGEST_HEAD_DIM = 256
LARGEST_RANK = 64


def projected_energy_paged_reference(keys: Pool, values: Pool, rows: Rows, projection: torch.Tensor) -> torch.Tensor:
    """The same, request by request, on keys and values gathered from the buffers."""
    each = zip(rows.slots.split_with_sizes(rows.lengths), projection, strict=True)
    energies = [
        projected_energy(gather_layers(keys.buffers, row), gather_layers(values.buffers, row), matrices)
        for row, matrices in each
    ]
    return torch.cat(energies, dim=-1)


def projected_energy_paged(keys: Pool, values: Pool, rows: Rows, projection: torch.Tensor) -> torch.Tensor:
    """``sum_r (k G)_r^2 * sum_r (v G)_r^2`` of every token and KV head, in one launch.

    What :func:`kvpolicy.kernels.projected_energy.projected_energy` gives for each request, but for rounding; infinities
    and NaNs are its own. Keys and values are read once, and nothing of them but the score is written. Nothing waits
    for the device.

    Parameters
    ----------
    keys, values : ``[S, H, D]`` buffers of ``L`` layers, fp32, fp16 or bf16
        Keys after RoPE.
    rows : the slots of the requests; a request may have none
    projection : fp32 ``[R, L, D, r]``
        One matrix per request and layer, shared by all KV heads and by keys and values; r and D are at most
        `LARGEST_RANK` and `LARGEST_HEAD_DIM`. An infinity in it may give NaN.

    Returns
    -------
    fp32 ``[L, H, T]``, one request after the other.
    """
    layers, _, heads, head_dim = keys.shape
    for pool in (keys, values):
        assert pool.shape == keys.shape, f"{pool.shape = } must be {keys.shape = }"
        assert pool.dtype in DTYPES, f"{pool.dtype = } must be one of {DTYPES}"
        assert pool.device == rows.slots.device, f"{pool.device = } must be {rows.slots.device = }"
        assert all(buffer.data_ptr() % 16 == 0 for buffer in pool.buffers), (
            "a buffer must begin at a multiple of 16 bytes"
        )
    assert keys.dtype == values.dtype, f"{keys.dtype = } must be {values.dtype = }"
    assert head_dim <= LARGEST_HEAD_DIM, f"{head_dim = } must be at most {LARGEST_HEAD_DIM}"
    assert rows.slots.dtype == rows.starts.dtype == torch.int64, f"{rows.slots.dtype, rows.starts.dtype} must be int64"
    assert rows.slots.is_contiguous(), f"{rows.slots.stride() = } must be 1"
    rank = projection.shape[-1]
    expected = (len(rows.lengths), layers, head_dim, rank)
    assert projection.shape == expected, f"{projection.shape = } must be {expected}"
    assert projection.dtype == torch.float32, f"{projection.dtype = } must be fp32"
    assert projection.device == keys.device, f"{projection.device = } must be {keys.device = }"
    assert projection.is_contiguous(), f"{projection.stride() = } must be those of a contiguous tensor"
    assert 1 <= rank <= LARGEST_RANK, f"{rank = } must be 1 to {LARGEST_RANK}"
    energies = torch.empty(layers, heads, rows.total, dtype=torch.float32, device=keys.device)
    if energies.numel():
        from kvpolicy.kernels import projected_energy_paged_kernel  # needs Triton, which importing this file does not

        projected_energy_paged_kernel.launch(keys, values, rows, projection, energies)
    return energies
