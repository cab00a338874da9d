"""Rows of low-bit codes in paged slots, read as numbers of the model's dtype."""

from __future__ import annotations

import torch

from kvpolicy.kernels.packed_buffer import PackedBuffer, assert_for_kernels


def unpack_rows_paged(buffer: PackedBuffer, slots: torch.Tensor) -> torch.Tensor:
    """What :meth:`PackedBuffer.read` gives, bit for bit, in one launch. Nothing waits for the device.

    Parameters
    ----------
    buffer : ``[S, H, D]``
    slots : int64 ``[n]``, not negative

    Returns
    -------
    ``[n, H, D]`` in the dtype of the buffer.
    """
    _, heads, head_dim = buffer.shape
    assert_for_kernels(buffer)
    assert slots.dtype == torch.int64, f"{slots.dtype = } must be int64"
    assert slots.is_contiguous(), f"{slots.stride() = } must be 1"
    assert slots.device == buffer.device, f"{slots.device = } must be {buffer.device = }"
    rows = torch.empty(len(slots), heads, head_dim, dtype=buffer.dtype, device=buffer.device)
    if rows.numel():
        from kvpolicy.kernels import unpack_rows_paged_kernel  # needs Triton, which importing this file does not

        unpack_rows_paged_kernel.launch(buffer, slots, rows)
    return rows
