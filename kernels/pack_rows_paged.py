"""New rows of one layer's keys or values, packed straight into their paged slots."""

from __future__ import annotations

import torch

from kvpolicy.kernels.packed_buffer import PackedBuffer, assert_for_kernels


def pack_rows_paged(buffer: PackedBuffer, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """What :meth:`PackedBuffer.write` does, bit for bit, in one launch. Nothing waits for the device.

    Parameters
    ----------
    buffer : ``[S, H, D]``, written in place
        Codes, scale and minimum of each slot; and the protected row that its index names, if it names one.
    slots : int64 ``[n]``
        Distinct, for what two rows leave in one slot is a mixture of both; negative ones are skipped.
    rows : ``[n, H, D]`` in the dtype of the buffer
        Tokens and heads may lie any distance apart.
    """
    _, heads, head_dim = buffer.shape
    assert_for_kernels(buffer)
    assert slots.dtype == torch.int64, f"{slots.dtype = } must be int64"
    assert slots.is_contiguous(), f"{slots.stride() = } must be 1"
    assert rows.shape == (len(slots), heads, head_dim), f"{rows.shape = } must be {(len(slots), heads, head_dim)}"
    found, wanted = (rows.dtype, rows.device, slots.device), (buffer.dtype, buffer.device, buffer.device)
    assert found == wanted, f"rows and slots are {found}, must be {wanted} as the buffer"
    if rows.numel():
        from kvpolicy.kernels import pack_rows_paged_kernel  # needs Triton, which importing this file does not

        pack_rows_paged_kernel.launch(buffer, slots, rows if rows.stride(-1) == 1 else rows.contiguous())
