"""Traces of random evictions, with the sets that each head holds, kept apart as plain Python lists."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvpolicy.sglang_plugin.trace import Trace

Positions = list[list[list[int]]]  # per layer and KV head


@dataclass
class Simulation:
    """A trace, and what it must say: per eviction the positions that each head kept, and the tokens by then."""

    trace: Trace
    prefill: int
    kept: list[Positions] = field(default_factory=list)
    true_len: list[int] = field(default_factory=list)

    def write(self, folder: Path, name: str = "request") -> Path:
        """Write the trace with a text as long as an SGLang request's would be: one token was never computed."""
        self.trace.write(
            str(folder),
            name,
            token_ids=range(1000, 1000 + self.true_len[-1] + 6),
            prompt_len=self.prefill,
            policy="random",
            options="sinks:0",
            budget=24,
            period=8,
            model="org/model",
        )
        return folder / f"{name}.npz"


def simulate(seed: int, layers: int, heads: int, prefill: int, evictions: int = 4, ranges: bool = True) -> Simulation:
    """Evictions of a random number of random tokens, up to 17 tokens apart."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    found = Simulation(Trace(prefill, layers, heads), prefill)
    resident, length = [[list(range(prefill)) for _ in range(heads)] for _ in range(layers)], prefill
    for _ in range(evictions):
        appended = rng.randint(0, 17)
        for head in (head for layer in resident for head in layer):
            head.extend(range(length, length + appended))
        length += appended
        tokens = len(resident[0][0])
        count = rng.randint(1, tokens)
        keep = [[sorted(rng.sample(range(tokens), count)) for _ in range(heads)] for _ in range(layers)]
        spread = torch.rand(layers, heads, tokens, generator=generator) if ranges else None
        found.trace.evicted(torch.tensor(keep), length, spread)
        resident = [
            [[positions[i] for i in chosen] for positions, chosen in zip(*pair, strict=True)]
            for pair in zip(resident, keep, strict=True)
        ]
        found.kept.append(copy.deepcopy(resident))
        found.true_len.append(length)
    return found
