"""The published scores, written from their formulas, for `reference.run`.

Candidates are the resident tokens without the newest `recent`; N resident tokens, N_c candidates, D dimensions of a
head, G query heads per KV head. A factory that knows `recent` returns a `Score` that is +inf at those tokens.
"""

import math
from collections.abc import Callable

import torch
from reference import Score, Scored
from torch import Tensor
from torch.nn import functional

Noise = Callable[[int, int, int, int], Tensor]
"""``noise(eviction, layer, n_heads, n_tokens) -> [n_heads, n_tokens]``, fp64, uniform in (0, 1)."""

MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "range": lambda v: v.amax(dim=2) - v.amin(dim=2),
    "variance": lambda v: (v - v.mean(dim=2, keepdim=True)).square().mean(dim=2),
    "l2": lambda v: v.square().sum(dim=2).sqrt(),
}
"""What a value [H_kv, N, D] measures, [H_kv, N]; the variance is the population's."""

NEARLY_EQUAL = 1e-5
"""Relative difference below which two measures count as tied."""

SNAPKV_POOLING = {"vase": (5, "avg"), "rkv": (7, "max"), "kvpress": (5, "avg")}
"""Published kernel and pooling of each variant of SnapKV."""


def _with_recent(scores: Tensor, recent: int) -> Tensor:
    """Append +inf for the newest `recent` tokens to candidate scores [H_kv, N_c]: [H_kv, N]."""
    return torch.cat([scores, scores.new_full((len(scores), recent), torch.inf)], dim=1)


def _normalised(scores: Tensor, recent: int) -> Tensor:
    """Divide candidate scores [H_kv, N_c] by their sum and append +inf for `recent` tokens: [H_kv, N]."""
    return _with_recent(scores / scores.sum(dim=1, keepdim=True), recent)


def _numbers(noise: Noise | None, eviction: int, layer: int, like: Tensor) -> Tensor:
    """Random numbers, one for each element of `like` [H_kv, N], fp64 on its device."""
    if noise is None:
        raise ValueError("this score needs random numbers")
    numbers = noise(eviction, layer, *like.shape)
    if numbers.shape != like.shape or numbers.dtype != torch.float64:
        raise ValueError(f"noise returned {numbers.dtype} {tuple(numbers.shape)}, expected fp64 {tuple(like.shape)}")
    return numbers.to(like.device)


def _pooled(x: Tensor, kernel: int, pooling: str) -> Tensor:
    """Pool [H_kv, N_c] or [H_kv, G, N_c] over candidates with stride 1; an average counts zeros beyond both ends."""
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd, got {kernel}")
    if pooling == "avg":
        return functional.avg_pool1d(x, kernel, stride=1, padding=kernel // 2, count_include_pad=True)
    if pooling == "max":
        return functional.max_pool1d(x, kernel, stride=1, padding=kernel // 2)
    if pooling == "none":
        return x
    raise ValueError(f"unknown pooling {pooling}")


def _window_logits(queries: Tensor, keys: Tensor, window: int, recent: int, temperature: float = 1.0) -> Tensor:
    """q·k / (sqrt(D) temperature) of the newest `window` of queries [H_q, n_seen, D]: [H_kv, G, window, N]."""
    if not 1 <= window <= min(recent, queries.shape[1]):
        raise ValueError(f"need 1 <= window <= recent and as many queries, got {window=}, {recent=}")
    grouped = queries[:, -window:].unflatten(0, (len(keys), -1))
    return torch.einsum("hgwd,hnd->hgwn", grouped, keys) / (math.sqrt(keys.shape[2]) * temperature)


def _vase_attention(
    queries: Tensor,
    keys: Tensor,
    *,
    window: int,
    recent: int,
    kernel: int,
    pooling: str,
    temperature: float = 1.0,
) -> Tensor:
    """Window attention among the candidates alone, pooled per query head, averaged per KV head: [H_kv, N_c].

    No causal mask: with window <= recent every window query is newer than every candidate.
    """
    candidates = keys[:, : keys.shape[1] - recent]
    logits = _window_logits(queries, candidates, window, recent, temperature)
    return _pooled(logits.softmax(dim=3).mean(dim=2), kernel, pooling).mean(dim=1)


def _reserved(measure: Tensor, n_reserve: int, sinks: int) -> tuple[Tensor, Tensor]:
    """The first `sinks` and the largest others of measure [H_kv, N_c], `n_reserve` in all; older wins ties.

    A mask [H_kv, N_c], and whether the last one in and the first one out are nearly equal [H_kv]: a token that
    occurs twice has the same value twice in the first layer, but for rounding.
    """
    if not sinks <= n_reserve <= measure.shape[1]:
        raise ValueError(f"need sinks <= n_reserve <= candidates, got {sinks=}, {n_reserve=}, {measure.shape[1]}")
    measure = measure.clone()
    measure[:, :sinks] = torch.inf
    order = measure.argsort(dim=1, descending=True, stable=True)
    tied = torch.zeros(len(measure), dtype=torch.bool)
    if sinks < n_reserve < measure.shape[1]:
        inside, outside = (measure.gather(1, order[:, i : i + 1])[:, 0] for i in (n_reserve - 1, n_reserve))
        tied = (inside - outside) < NEARLY_EQUAL * inside
    return torch.zeros_like(measure, dtype=torch.bool).scatter(1, order[:, :n_reserve], True), tied


def vase_attnv_score(
    budget: int,
    window: int,
    recent: int,
    sinks: int,
    n_reserve: int,
    reserve: str,
    *,
    sample: bool,
    uniform: Noise | None = None,
    reserve_uniform: Noise | None = None,
    kernel: int = 5,
    pooling: str = "avg",
    temperature: float = 1.0,
) -> Score:
    """VaSE-AttnV (arXiv 2606.03928): keep outlying values, draw the rest by attention without replacement.

    Reserved tokens score +inf, the others score their key, so that the ``budget - recent - reserved`` highest are the
    drawn ones.

    Parameters
    ----------
    budget, recent, sinks : int
        As given to `reference.run`.
    window : int
        Newest queries whose attention counts; at most `recent`.
    n_reserve, reserve : int, str
        Candidates kept for their value, the sinks among them: those of largest range, variance or l2 (`MEASURES`), or
        of largest `reserve_uniform` (random). "off" reserves the sinks alone.
    sample : bool
        Key a / -log(uniform) in fp64: an exponential race, that is successive sampling without replacement
        proportional to attention a; False takes a itself.
    """

    if reserve not in (*MEASURES, "random", "off"):
        raise ValueError(f"unknown reserve {reserve}")

    def score(eviction: int, layer: int, keys: Tensor, values: Tensor, queries: Tensor) -> Scored:
        attention = _vase_attention(
            queries, keys, window=window, recent=recent, kernel=kernel, pooling=pooling, temperature=temperature
        )
        if reserve == "off":
            reserved, tied = _reserved(attention, sinks, sinks)
        elif reserve == "random":
            reserved, tied = _reserved(_numbers(reserve_uniform, eviction, layer, attention), n_reserve, sinks)
        else:
            reserved, tied = _reserved(MEASURES[reserve](values[:, : attention.shape[1]]), n_reserve, sinks)
        drawn = budget - recent - int(reserved[0].sum())
        if drawn < 0:
            raise ValueError(f"a budget of {budget} has no room for the reserved and the {recent} recent tokens")
        if sample:
            arrival = -_numbers(uniform, eviction, layer, attention).log()  # exponential; log(1 / arrival) is Gumbel
            key = attention.double().clamp(min=1e-300) / arrival
        else:
            key = attention
        return _with_recent(key.masked_fill(reserved, torch.inf), recent), tied

    return score


def snapkv_score(
    variant: str, window: int, recent: int | None = None, kernel: int | None = None, pooling: str | None = None
) -> Score:
    """SnapKV: attention of the newest `window` queries, pooled over candidates, one score per KV head.

    Parameters
    ----------
    variant : str
        vase: softmax over candidates per query head, pooled, mean over the group.
        rkv: the group's largest logit, softmax over candidates, then pooled.
        kvpress: softmax over all resident keys, causal within the window, pooled over candidates, mean over the group.
    window, recent : int
        ``window <= recent``; `recent` is the window by default.
    kernel, pooling : int, str
        `SNAPKV_POOLING` by default.
    """
    recent = window if recent is None else recent
    published = SNAPKV_POOLING[variant]
    kernel, pooling = kernel or published[0], pooling or published[1]

    def score(eviction: int, layer: int, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        n = keys.shape[1] - recent
        if variant == "vase":
            attention = _vase_attention(queries, keys, window=window, recent=recent, kernel=kernel, pooling=pooling)
        elif variant == "rkv":
            logits = _window_logits(queries, keys[:, :n], window, recent).amax(dim=1)
            attention = _pooled(logits.softmax(dim=2).mean(dim=1), kernel, pooling)
        else:
            logits = _window_logits(queries, keys, window, recent)
            later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
            logits[..., -window:] = logits[..., -window:].masked_fill(later, -torch.inf)
            attention = _pooled(logits.softmax(dim=3).mean(dim=2)[..., :n], kernel, pooling).mean(dim=1)
        return _with_recent(attention, recent)

    return score


def value_measure_score(measure: str, sign: int) -> Score:
    """Range, variance or l2 of the value of every resident token; sign +1 keeps the large ones, -1 the small ones."""
    if measure not in MEASURES or sign not in (1, -1):
        raise ValueError(f"need a measure of {list(MEASURES)} and a sign of 1 or -1, got {measure}, {sign}")
    return lambda eviction, layer, keys, values, queries: sign * MEASURES[measure](values)


def random_score(uniform: Noise) -> Score:
    """Score of every resident token: a random number of its place in the row."""
    return lambda eviction, layer, keys, values, queries: _numbers(uniform, eviction, layer, keys[:, :, 0])


def vase_dkv_score(projection: Callable[[int, int], Tensor], *, recent: int = 0) -> Score:
    """VaSE-DKV: product of squared norms of K G and V G, G = ``projection(eviction, layer)`` [D, r], for all heads.

    Normalised over all but the newest `recent` tokens. The official code then sets the four oldest to 1, above any
    other score; here `run` forces its `sinks` instead.
    """

    def score(eviction: int, layer: int, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        n, g = keys.shape[1] - recent, projection(eviction, layer).to(keys)
        return _normalised((keys[:, :n] @ g).square().sum(2) * (values[:, :n] @ g).square().sum(2), recent)

    return score


def curdkv_score(projection: Callable[[int], Tensor], *, recent: int = 0) -> Score:
    """Score as `vase_dkv_score` with one projection [D, r] per layer for the whole run (VaSE's CurDKV baseline)."""
    return vase_dkv_score(lambda _eviction, layer: projection(layer), recent=recent)


def curdkv_windowed_score(window: int = 16, combine: str = "kv_product", *, recent: int = 0) -> Score:
    """Score as kvpress CURPress: squared norms as shares of their window of `window` tokens, K and V combined.

    Windows tile all but the newest `recent` tokens, oldest first; the last may be partial, with larger shares.
    `combine` is kv_product, kv_avg, key or value.
    """

    def shares(x: Tensor) -> Tensor:
        norms = x.square().sum(2)
        parts = [norms[:, i : i + window] for i in range(0, norms.shape[1], window)]
        return torch.cat([part / part.sum(1, keepdim=True) for part in parts], dim=1)

    def score(eviction: int, layer: int, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        n = keys.shape[1] - recent
        k2, v2 = shares(keys[:, :n]), shares(values[:, :n])
        options = {"kv_product": k2 * v2, "kv_avg": (k2 + v2) / 2, "key": k2, "value": v2}
        return _normalised(options[combine], recent)

    return score
