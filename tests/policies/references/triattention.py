"""TriAttention by its sum over offsets and frequencies, with keys turned back to before RoPE."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.prompt_kept import keep_by_score, recent_beside_prompt

OFFSETS = [2**exponent for exponent in range(17)]


@dataclass(frozen=True)
class Statistics:
    """Of queries before RoPE, over some calibration text. Frequency f pairs channels f and f + D / 2.

    mean : complex ``[L, H_q, D / 2]``.
    mean_length : ``[L, H_q, D / 2]``, mean of the absolute values.
    frequencies : ``[D / 2]``, radians per token.
    scaling : what RoPE multiplies queries and keys by.
    """

    mean: torch.Tensor
    mean_length: torch.Tensor
    frequencies: torch.Tensor
    scaling: float = 1.0


def random_statistics(layers: int, query_heads: int, head_dim: int) -> Statistics:
    """The same ones for the same shape; with a scaling as under YaRN where the number of layers is even."""
    generator = torch.Generator().manual_seed(1000 * layers + 10 * query_heads + head_dim)
    size = layers, query_heads, head_dim // 2
    mean = torch.complex(torch.randn(size, generator=generator), torch.randn(size, generator=generator))
    return Statistics(
        mean,
        mean.abs() * (1 + torch.rand(size, generator=generator)),
        1e6 ** -torch.arange(0, 1, 2 / head_dim),
        scaling=1.0 if layers % 2 else 1.3,
    )


class TriAttention:
    """`mode` says who shares a set, and how scores of query heads become those of it.

    kv_head : KV heads of the same index in all layers; highest of a group, then mean over layers.
    global : all; highest of all query heads of all layers.
    layer_head : nobody; highest of a group.

    The next token is at `true_len`, from where offsets are counted.
    """

    def __init__(self, statistics: Statistics, mode: str = "kv_head", recent: int = 0, sinks: int = 0) -> None:
        self.statistics = statistics
        self.mode = mode
        self.recent = recent
        self.sinks = sinks

    def decoded(self, now: Snapshot) -> None:
        pass

    def raw(self, now: Snapshot, layer: int) -> torch.Tensor:
        """fp64 ``[H_q, N]``."""
        told = self.statistics
        group = told.mean.shape[1] // now.keys.shape[1]
        omega = told.frequencies.double()
        position = now.positions[layer].double()
        real, imaginary = now.keys[layer].double().chunk(2, dim=-1)
        back = -position[:, :, None] * omega
        before_rope = torch.complex(real, imaginary) / told.scaling * torch.polar(torch.ones_like(back), back)
        key = before_rope.repeat_interleave(group, dim=0)  # [H_q, N, D / 2]
        query = told.mean[layer].to(torch.complex128)[:, None]
        phase = (query * key.conj()).angle()
        factor = told.scaling**2 * query.abs() * key.abs()
        total = torch.zeros(key.shape[:2], dtype=torch.float64)
        for offset in OFFSETS:
            distance = (now.true_len + offset - position).repeat_interleave(group, dim=0)
            total += (factor * torch.cos(distance[:, :, None] * omega + phase)).sum(dim=-1)
        length = told.mean_length[layer].double()[:, None] - query.abs()
        return total / len(OFFSETS) + told.scaling**2 * (length * key.abs()).sum(dim=-1)

    def standardised(self, now: Snapshot) -> torch.Tensor:
        """fp64 ``[L, H_q, N]``, each query head's scores relative to those of the resident decode tokens."""
        layers, query_heads, _ = self.statistics.mean.shape
        heads = now.keys.shape[1]
        found = torch.zeros(layers, query_heads, now.keys.shape[2], dtype=torch.float64)
        for layer in range(layers):
            for query_head, score in enumerate(self.raw(now, layer)):
                decoded = score[now.positions[layer, query_head // (query_heads // heads)] >= now.prompt_len]
                if len(decoded):
                    deviation = decoded.std(unbiased=False).clamp(min=1e-6)
                    found[layer, query_head] = (score - decoded.mean()) / deviation
        return found

    def per_kv_head(self, now: Snapshot) -> torch.Tensor:
        """fp64 ``[L, H_kv, N]``: the highest of each group of query heads."""
        return self.standardised(now).unflatten(1, (now.keys.shape[1], -1)).amax(dim=2)

    def shared(self, now: Snapshot) -> torch.Tensor:
        """The same, with a size of 1 for the dimensions that share one set."""
        scores = self.per_kv_head(now)
        if self.mode == "kv_head":
            return scores.mean(dim=0, keepdim=True)
        return scores.amax(dim=(0, 1), keepdim=True) if self.mode == "global" else scores

    def keep(self, now: Snapshot) -> Kept:
        layers, heads, tokens = now.positions.shape
        recent = recent_beside_prompt(self.recent, now)
        scores = self.shared(now).expand(layers, heads, tokens)
        indices, margin = [], torch.zeros(layers, heads, dtype=torch.float64)
        for layer in range(layers):
            for head in range(heads):
                kept, margin[layer, head] = keep_by_score(
                    scores[layer, head], now.positions[layer, head], now, recent=recent, sinks=self.sinks
                )
                indices.append(kept)
        return Kept(torch.tensor(indices, dtype=torch.int64).view(layers, heads, -1), margin)
