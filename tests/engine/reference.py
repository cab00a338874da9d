"""Slow oracle for decode-time KV-cache eviction, sharing nothing with the code under test."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from reference_rows import in_their_rows
from transformers import AttentionInterface, Cache, PreTrainedModel

from tests.policies.oracle import Method, Snapshot

Scored = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Score = Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor], Scored]
"""``score(eviction, layer, keys[H_kv, N, D], values[H_kv, N, D], queries[H_q, n_seen, D]) -> [H_kv, N]``.

A second result, bool [H_kv], may mark heads whose choice hinges on a near-tie that the scores do not show.

All inputs fp32. N counts resident tokens in the order of their rows; n_seen counts all computed so far, oldest first,
evicted ones too. Keys and queries are as they enter attention, after q/k norm and RoPE. Query head h reads
KV head h // (H_q / H_kv). Larger is kept, +inf always.
"""

NEAR = 1e-5
"""Margin, as a share of the spread of the scores, below which rounding may decide for an independent method."""

RECORDING = "reference_recording_sdpa"
"""Name in transformers' attention registry of `_recording_attention`."""


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
        fp32/64 [n_layers, n_kv_heads, resident] in resident order, +inf where forced (sinks, recent, reserved).
    resident_positions : torch.Tensor
        int64 [n_layers, n_kv_heads, resident], token positions before the round.
    tied : torch.Tensor
        bool [n_layers, n_kv_heads], heads whose choice hinges on a near-tie that the scores do not show.
    """

    true_len: int
    resident: int
    kept: torch.Tensor
    scores: torch.Tensor
    resident_positions: torch.Tensor
    tied: torch.Tensor


@dataclass(frozen=True)
class ReferenceRun:
    """Greedy output ids, the top1 - top2 logit gap of each, and the eviction rounds in order."""

    tokens: list[int]
    margins: list[float]
    evictions: list[Eviction]


class _ResidentCache(Cache):
    """K/V [1, H_kv, N, D] and token positions [H_kv, N] per layer; N shrinks, `seen` and the queries do not.

    Queries are the chunks [H_q, n, D] of each forward pass, per layer; hidden states [L, n, E] those of all layers.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.seen: list[int] = []
        self.queries: list[list[torch.Tensor]] = []
        self.hidden: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append post-RoPE K/V [1, H_kv, n, D] and return all resident K/V [1, H_kv, N + n, D]."""
        if layer_idx == len(self.seen):
            self.keys.append(key_states[:, :, :0])
            self.values.append(value_states[:, :, :0])
            self.positions.append(torch.empty(key_states.shape[1], 0, dtype=torch.int64, device=key_states.device))
            self.seen.append(0)
            self.queries.append([])
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

    def all_queries(self, layer_idx: int) -> torch.Tensor:
        """Return the queries of every token computed so far, oldest first, [H_q, n_seen, D]."""
        queries = torch.cat(self.queries[layer_idx], dim=1)
        if queries.shape[1] != self.seen[layer_idx]:
            raise RuntimeError(f"recorded {queries.shape[1]} queries of {self.seen[layer_idx]} tokens")
        return queries

    def snapshot(self, prompt_len: int, evictions: list["Eviction"], budget: int, period: int) -> Snapshot:
        """Return the request as an independent method sees it."""
        layers = range(len(self.keys))
        return Snapshot(
            keys=torch.cat(self.keys).float(),
            values=torch.cat(self.values).float(),
            positions=torch.stack(self.positions),
            queries=torch.stack([self.all_queries(layer) for layer in layers]).float(),
            hidden=torch.cat(self.hidden, dim=1).float(),
            prompt_len=prompt_len,
            true_len=self.get_seq_length(),
            previous_len=evictions[-1].true_len if evictions else 0,
            eviction=len(evictions),
            budget=budget,
            period=period,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the true sequence length, evicted tokens included."""
        return self.seen[layer_idx] if self.seen else 0

    def resident_length(self) -> int:
        """Return the resident tokens per head, the same in every layer."""
        return self.positions[0].shape[1] if self.positions else 0


def _recording_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    recorder: _ResidentCache,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Note the queries [1, H_q, n, D] in `recorder`; then attend as transformers' sdpa does, grouped heads included."""
    shape = None if attention_mask is None else tuple(attention_mask.shape)
    if shape != (1, 1, query.shape[2], key.shape[2]):
        raise RuntimeError(f"the mask arrived as {shape}, not as [1, 1, n, N]: transformers did not take it as given")
    recorder.queries[int(module.layer_idx)].append(query[0])
    return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(RECORDING, _recording_attention)


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
        output_hidden_states=True,
        recorder=cache,  # transformers hands what it does not know to the attention function
    )
    cache.hidden.append(torch.cat(out.hidden_states[1:]))  # the last is after the final norm: no method reads it
    return torch.as_tensor(out.logits[0, -1]).float()


def _evict(
    cache: _ResidentCache, eviction: int, budget: int, recent: int, sinks: int, score: Score, stay: bool
) -> Eviction:
    """Cut every head of every layer to `budget` tokens; equal scores prefer the earlier row."""
    rows = []
    resident = cache.resident_length()
    for layer in range(len(cache.keys)):
        positions = cache.positions[layer]
        keys, values, queries = cache.keys[layer][0], cache.values[layer][0], cache.all_queries(layer)
        scored = score(eviction, layer, keys.float(), values.float(), queries.float())
        scores, tied = scored if isinstance(scored, tuple) else (scored, torch.zeros(len(keys), dtype=torch.bool))
        scores = scores.clone()
        if scores.shape != positions.shape:
            raise ValueError(f"score returned {tuple(scores.shape)}, expected {tuple(positions.shape)}")
        middle = scores[:, sinks : resident - recent]
        if middle.isnan().any():
            raise ValueError(f"NaN score at eviction {eviction}, layer {layer}")
        order = middle.argsort(dim=1, descending=True, stable=True)[:, : budget - sinks - recent] + sinks
        forced = torch.cat([torch.arange(sinks), torch.arange(resident - recent, resident)]).to(order)
        index = torch.cat([order, forced.expand(len(order), -1)], dim=1).sort(dim=1).values
        scores[:, forced] = torch.inf
        cache.keep(layer, in_their_rows(index) if stay else index)
        rows.append((cache.positions[layer].sort(dim=1).values, scores, positions, tied))
    return Eviction(cache.get_seq_length(), resident, *(torch.stack(column) for column in zip(*rows, strict=True)))


def _evict_as(method: Method, cache: _ResidentCache, now: Snapshot) -> Eviction:
    """Cut every head of every layer to what an independent method keeps."""
    kept = method.keep(now)
    for layer, index in enumerate(kept.indices):
        cache.keep(layer, index)
    # The method's scores stay its own: a head may differ only where it says that rounding decides.
    ranks = torch.arange(now.positions.shape[-1]).expand(now.positions.shape).double()
    after = torch.stack(cache.positions)
    return Eviction(now.true_len, now.positions.shape[-1], after, ranks, now.positions, kept.margin < NEAR)


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
    score: Score | Method | None,
    due: Callable[[int, int], bool] | None = None,
    stop_ids: Collection[int] = (),
    first_eligible_step: int = 1,
    stay: bool = False,
    cache: "_ResidentCache | None" = None,
) -> ReferenceRun:
    """Decode greedily after a dense prefill, evicting whenever ``budget + period`` tokens are resident.

    Attention is transformers' sdpa whatever the model was loaded with; the model's own setting is back at the end.

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
    score : Score, Method or None
        Larger is kept, or an independent method for all layers at once. None never evicts.
    due : callable
        ``due(resident, evicted)`` in place of the rule of `budget` and `period`.
    stop_ids : collection of int
        Output stops after, and includes, the first of these.
    first_eligible_step : int
        First decode step that may be preceded by a round; step 0 consumes the first output token.
    stay : bool
        Kept tokens stay in their rows, and the last ones fill those of evicted tokens, where rows are else in age
        order. Newest and oldest then are the last and the first rows, which no score sees otherwise.
    cache : _ResidentCache or None
        An empty one that stores keys and values in its own way. None stores them as they are.
    """
    if not input_ids or max_new_tokens < 1 or period < 1 or recent < 0 or sinks < 0 or recent + sinks > budget:
        raise ValueError("need a prompt, max_new_tokens >= 1, period >= 1 and 0 <= recent + sinks <= budget")
    if set(getattr(model.config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise ValueError("only full attention layers are supported")
    cache = _ResidentCache() if cache is None else cache
    result = ReferenceRun([], [], [])
    attention = model.config._attn_implementation
    model.set_attn_implementation(RECORDING)
    try:
        logits = _forward(model, cache, input_ids)
        method = score if hasattr(score, "keep") else None
        for step in range(max_new_tokens):
            best = logits.topk(2)
            result.tokens.append(int(best.indices[0]))
            result.margins.append(float(best.values[0] - best.values[1]))
            if result.tokens[-1] in stop_ids or step == max_new_tokens - 1:
                break
            resident = cache.resident_length()
            is_due = due(resident, cache.get_seq_length() - resident) if due else resident >= budget + period
            if score is not None and step >= first_eligible_step and is_due:
                if method is None:
                    evicted = _evict(cache, len(result.evictions), budget, recent, sinks, score, stay)
                else:
                    now = cache.snapshot(len(input_ids), result.evictions, budget, period)
                    evicted = _evict_as(method, cache, now)
                result.evictions.append(evicted)
            logits = _forward(model, cache, result.tokens[-1:])
            if method is not None:
                method.decoded(cache.snapshot(len(input_ids), result.evictions, budget, period))
    finally:
        model.set_attn_implementation(attention)
    return result
