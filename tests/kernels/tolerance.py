"""One tolerance for all kernels."""

from __future__ import annotations

import torch

# Kernels widen their inputs exactly and compute in fp32, so a result in fp32 differs from its reference only by the
# order of sums of a few hundred terms and by what tensor cores drop of a product, whatever the dtype of the cache was.
# One that is rounded to a shorter dtype at the end may fall on the other side: one unit in its last place.
RELATIVE = {torch.float64: 2.0**-16, torch.float32: 2.0**-16, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Where a sum cancels, its error is that of its terms, of which tests draw some of order 1.
ABSOLUTE = 2.0**-20


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """`actual` has the shape of `expected`, the same NaNs and infinities, and numbers that differ by rounding.

    dtype : of the shortest float that `actual` was rounded to on its way; that of its inputs does not matter.
    """
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} must be {tuple(expected.shape)}"
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=RELATIVE[dtype], atol=ABSOLUTE, equal_nan=True
    )
