"""Value range per token of several requests, read from the paged buffers of all layers at once."""

from __future__ import annotations

import torch

from kvpolicy.kernels.compact import gather_layers
from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.value_range import value_range

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def value_range_paged_reference(values: Pool, rows: Rows) -> torch.Tensor:
    """The same, request by request, on values gathered from the buffers."""
    ranges = [value_range(gather_layers(values.buffers, row)) for row in rows.slots.split_with_sizes(rows.lengths)]
    return torch.cat(ranges, dim=-1)


def value_range_paged(values: Pool, rows: Rows) -> torch.Tensor:
    """``max_d v - min_d v`` of every token and KV head, in one launch.

    What :func:`kvpolicy.kernels.value_range.value_range` gives for each request, bit for bit; a token with a NaN
    among its channels has NaN. Nothing waits for the device.

    Parameters
    ----------
    values : ``[S, H, D]`` buffers of ``L`` layers, fp32, fp16 or bf16
    rows : the slots of the requests; a request may have none

    Returns
    -------
    fp32 ``[L, H, T]``, one request after the other.
    """
    layers, _, heads, head_dim = values.shape
    assert values.dtype in DTYPES, f"{values.dtype = } must be one of {DTYPES}"
    assert head_dim <= 1024, f"{head_dim = } must be at most 1024"
    assert all(buffer.data_ptr() % 16 == 0 for buffer in values.buffers), (
        "a buffer must begin at a multiple of 16 bytes"
    )
    assert rows.slots.dtype == torch.int64, f"{rows.slots.dtype = } must be int64"
    assert rows.slots.is_contiguous(), f"{rows.slots.stride() = } must be 1"
    assert rows.slots.device == values.device, f"{rows.slots.device = } must be {values.device = }"
    ranges = torch.empty(layers, heads, rows.total, dtype=torch.float32, device=values.device)
    if ranges.numel():
        from kvpolicy.kernels import value_range_paged_kernel  # needs Triton, which importing this file does not

        value_range_paged_kernel.launch(values, rows.slots, ranges)
    return ranges
