"""Bytes of one resident token, against sizes of models that can be worked out by hand."""

from __future__ import annotations

import pytest

from kvpolicy.quant.kv_bytes import kv_bytes_per_token


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "bits", "expected"),
    [
        pytest.param(36, 8, 128, 16, 144 * 1024, id="Qwen3-4B in bf16: 144 KiB"),
        pytest.param(40, 8, 128, 16, 160 * 1024, id="Qwen3-14B in bf16: 160 KiB"),
        pytest.param(30, 3, 64, 16, 23040, id="SmolLM2-135M in bf16"),
        pytest.param(30, 3, 64, 32, 46080, id="SmolLM2-135M in fp32"),
        pytest.param(1, 1, 1, 8, 2, id="one byte of key and one of value"),
        pytest.param(1, 1, 1, 3, 0.75, id="less than a byte"),
        pytest.param(36, 8, 128, 4, 36 * 1024, id="packed to 4 bits"),
        pytest.param(2, 2, 80, 4.5, 360, id="4 bits and half a bit of scale"),
    ],
)
def test_bytes_per_token(layers: int, heads: int, head_dim: int, bits: float, expected: float) -> None:
    assert kv_bytes_per_token(layers, heads, head_dim, bits) == expected


@pytest.mark.parametrize("position", range(4), ids=["layers", "heads", "head size", "bits"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_not_positive_are_refused(position: int, size: int) -> None:
    sizes = [4, 2, 64, 16]
    sizes[position] = size
    with pytest.raises(ValueError, match="must be positive"):
        kv_bytes_per_token(*sizes)
