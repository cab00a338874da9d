"""`triattention`: the attention that a model's average queries would pay from various distances ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvpolicy.policies.base import Candidates, Card, Granularity, ModelShape, Needs, Noise
from kvpolicy.policies.query_statistics import QueryStatistics, load
from kvpolicy.policies.selecting import ScoredPolicy, newest_beside_prompt, with_prompt
from kvpolicy.policies.standard_scores import standard_scores

OFFSETS = tuple(2**exponent for exponent in range(17))  # tokens ahead, 1 to 65536

SHARES = {
    "kv_head": Granularity.PER_KV_HEAD_INDEX,
    "global": Granularity.GLOBAL,
    "layer_head": Granularity.PER_HEAD,
}


@dataclass(frozen=True)
class TriAttention(ScoredPolicy):
    """TriAttention (arXiv 2604.04921; WeianMao/triattention, Apache-2.0): no queries, no attention, but statistics.

    Before RoPE, the queries of a head are much alike. Their mean ``q_f`` and mean length ``m_f`` per frequency pair
    ``f``, made once per model by ``kvpolicy calibrate``, tell how much a key ``k_f`` (before RoPE, at position ``p``)
    will be attended to, ``c`` being 1, or the square of YaRN's attention scaling::

        S = mean over d of sum_f c |q_f| |k_f| cos((t + d - p) w_f + arg(q_f conj(k_f)))  +  sum_f c (m_f - |q_f|) |k_f|

    with ``d`` = 1, 2, 4, …, 65536 and ``t`` the number of tokens computed so far, as in the official code: the next
    query stands at ``t``, so ``d`` = 1 is the one after it. As the mean is linear and the cached key is the key turned
    by ``p w_f``, the first sum is the dot product of the cached key with one made-up query a head, which has no `p`.

    The scores of each query head are standardised over the resident decode tokens. What they share a set by:

    * ``mode:kv_head`` (default; "per_head" of the official scripts, which made the published tables): highest of the
      query heads of a group, then mean over the layers. KV head ``h`` keeps the same tokens in all layers.
    * ``mode:global`` ("union" of the official code, where no other is asked for): highest of all query heads of all
      layers. One set for the request. The code takes the best of each head's own choice, which are the same tokens.
    * ``mode:layer_head`` ("per_layer_perhead"): highest of the query heads of a group. Each layer and KV head keeps its
      own tokens.

    The prompt counts as part of the budget and is never evicted, as long as it leaves a quarter of the budget (at most
    128 tokens) to others. Of a longer one the oldest tokens go, and the newest of the text have these places.
    That rule is ours: the official code keeps the oldest tokens of a prompt that fills the budget, and no decode token.

    Differences from the official code: equal scores are decided by age (the older stays), where it adds noise of up to
    1e-6, from seed 0; phases are computed in fp64. Published: an eviction every 128 tokens, to 2048 (512 for
    R1-Distill-Llama-8B and for MATH-500). The official ``calibrate.py`` takes queries before Qwen3's q_norm, which are
    not those that attention sees; ``kvpolicy calibrate`` takes them behind it. The paper's text was not read.

    Parameters
    ----------
    stats : str
        File of ``kvpolicy calibrate`` for the model that is served. Required.
    mode : {"kv_head", "global", "layer_head"}
    sinks : int
        Oldest tokens that are always kept; published: none, the prompt stays anyway.
    recent : int or None
        Newest tokens that are always kept. Published: none in the code that made the tables, where the newest token of
        all may go; the vLLM code keeps 128, one eviction period, and does not protect the prompt. None: one eviction
        period.
    """

    name: ClassVar[str] = "triattention"
    card: ClassVar[Card] = Card(
        score="attention of the model's average queries, 1 to 65536 tokens ahead; the prompt is kept",
        source="TriAttention, arXiv 2604.04921 (ICML 2026)",
        code="WeianMao/triattention (Apache-2.0)",
    )
    granularity: ClassVar[Granularity] = Granularity.PER_KV_HEAD_INDEX

    sinks: int = 0
    recent: int | None = 0
    stats: str = ""
    mode: Literal["kv_head", "global", "layer_head"] = "kv_head"

    @property
    def shares(self) -> Granularity:
        return SHARES[self.mode]

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, positions=True)

    def check(self, budget: int, period: int) -> None:
        super().check(budget, period)
        how = "make one with: kvpolicy calibrate --model MODEL --out FILE"
        if not self.stats:
            raise ValueError(f"{self.name} needs stats:FILE, statistics of the model's queries; {how}")
        try:
            load(self.stats)
        except ValueError as error:
            raise ValueError(f"{self.name} needs stats:FILE, but {error}; {how}") from None

    def fit(self, model: ModelShape) -> None:
        statistics = load(self.stats)
        theirs = statistics.shape
        same_base = math.isclose(theirs.rope_theta, model.rope_theta, rel_tol=1e-6)
        if theirs._replace(rope_theta=model.rope_theta) != model or not same_base:
            raise ValueError(
                f"stats:{self.stats} is of {statistics.model or 'a model'} with {_described(theirs)}, "
                f"but this model has {_described(model)}; "
                "make statistics of this one with: kvpolicy calibrate --model MODEL --out FILE"
            )

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        keys, positions = candidates.require("keys"), candidates.require("positions")
        heads, statistics = keys.shape[1], load(self.stats, keys.device)
        queries, surplus = (
            by_query_head.view(len(by_query_head), statistics.kv_heads, -1, by_query_head.shape[-1])
            for by_query_head in averaged(statistics, candidates.true_len)
        )
        mine = slice(noise.first_head, noise.first_head + heads)
        decoded = positions >= candidates.prompt_len
        highest = []
        for row, layer in enumerate(noise.layers):
            by_query_head = expected_attention(keys[row], queries[layer, mine], surplus[layer, mine])
            highest.append(standard_scores(by_query_head, decoded[row, :, None]).amax(dim=1))
        by_layer = torch.stack(highest)
        if self.mode == "kv_head":
            return by_layer.mean(dim=0, keepdim=True)
        return by_layer.amax(dim=(0, 1), keepdim=True) if self.mode == "global" else by_layer

    def newest(self, candidates: Candidates, n_keep: int, period: int) -> int:
        return newest_beside_prompt(self.recent_count(period), candidates.prompt_len, n_keep)

    def protected(self, scores: torch.Tensor, candidates: Candidates, n_keep: int, period: int) -> torch.Tensor:
        return with_prompt(scores, candidates, n_keep - self.newest(candidates, n_keep, period))


def averaged(statistics: QueryStatistics, true_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean query of each head after RoPE, mean over `OFFSETS`, and by how much single queries are longer.

    Returns fp32 ``[L, H_q, D]`` and ``[L, H_q, D / 2]``, for keys as cached: after RoPE and its attention scaling.
    """
    ahead = true_len + torch.tensor(OFFSETS, dtype=torch.float64, device=statistics.inv_freq.device)
    phase = ahead[:, None] * statistics.inv_freq
    turn = torch.polar(torch.ones_like(phase), phase).mean(dim=0)
    mean = torch.complex(statistics.mean_real, statistics.mean_imag)
    # Squared scaling, over that of the cached keys.
    query = mean * turn * statistics.attention_scaling
    surplus = (statistics.mean_abs - mean.abs()) * statistics.attention_scaling
    return torch.cat([query.real, query.imag], dim=-1).float(), surplus.float()


def expected_attention(keys: torch.Tensor, queries: torch.Tensor, surplus: torch.Tensor) -> torch.Tensor:
    """``q · k + sum_f s_f |k_f|``, fp32 ``[H, G, N]``.

    keys : ``[H, N, D]``, pair ``f`` being channels ``f`` and ``f + D / 2``; queries : ``[H, G, D]``;
    surplus : ``[H, G, D / 2]``.
    """
    keys = keys.float()
    real, imag = keys.chunk(2, dim=-1)
    length = (real.square() + imag.square()).sqrt()
    return queries @ keys.mT + surplus @ length.mT


def _described(model: ModelShape) -> str:
    return (
        f"{model.layers} layers of {model.query_heads} query and {model.kv_heads} KV heads, head_dim {model.head_dim}, "
        f"rope_theta {model.rope_theta:g}"
    )
