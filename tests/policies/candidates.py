"""Random keys, values and queries, as unequal as in real caches: tokens differ clearly in norm and in attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvpolicy.policies.base import Candidates


def random_candidates(
    layers: int,
    heads: int,
    tokens: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    group: int = 2,
    queries: int = 0,
    bands: int = 0,
    alike: bool = True,
) -> Candidates:
    """Gaussian rows, each token scaled by a log-normal factor, each channel by another.

    With `queries` the newest so many have their query, in each of `group` query heads per KV head. The queries of a
    query head have a direction in common and lean towards one key, so that they agree on which tokens matter: logits
    have a standard deviation of about 2. Keys and values do not depend on `queries`.

    A quarter of the tokens are of the prompt. From prompt and text tokens were evicted before, in all heads equally
    many; the same ones if the heads are `alike`. With `bands` as many have their changes of the hidden state.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        x = torch.randn(layers, heads, tokens, head_dim, generator=generator)
        token_scale = torch.randn(layers, heads, tokens, 1, generator=generator).mul(0.5).exp()
        channel_scale = torch.randn(layers, heads, 1, head_dim, generator=generator).mul(0.5).exp()
        return (x * token_scale * channel_scale).to(dtype)

    def draw_queries(keys: torch.Tensor) -> torch.Tensor:
        towards = keys[:, :, torch.randint(tokens, (group,), generator=generator)].flatten(1, 2)[:, :, None].float()
        common = torch.randn(layers, heads * group, 1, head_dim, generator=generator)
        own = torch.randn(layers, heads * group, queries, head_dim, generator=generator)
        return (common + 0.5 * own + 0.2 * towards).to(dtype)

    def subsets(first: int, last: int, count: int) -> torch.Tensor:
        """``[L, H, count]``: some of ``first .. last - 1``, ascending."""
        drawn = torch.rand((1, 1, last - first) if alike else (layers, heads, last - first), generator=generator)
        return first + drawn.argsort(dim=-1)[..., :count].sort(dim=-1).values.expand(layers, heads, count)

    keys, values = draw(), draw()
    drawn_queries = draw_queries(keys) if queries else None
    of_prompt = tokens // 4
    decoded = tokens - of_prompt
    # The newest tokens, whose queries there may be, stand in a row.
    newest = min(max(queries, 1), decoded)
    prompt_len = max(1, of_prompt + of_prompt // 2)
    true_len = prompt_len + decoded + tokens // 2
    places = (
        subsets(0, prompt_len, of_prompt),
        subsets(prompt_len, true_len - newest, decoded - newest),
        torch.arange(true_len - newest, true_len).expand(layers, heads, -1),
    )
    return Candidates(
        (layers, heads, tokens),
        keys,
        values,
        drawn_queries,
        positions=torch.cat(places, dim=-1),
        hidden_change=torch.randn(bands, true_len - prompt_len, generator=generator).exp() if bands else None,
        prompt_len=prompt_len,
        true_len=true_len,
        previous_len=true_len - newest,
    )


def part_of(
    candidates: Candidates,
    *,
    layers: slice = slice(None),
    heads: slice = slice(None),
    tokens: slice = slice(None),
) -> Candidates:
    """Some of the layers, as a round may be given them; of the KV heads, as a rank has them; or of the tokens.

    The queries are those of these layers and heads, all of them; lengths stay as they are.
    """
    layer_count, head_count, token_count = torch.empty(candidates.shape, device="meta")[layers, heads, tokens].shape
    first, last, _ = heads.indices(candidates.shape[1])

    def cut(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[layers, heads, tokens]

    queries = candidates.queries
    if queries is not None:
        group = queries.shape[1] // candidates.shape[1]
        queries = queries[layers, first * group : last * group]
    return replace(
        candidates,
        shape=(layer_count, head_count, token_count),
        keys=cut(candidates.keys),
        values=cut(candidates.values),
        queries=queries,
        positions=cut(candidates.positions),
        statistic=cut(candidates.statistic),
    )
