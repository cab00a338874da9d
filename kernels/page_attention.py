"""Attention of one new token over the pages that each head chose, gathered from the pool."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def tokens_of_pages(pages: torch.Tensor, page: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens in the chosen `pages` (bool ``[H, P]``) of a row of `length` tokens.

    Heads that chose equally many tokens come together: each pair is int64 heads ``[h]`` and their tokens ``[h, R]``,
    ascending. Every head is in exactly one pair, and no token is there that was not chosen.
    """
    assert (pages.shape[1] - 1) * page < length <= pages.shape[1] * page, f"{pages.shape = } for {length = }, {page = }"
    sizes = torch.full((pages.shape[1],), page, device=pages.device)
    sizes[-1] = length - (pages.shape[1] - 1) * page
    counts = (pages * sizes).sum(dim=1)
    within = torch.arange(page, device=pages.device)
    groups = []
    for count in sorted(set(counts.tolist())):
        heads = (counts == count).nonzero()[:, 0]
        chosen = pages[heads].nonzero()[:, 1].view(len(heads), -(-count // page), 1)
        # An incomplete page is the newest, so what it lacks is at the end.
        groups.append((heads, (chosen * page + within).flatten(1)[:, :count]))
    return groups


def page_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    page: int,
    scaling: float,
) -> tuple[torch.Tensor, float]:
    """Attention over the chosen pages, and how many tokens a head read in the mean. No other row is touched.

    Parameters
    ----------
    query : ``[H_q, D]``
    keys, values : ``[S, H_kv, D]`` and ``[S, H_kv, D_v]``, one layer's pools
    slots : int64 ``[N]``
        The request's slots, oldest token first.
    pages : bool ``[H, P]``, at least one per row
        ``H = H_q``: each query head has its own; ``H = H_kv``: the query heads of a group share them.
    scaling : factor of q·k

    Returns
    -------
    ``[H_q, D_v]`` in the dtype of `query`, and tokens per row of `pages`.
    """
    kv_heads, choices = keys.shape[1], len(pages)
    grouped = query.view(choices, -1, query.shape[-1])  # the query heads that share a choice
    output = query.new_empty(*grouped.shape[:2], values.shape[-1])
    read = 0
    for heads, tokens in tokens_of_pages(pages, page, len(slots)):
        rows = slots[tokens] * kv_heads + (heads * kv_heads // choices)[:, None]
        chosen_keys, chosen_values = (
            pool.flatten(0, 1).index_select(0, rows.flatten()).view(1, *rows.shape, -1).to(query.dtype)
            for pool in (keys, values)
        )
        output[heads] = scaled_dot_product_attention(grouped[heads][None], chosen_keys, chosen_values, scale=scaling)[0]
        read += rows.numel()
    return output.flatten(0, 1), read / choices
