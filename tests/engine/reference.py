"""Slow oracle for decode-time KV-cache eviction, sharing nothing with the code under test."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

Score = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``score(eviction, layer, keys[H_kv, N, D], values[H_kv, N, D]) -> [H_kv, N]``, N in age order, fp32 inputs."""


@dataclass(frozen=True)
class Eviction:
    """One eviction round of one request.

    Attributes
    ----------
    true_len : int
        Tokens of the sequence whose K/V had been computed.
    resident : int
        Resident tokens per head before the round.
    kept : torch.Tensor
        int64 [n_layers, n_kv_heads, budget], token positions kept, ascending per head.
    scores : torch.Tensor
        fp32/64 [n_layers, n_kv_heads, resident] in resident order, +inf where forced (sinks, recent).
    resident_positions : torch.Tensor
        int64 [n_layers, n_kv_heads, resident], token positions before the round, ascending per head.
    """

    true_len: int
    resident: int
    kept: torch.Tensor
    scores: torch.Tensor
    resident_positions: torch.Tensor


@dataclass(frozen=True)
class ReferenceRun:
    """Greedy output ids, the top1 - top2 logit gap of each, and the eviction rounds in order."""

    tokens: list[int]
    margins: list[float]
    evictions: list[Eviction]


class _ResidentCache(Cache):
    """K/V [1, H_kv, N, D] and token positions [H_kv, N] per layer; N shrinks, `seen` does not."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.seen: list[int] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append post-RoPE K/V [1, H_kv, n, D] and return all resident K/V [1, H_kv, N + n, D]."""
        if layer_idx == len(self.seen):
            self.keys.append(key_states[:, :, :0])
            self.values.append(value_states[:, :, :0])
            self.positions.append(torch.empty(key_states.shape[1], 0, dtype=torch.int64, device=key_states.device))
            self.seen.append(0)
        start, stop = self.seen[layer_idx], self.seen[layer_idx] + key_states.shape[2]
        new_positions = torch.arange(start, stop, device=key_states.device).expand(key_states.shape[1], -1)
        self.keys[layer_idx] = torch.cat([self.keys[layer_idx], key_states], dim=2)
        self.values[layer_idx] = torch.cat([self.values[layer_idx], value_states], dim=2)
        self.positions[layer_idx] = torch.cat([self.positions[layer_idx], new_positions], dim=1)
        self.seen[layer_idx] = stop
        return self.keys[layer_idx], self.values[layer_idx]

    def keep(self, layer_idx: int, index: torch.Tensor) -> None:
        """Keep the resident tokens `index` [H_kv, K] of each head, in that order."""
        rows = index[None, :, :, None].expand(-1, -1, -1, self.keys[layer_idx].shape[3])
        self.keys[layer_idx] = self.keys[layer_idx].gather(2, rows)
        self.values[layer_idx] = self.values[layer_idx].gather(2, rows)
        self.positions[layer_idx] = self.positions[layer_idx].gather(1, index)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the true sequence length, evicted tokens included."""
        return self.seen[layer_idx] if self.seen else 0

    def resident_length(self) -> int:
        """Return the resident tokens per head, the same in every layer."""
        return self.positions[0].shape[1] if self.positions else 0


def _forward(model: PreTrainedModel, cache: _ResidentCache, ids: list[int]) -> torch.Tensor:
    """Run `ids` at their true positions; a query sees every resident token and is causal within `ids`. [vocab]."""
    device, n_new, true_len, resident = model.device, len(ids), cache.get_seq_length(), cache.resident_length()
    blocked = torch.full((n_new, n_new), torch.finfo(model.dtype).min, dtype=model.dtype, device=device).triu(1)
    # A 4D mask is used by transformers as given, so it never derives one from the cache's lengths.
    mask = torch.cat([blocked.new_zeros(n_new, resident), blocked], dim=1)[None, None]
    out = model(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.arange(true_len, true_len + n_new, device=device)[None],
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    )
    return torch.as_tensor(out.logits[0, -1]).float()


def _evict(cache: _ResidentCache, eviction: int, budget: int, recent: int, sinks: int, score: Score) -> Eviction:
    """Cut every head of every layer to `budget` tokens; equal scores prefer the older token."""
    rows = []
    resident = cache.resident_length()
    for layer in range(len(cache.keys)):
        positions = cache.positions[layer]
        scores = score(eviction, layer, cache.keys[layer][0].float(), cache.values[layer][0].float()).clone()
        if scores.shape != positions.shape:
            raise ValueError(f"score returned {tuple(scores.shape)}, expected {tuple(positions.shape)}")
        middle = scores[:, sinks : resident - recent]
        if middle.isnan().any():
            raise ValueError(f"NaN score at eviction {eviction}, layer {layer}")
        order = middle.argsort(dim=1, descending=True, stable=True)[:, : budget - sinks - recent] + sinks
        forced = torch.cat([torch.arange(sinks), torch.arange(resident - recent, resident)]).to(order)
        index = torch.cat([order, forced.expand(len(order), -1)], dim=1).sort(dim=1).values
        scores[:, forced] = torch.inf
        cache.keep(layer, index)
        rows.append((cache.positions[layer], scores, positions))
    return Eviction(cache.get_seq_length(), resident, *(torch.stack(column) for column in zip(*rows, strict=True)))


@torch.no_grad()
def run(
    model: PreTrainedModel,
    input_ids: list[int],
    *,
    max_new_tokens: int,
    budget: int,
    period: int,
    recent: int,
    sinks: int,
    score: Score | None,
    stop_ids: Collection[int] = (),
    first_eligible_step: int = 1,
) -> ReferenceRun:
    """Decode greedily after a dense prefill, evicting whenever ``budget + period`` tokens are resident.

    Parameters
    ----------
    model : PreTrainedModel
        Qwen3, Qwen2 or Llama for causal LM, every layer with full attention.
    input_ids : list of int
        The prompt; nothing of it is evicted during prefill.
    max_new_tokens : int
        Upper bound on the output length, the prefill's token included.
    budget, period : int
        A round runs before a decode step with at least ``budget + period`` resident tokens and leaves `budget`.
    recent, sinks : int
        Newest and oldest resident tokens that are always kept; both count towards `budget`.
    score : Score or None
        Larger is kept. None never evicts.
    stop_ids : collection of int
        Output stops after, and includes, the first of these.
    first_eligible_step : int
        First decode step that may be preceded by a round; step 0 consumes the first output token.
    """
    if not input_ids or max_new_tokens < 1 or period < 1 or recent < 0 or sinks < 0 or recent + sinks > budget:
        raise ValueError("need a prompt, max_new_tokens >= 1, period >= 1 and 0 <= recent + sinks <= budget")
    if set(getattr(model.config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise ValueError("only full attention layers are supported")
    cache = _ResidentCache()
    result = ReferenceRun([], [], [])
    logits = _forward(model, cache, input_ids)
    for step in range(max_new_tokens):
        best = logits.topk(2)
        result.tokens.append(int(best.indices[0]))
        result.margins.append(float(best.values[0] - best.values[1]))
        if result.tokens[-1] in stop_ids or step == max_new_tokens - 1:
            break
        if score is not None and step >= first_eligible_step and cache.resident_length() >= budget + period:
            result.evictions.append(_evict(cache, len(result.evictions), budget, recent, sinks, score))
        logits = _forward(model, cache, result.tokens[-1:])
    return result


def _normalised(scores: torch.Tensor, recent: int) -> torch.Tensor:
    """Divide candidate scores [H_kv, N - recent] by their sum and append +inf for `recent` tokens: [H_kv, N]."""
    scores = scores / scores.sum(dim=1, keepdim=True)
    return torch.cat([scores, scores.new_full((len(scores), recent), torch.inf)], dim=1)


def vase_dkv_score(projection: Callable[[int, int], torch.Tensor], *, recent: int = 0) -> Score:
    """VaSE-DKV: product of squared norms of K G and V G, G = ``projection(eviction, layer)`` [D, r], for all heads.

    Normalised over all but the newest `recent` tokens. The official code then sets the four oldest to 1, above any
    other score; here `run` forces its `sinks` instead.
    """

    def score(eviction: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        n, g = keys.shape[1] - recent, projection(eviction, layer).to(keys)
        return _normalised((keys[:, :n] @ g).square().sum(2) * (values[:, :n] @ g).square().sum(2), recent)

    return score


def curdkv_score(projection: Callable[[int], torch.Tensor], *, recent: int = 0) -> Score:
    """Score as `vase_dkv_score` with one projection [D, r] per layer for the whole run (VaSE's CurDKV baseline)."""
    return vase_dkv_score(lambda _eviction, layer: projection(layer), recent=recent)


def curdkv_windowed_score(window: int = 16, combine: str = "kv_product", *, recent: int = 0) -> Score:
    """Score as kvpress CURPress: squared norms as shares of their window of `window` tokens, K and V combined.

    Windows tile all but the newest `recent` tokens, oldest first; the last may be partial, with larger shares.
    `combine` is kv_product, kv_avg, key or value.
    """

    def shares(x: torch.Tensor) -> torch.Tensor:
        norms = x.square().sum(2)
        parts = [norms[:, i : i + window] for i in range(0, norms.shape[1], window)]
        return torch.cat([part / part.sum(1, keepdim=True) for part in parts], dim=1)

    def score(eviction: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        n = keys.shape[1] - recent
        k2, v2 = shares(keys[:, :n]), shares(values[:, :n])
        options = {"kv_product": k2 * v2, "kv_avg": (k2 + v2) / 2, "key": k2, "value": v2}
        return _normalised(options[combine], recent)

    return score
