"""`seerattention-r`: each KV head reads the blocks that a trained gate scores highest; everything stays resident."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import functional

from kvpolicy.policies.attn_gates import Gate, check_shapes, load_gates
from kvpolicy.policies.base import Card, ModelShape
from kvpolicy.policies.reading import Reader, ReadingPolicy, Rotary, ServedModel
from kvpolicy.policies.selecting import keep_highest

NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class SeerAttentionR(ReadingPolicy):
    """SeerAttention-R (arXiv 2506.08889). It saves no memory: nothing is evicted, and a vector per block, layer and KV
    head is kept beside the cache (fp32; 1/64 of a bf16 cache at the published sizes). It needs trained gates.

    `kv_budget` counts the tokens that one KV head reads in one layer at one decode step; ``kv_period`` has no meaning.
    Per layer and KV head the gate projects the queries of its group before RoPE, concatenated, to one vector, and the
    largest, smallest and mean key (channel by channel, before RoPE) of each block of `block` tokens to another; both
    are RMS-normalised and rotated, the query by its position, the block by that of its first token. The scores are
    ``softmax(q·k / √width)`` over the blocks; ``budget // block`` blocks are read. An incomplete newest block has the
    logit 0, as in the published code. Prefill is dense, as published, and so is every step while all tokens fit.

    Queries and keys before RoPE are those in the cache, rotated back with the model's own cosines and sines: exact but
    for the rounding of the cache. The gate computes in fp32; the published code in the model's precision.

    Published code that leaves a choice, or that this departs from:

    * The newest block is always read. There it comes on top of the budget unless it is among the best; here it takes
      one place of the budget, so that no head reads more.
    * The training code and the prefill rotate a block by its first token. The published decode step rotates a block
      that it completes by its last. Here it is the first for all blocks, so that a choice does not depend on which
      tokens were prefilled.
    * With `threshold` there is no budget there, and none here.

    Tensor names and shapes are those of the published modelling code, and the sizes of the published gate files agree
    with the shapes. No published checkpoint was loaded with this code: gates of the hub are untested.

    Parameters
    ----------
    gates : str
        A file, a folder, or a repository of the Hugging Face hub, such as
        ``SeerAttention/SeerAttention-Decode-Qwen3-4B-AttnGates``; :func:`kvpolicy.policies.attn_gates.load_gates` says
        which files. No spaces, ``;``, ``|`` or ``]`` in the name.
    block : int
        Tokens of a block; the gates are trained for one size, published: 64.
    threshold : float or None
        Read the blocks whose score is above it, instead of the best of a budget; `kv_budget` is then not used.
        The authors' range for their prefill gates: 5e-4 to 5e-3; none found for decoding.
    dense_layers : int
        Layers, from the first on, that read everything and need no gate; the published code has such an option, too.
    """

    name: ClassVar[str] = "seerattention-r"
    card: ClassVar[Card] = Card(
        score="a trained gate on query and pooled keys of a block, before RoPE; reads a part, saves no memory",
        source="SeerAttention-R, arXiv 2506.08889",
        code="microsoft/SeerAttention (MIT)",
    )

    gates: str = ""
    block: int = field(default=64, metadata={"least": 1})
    threshold: float | None = None
    dense_layers: int = 0

    def check(self, budget: int, period: int) -> None:
        if not self.gates:
            raise ValueError(
                f"{self.name} chooses with trained gates, so kv_options must name them as gates:FOLDER, "
                "gates:FILE.safetensors or gates:OWNER/REPOSITORY of the Hugging Face hub"
            )
        if self.threshold is not None and self.threshold >= 1:
            raise ValueError(f"option 'threshold' of {self.name} must be below 1, the sum of all scores")
        if self.threshold is None and budget < 2 * self.block:
            raise ValueError(
                f"kv_budget={budget} leaves {self.name} nothing to choose: it always reads the newest block of "
                f"{self.block} tokens, so kv_budget must be at least {2 * self.block}"
            )

    def fit(self, model: ModelShape) -> None:
        gates = load_gates(self.gates, range(self.dense_layers, model.layers), self.block)
        check_shapes(gates, model.kv_heads, model.query_heads // model.kv_heads, model.head_dim)

    def reader(self, model: ServedModel) -> Reader:
        gates = load_gates(self.gates, range(self.dense_layers, model.layers), self.block)
        if model.rotary is None or model.rotary.table().shape[-1] != model.head_dim:
            raise ValueError(f"{self.name} needs a model with one rotary embedding of all channels of a head")
        mine = {
            layer: gate.of_heads(model.first_kv_head, model.kv_heads, model.device) for layer, gate in gates.items()
        }
        check_shapes(mine, model.kv_heads, model.query_heads // model.kv_heads, model.head_dim)
        return GatedBlocks(self, mine, model.rotary)


@dataclass(frozen=True)
class GatedBlocks:
    """The gates at work: blocks are what a :class:`kvpolicy.policies.reading.Reader` calls pages."""

    policy: SeerAttentionR
    gates: Mapping[int, Gate]
    rotary: Rotary

    @property
    def page(self) -> int:
        return self.policy.block

    def reads_all(self, layer: int, length: int, budget: int) -> bool:
        fits = length <= (self.policy.block if self.policy.threshold is not None else budget)
        return layer < self.policy.dense_layers or fits

    def summarise(self, keys: torch.Tensor, first: int, layer: int) -> torch.Tensor:
        """``[H_kv, n, E]`` fp32: the gate's vector of each block."""
        gate = self.gates[layer]
        starts = torch.arange(first, first + keys.shape[1], device=keys.device) * self.page
        positions = (starts[:, None] + torch.arange(self.page, device=keys.device)).flatten()
        plain = self.rotary.rotate(keys.flatten(1, 2), positions, back=True).view(keys.shape)
        pooled = torch.cat([plain.amax(dim=2), plain.amin(dim=2), plain.mean(dim=2)], dim=-1)
        return self.rotary.rotate(_rms_norm(pooled @ gate.key, gate.key_norm), starts)

    def choose(
        self, query: torch.Tensor, summaries: torch.Tensor, length: int, budget: int, layer: int
    ) -> torch.Tensor:
        """Bool ``[H_kv, blocks]``; of blocks with equal scores the oldest are read."""
        logits = self.logits(query, summaries, length, layer)
        newest = logits.shape[1] - 1
        if self.policy.threshold is None:  # the best logits are the best scores, also where a softmax underflows
            read = keep_highest(logits[:, :newest], min(newest, budget // self.page - 1))
            blocks = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, read, True)
        else:
            blocks = logits.softmax(dim=-1) > self.policy.threshold
        blocks[:, newest] = True
        return blocks

    def logits(self, query: torch.Tensor, summaries: torch.Tensor, length: int, layer: int) -> torch.Tensor:
        """fp32 ``[H_kv, blocks]``; their softmax is the share of attention that the gate foresees for each block."""
        gate, position = self.gates[layer], torch.tensor([length - 1], device=query.device)
        plain = self.rotary.rotate(query[:, None], position, back=True).view(gate.query.shape[:3])
        projected = torch.einsum("hgd,hgde->he", plain, gate.query)
        turned = self.rotary.rotate(_rms_norm(projected, gate.query_norm)[:, None], position)
        logits = (turned @ summaries.transpose(1, 2))[:, 0] / math.sqrt(turned.shape[-1])
        return functional.pad(logits, (0, 1)) if length % self.page else logits


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + NORM_EPSILON) * weight
