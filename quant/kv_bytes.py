"""Byte accounting: what one resident token costs in the KV cache."""

from __future__ import annotations


def kv_bytes_per_token(n_layers: int, n_kv_heads: int, head_dim: int, bits_per_element: float) -> float:
    """Bytes that one token's keys and values take over all layers and KV heads.

    ``2 (K and V) * layers * KV heads * head_dim * bits / 8``; `bits_per_element` is 16 for
    bf16/fp16, 32 for fp32, and may be fractional for packed formats with scales.

    Raises
    ------
    ValueError
        If a size is not positive.
    """
    sizes = (n_layers, n_kv_heads, head_dim, bits_per_element)
    if any(size <= 0 for size in sizes):
        raise ValueError(f"layers, KV heads, head size and bits must be positive, got {sizes}")
    return 2 * n_layers * n_kv_heads * head_dim * bits_per_element / 8
