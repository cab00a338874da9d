"""A made-up request in the middle of its life, for select_round.py: all that a policy may ask to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvpolicy.policies.base import Candidates, Granularity, ModelShape, Noise, Policy
from kvpolicy.policies.query_statistics import QueryStatistics, write
from kvpolicy.sglang_plugin.observation import SCRATCH_BYTES

MOST_QUERIES = 256  # newest tokens whose queries are there


class Shape(NamedTuple):
    """Of a model and its cache; `group` is query heads per KV head."""

    layers: int
    kv_heads: int
    group: int
    head_dim: int

    def model(self) -> ModelShape:
        return ModelShape(self.layers, self.kv_heads * self.group, self.kv_heads, self.head_dim, rope_theta=1e6)


def random_statistics(shape: Shape, folder: Path) -> Path:
    """A file as of ``kvpolicy calibrate``, for a model of this shape whose queries are random."""
    model = shape.model()
    size = 2, model.layers, model.query_heads, model.head_dim // 2
    real, imaginary = torch.randn(size, generator=torch.Generator().manual_seed(0))
    frequencies = model.rope_theta ** -torch.arange(0, 1, 2 / model.head_dim)
    length = 1.5 * real.hypot(imaginary)
    path = folder / "statistics.safetensors"
    write(QueryStatistics(real, imaginary, length, frequencies, 1.0, model.kv_heads, model.rope_theta), path)
    return path


class Request:
    """One that had a prompt of an eighth of its budget and has lost a third of its text; bf16, random.

    All layers and heads hold the same tokens, as any method might have left them. Keys of a head that
    are `alike` have a direction in common, so that any two have a cosine of about 0.5, as many real ones do; else they
    are independent, which is the worst case of a method that looks for similar keys.

    Parameters
    ----------
    resident : tokens
    period : tokens appended since the last eviction
    """

    def __init__(self, shape: Shape, resident: int, period: int, device: torch.device, *, alike: bool = True) -> None:
        self.shape, self.resident, self.period, self.device = shape, resident, period, device
        self.alike = alike
        self.prompt_len, self.true_len = (resident - period) // 8, 3 * resident // 2 // 128 * 128
        self._generator = torch.Generator(device).manual_seed(0)
        self._keys, self._values = self._rows(resident, common=float(alike)), self._rows(resident, common=0.0)
        queries = self._normal(shape.layers, shape.kv_heads * shape.group, min(resident, MOST_QUERIES), shape.head_dim)
        self._queries = queries.bfloat16()
        self._positions = self._ascending()

    @property
    def evicted(self) -> int:
        return self.true_len - self.resident

    def _rows(self, tokens: int, *, common: float) -> torch.Tensor:
        """bf16 ``[L, H_kv, tokens, D]``, a token's heads next to each other in memory, as the pool has them."""
        layers, heads, _, head_dim = self.shape
        rows = torch.empty(layers, tokens, heads, head_dim, dtype=torch.bfloat16, device=self.device)
        rows.normal_(generator=self._generator)
        rows += common * self._normal(layers, 1, heads, head_dim).bfloat16()
        return rows.transpose(1, 2)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self.device)

    def _ascending(self) -> torch.Tensor:
        """int64 ``[N]``: the prompt, a random choice of what was decoded, the newest period."""
        decoded = self.true_len - self.prompt_len - self.period
        count = self.resident - self.prompt_len - self.period
        chosen = self._normal(decoded).topk(count).indices.sort().values
        prompt = torch.arange(self.prompt_len, device=self.device)
        newest = torch.arange(self.true_len - self.period, self.true_len, device=self.device)
        return torch.cat([prompt, self.prompt_len + chosen, newest])

    def chunks(
        self, policy: Policy, eviction: int, statistic: torch.Tensor | None
    ) -> Iterator[tuple[Candidates, Noise]]:
        """What the plugin would give `policy` at once: all layers, or as many adjacent ones as fit its scratch memory.

        statistic : fp32 ``[L, H_kv, N]`` as :meth:`Policy.observe` left it, for policies that accumulate.
        """
        layers = self.shape.layers
        bytes_per_layer = (self._keys.nbytes + self._values.nbytes) // layers
        step = layers if policy.spans_layers else max(1, SCRATCH_BYTES // bytes_per_layer)
        needs = policy.needs(self.period)
        assert needs.queries <= self._queries.shape[2], f"{policy.name} reads {needs.queries} queries"
        changes = 1 + self._normal(len(needs.hidden_bands), self.true_len - self.prompt_len).abs()
        for first in range(0, layers, step):
            chunk = slice(first, min(first + step, layers))
            keys = self._keys[chunk]
            candidates = Candidates(
                shape=(keys.shape[0], keys.shape[1], keys.shape[2]),
                keys=keys if needs.keys else None,
                values=self._values[chunk] if needs.values else None,
                queries=self._queries[chunk, :, -needs.queries :] if needs.queries else None,
                positions=self._positions_of(policy, len(keys)) if needs.positions else None,
                hidden_change=changes if needs.hidden_bands else None,
                statistic=None if statistic is None else statistic[chunk],
                unseen=min(self.period, needs.queries) if policy.accumulates else 0,
                prompt_len=self.prompt_len,
                true_len=self.true_len,
                previous_len=self.true_len - self.period,
            )
            yield candidates, Noise(0, eviction, tuple(range(layers))[chunk], self.device)

    def _positions_of(self, policy: Policy, layers: int) -> torch.Tensor:
        """int64 ``[layers, H_kv, N]``, in as much memory as the policy's sharing of sets takes."""
        shares = policy.shares
        stored = 1 if shares in (Granularity.PER_KV_HEAD_INDEX, Granularity.GLOBAL) else layers
        heads = 1 if shares in (Granularity.PER_LAYER, Granularity.GLOBAL) else self.shape.kv_heads
        return self._positions.repeat(stored, heads, 1).expand(layers, self.shape.kv_heads, -1)

    def statistic(self, policy: Policy) -> torch.Tensor | None:
        """fp32 ``[L, H_kv, N]``: what `policy` might have carried on so far, random; unknown of the newest tokens."""
        if not policy.accumulates:
            return None
        statistic = torch.rand(self.resident, generator=self._generator, device=self.device)
        statistic[-self.period :] = torch.nan
        return statistic.repeat(self.shape.layers, self.shape.kv_heads, 1)


def observed(policy: Policy, candidates: Candidates, period: int) -> Candidates:
    """`candidates` as :meth:`Policy.select` gets them."""
    if not policy.accumulates:
        return candidates
    return replace(candidates, statistic=policy.observe(candidates, period))
