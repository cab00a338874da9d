"""What low-bit keys and values do to the output of attention."""

from __future__ import annotations

import torch


def attention_error(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    restored_keys: torch.Tensor,
    restored_values: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Relative Frobenius error of the attention output of each query head, over its queries.

    Parameters
    ----------
    queries : ``[H_q, w, D]``
        Of the newest `w` tokens, as they enter attention (after RoPE); any float dtype, computed in fp32.
    keys, values, restored_keys, restored_values : ``[H_kv, N, D]``
        Of all tokens; query head h reads KV head ``h // (H_q / H_kv)``.
    causal : bool
        Each query sees the tokens up to its own; else all.
    scale : float or None
        Of the logits; None: ``1 / sqrt(D)``.

    Returns
    -------
    fp32 ``[H_q]``; 0 where both outputs are 0.
    """
    exact = _output(queries, keys, values, causal, scale)
    changed = _output(queries, restored_keys, restored_values, causal, scale)
    noise, signal = ((x.square().sum(dim=(1, 2))).sqrt() for x in (changed - exact, exact))
    return torch.where(noise == 0, 0.0, noise / signal)


def _output(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """fp32 ``[H_q, w, D]``."""
    query_heads, window, head_dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    assert query_heads % kv_heads == 0, f"{query_heads} query heads do not share {kv_heads} KV heads evenly"
    assert window <= tokens, f"{window} queries of {tokens} tokens"
    grouped = queries.float().view(kv_heads, query_heads // kv_heads * window, head_dim)
    logits = grouped @ keys.float().transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
    logits = logits.view(query_heads, window, tokens)
    if causal:
        own = torch.arange(tokens - window, tokens, device=logits.device).unsqueeze(-1)
        logits = logits.masked_fill(torch.arange(tokens, device=logits.device) > own, -torch.inf)
    weights = logits.softmax(dim=-1).view(kv_heads, -1, tokens)
    return (weights @ values.float()).view(query_heads, window, head_dim)
