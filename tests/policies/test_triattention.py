"""TriAttention: its score is the sum that it stands for, and its modes, prompt and refusals are as documented."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from kvpolicy.policies.base import Candidates, Granularity, Noise
from kvpolicy.policies.query_statistics import QueryStatistics
from kvpolicy.policies.triattention import OFFSETS, TriAttention, averaged, expected_attention
from tests.policies.statistics_file import random_statistics, statistics_file

LAYERS, HEADS, GROUP, HEAD_DIM = 3, 2, 3, 16
STATISTICS = random_statistics(LAYERS, HEADS, GROUP, HEAD_DIM)
MODES = get_args(get_type_hints(TriAttention)["mode"])
modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def stats(tmp_path: Path) -> str:
    return statistics_file(tmp_path, STATISTICS)


def rotated(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float = 1.0) -> torch.Tensor:
    """RoPE as models write it: ``[..., N, D]`` at ``[..., N]``, channel f with channel f + D / 2."""
    angle = positions[..., None].double() * inv_freq.double()
    cos, sin = (torch.cat([part, part], dim=-1) * scaling for part in (angle.cos(), angle.sin()))
    first, second = x.double().chunk(2, dim=-1)
    return (x.double() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def text(
    tokens: int,
    *,
    prompt_len: int,
    statistics: QueryStatistics = STATISTICS,
    resident: list[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Candidates:
    """A request that computed so many tokens and holds those at the positions `resident`."""
    layers, _, heads, head_dim, _ = statistics.shape
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(layers, heads, tokens, head_dim, generator=generator)
    keys *= torch.randn(layers, heads, tokens, 1, generator=generator).mul(0.5).exp()
    keys = rotated(keys, torch.arange(tokens), statistics.inv_freq, statistics.attention_scaling).to(dtype)
    held = torch.arange(tokens) if resident is None else torch.tensor(resident)
    return Candidates(
        (layers, heads, len(held)),
        keys=keys[:, :, held],
        positions=held.expand(layers, heads, -1).clone(),
        prompt_len=prompt_len,
        true_len=tokens,
    )


def noise(layers: int = LAYERS, *, layer: int = 0, head: int = 0) -> Noise:
    return Noise(0, 0, tuple(range(layer, layer + layers)), first_head=head)


def summed(statistics: QueryStatistics, candidates: Candidates, layer: int, query_head: int) -> list[float]:
    """The published score, key by key: keys turned back, one cosine for each offset and frequency."""
    head = query_head // (statistics.shape.query_heads // statistics.kv_heads)
    scores = []
    for key, position in zip(
        candidates.require("keys")[layer, head].tolist(),
        candidates.require("positions")[layer, head].tolist(),
        strict=True,
    ):
        total = 0.0
        for f, frequency in enumerate(statistics.inv_freq.tolist()):
            scaling = statistics.attention_scaling
            cached = complex(key[f], key[f + len(key) // 2]) / scaling
            k = cached * complex(math.cos(position * frequency), -math.sin(position * frequency))
            q = complex(statistics.mean_real[layer, query_head, f], statistics.mean_imag[layer, query_head, f])
            phase = math.atan2((q * k.conjugate()).imag, (q * k.conjugate()).real)
            waves = [math.cos((candidates.true_len + d - position) * frequency + phase) for d in OFFSETS]
            total += scaling**2 * abs(q) * abs(k) * sum(waves) / len(waves)
            total += scaling**2 * (float(statistics.mean_abs[layer, query_head, f]) - abs(q)) * abs(k)
        scores.append(total)
    return scores


def test_the_offsets_are_the_published_ones() -> None:
    assert OFFSETS[:4] == (1, 2, 4, 8)
    assert (len(OFFSETS), OFFSETS[-1]) == (17, 65536)


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("tokens", [9, 5000])
def test_one_query_a_head_gives_the_mean_over_all_offsets(scaling: float, tokens: int) -> None:
    statistics = random_statistics(LAYERS, HEADS, GROUP, HEAD_DIM, scaling=scaling, seed=2)
    candidates = text(
        tokens, prompt_len=1, statistics=statistics, resident=list(range(0, tokens, max(1, tokens // 30)))
    )
    queries, surplus = averaged(statistics, candidates.true_len)
    for layer in range(LAYERS):
        by_group = (x[layer].unflatten(0, (HEADS, GROUP)) for x in (queries, surplus))
        ours = expected_attention(candidates.require("keys")[layer], *by_group).flatten(0, 1)
        theirs = torch.tensor([summed(statistics, candidates, layer, head) for head in range(HEADS * GROUP)])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.std()))


def test_a_score_is_the_attention_of_a_query_that_is_always_the_same() -> None:
    """Where all queries are one, so that nothing is longer than the mean, the score is the mean of its logits."""
    single = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    real, imag = (part.expand(LAYERS, HEADS * GROUP, -1) for part in single.chunk(2))
    statistics = replace(STATISTICS, mean_real=real, mean_imag=imag, mean_abs=real.hypot(imag))
    candidates = text(40, prompt_len=1)
    queries, surplus = averaged(statistics, 40)
    assert surplus.abs().max() < 1e-6
    ahead = torch.stack([rotated(single, torch.tensor(40 + d), STATISTICS.inv_freq) for d in OFFSETS])
    logits = candidates.require("keys")[1, 1].double() @ ahead.T
    ours = expected_attention(
        candidates.require("keys")[1], *(x[1].unflatten(0, (HEADS, GROUP)) for x in (queries, surplus))
    )
    torch.testing.assert_close(ours[1, 2].double(), logits.mean(dim=1), rtol=1e-5, atol=1e-5)


def by_query_head(candidates: Candidates) -> torch.Tensor:
    """fp64 ``[L, H_q, N]``: published scores, standardised over the decode tokens (all, where there are none)."""
    standard = torch.zeros(LAYERS, HEADS * GROUP, candidates.shape[2], dtype=torch.float64)
    for layer in range(LAYERS):
        for query_head in range(HEADS * GROUP):
            scores = torch.tensor(summed(STATISTICS, candidates, layer, query_head), dtype=torch.float64)
            decoded = candidates.require("positions")[layer, query_head // GROUP] >= candidates.prompt_len
            among = scores[decoded] if decoded.any() else scores
            standard[layer, query_head] = (scores - among.mean()) / among.std(unbiased=False).clamp(min=1e-6)
    return standard


def expected(mode: str, candidates: Candidates) -> torch.Tensor:
    groups = by_query_head(candidates).view(LAYERS, HEADS, GROUP, -1)
    return {
        "kv_head": groups.amax(dim=2).mean(dim=0, keepdim=True),
        "global": groups.flatten(0, 2).amax(dim=0)[None, None],
        "layer_head": groups.amax(dim=2),
    }[mode]


@modes
@pytest.mark.parametrize("prompt_len", [4, 60], ids=["decode tokens", "nothing but a prompt"])
def test_scores_are_standardised_and_brought_together_as_published(mode: str, prompt_len: int, stats: str) -> None:
    candidates = text(60, prompt_len=prompt_len, resident=[*range(30), 33, 35, *range(40, 60)])
    scores = TriAttention(stats=stats, mode=mode).scores(candidates, noise())  # type: ignore[arg-type]
    torch.testing.assert_close(scores.double(), expected(mode, candidates), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "shares", "layers", "heads"),
    [
        ("kv_head", Granularity.PER_KV_HEAD_INDEX, 1, HEADS),
        ("global", Granularity.GLOBAL, 1, 1),
        ("layer_head", Granularity.PER_HEAD, LAYERS, HEADS),
    ],
)
def test_modes_differ_in_who_shares_a_set(mode: str, shares: Granularity, layers: int, heads: int, stats: str) -> None:
    policy = TriAttention(stats=stats, mode=mode)  # type: ignore[arg-type]
    assert policy.shares == shares
    kept = policy.select(text(60, prompt_len=4), 20, 8, noise())
    assert kept.shape == (LAYERS, HEADS, 20)
    assert len({tuple(row) for row in kept.flatten(0, 1).tolist()}) == layers * heads
    assert all(len(kept[:, head].unique(dim=0)) == layers for head in range(HEADS))


@modes
def test_the_prompt_stays_and_the_highest_scores_of_the_others(mode: str, stats: str) -> None:
    policy = TriAttention(stats=stats, mode=mode)  # type: ignore[arg-type]
    candidates = text(70, prompt_len=12, resident=[*range(12), *range(20, 70)])
    scores = policy.scores(candidates, noise()).expand(LAYERS, HEADS, -1)
    kept = policy.select(candidates, 30, 8, noise())
    for row, row_scores in zip(kept.flatten(0, 1).tolist(), scores.flatten(0, 1), strict=True):
        best = row_scores[12:].topk(18).indices + 12
        assert row == [*range(12), *sorted(best.tolist())]


@modes
def test_without_a_recent_window_the_newest_tokens_may_go(mode: str, stats: str) -> None:
    candidates = text(70, prompt_len=12)
    candidates.require("keys")[:, :, -1] = 0  # no query, however long, attends to it
    last = [
        bool((TriAttention(stats=stats, mode=mode, recent=r).select(candidates, 30, 8, noise()) == 69).any())
        for r in (0, 1)
    ]  # type: ignore[arg-type]
    assert last == [False, True]


@modes
@pytest.mark.parametrize("recent", [0, 5, 9])
@pytest.mark.parametrize("prompt_len", [24, 30, 31, 45, 60])
def test_a_prompt_leaves_a_quarter_of_the_budget_to_the_newest_tokens(
    mode: str, recent: int, prompt_len: int, stats: str
) -> None:
    policy = TriAttention(stats=stats, mode=mode, recent=recent)  # type: ignore[arg-type]
    kept = policy.select(text(60, prompt_len=prompt_len), 30, 8, noise())
    place = max(recent, 30 // 4)
    end = min(prompt_len, 60 - place)
    wanted = [*range(end - (30 - place), end), *range(60 - place, 60)]
    assert kept.tolist() == [[wanted] * HEADS] * LAYERS


@modes
def test_a_prompt_of_three_quarters_of_the_budget_stays_whole(mode: str, stats: str) -> None:
    policy = TriAttention(stats=stats, mode=mode)  # type: ignore[arg-type]
    candidates = text(60, prompt_len=23)
    candidates.require("keys")[:, :, -1] = 0  # no query, however long, attends to it
    kept = policy.select(candidates, 30, 8, noise())
    assert (kept[..., :23] == torch.arange(23)).all()
    assert not (kept == 59).any()


def test_recent_none_is_one_period(stats: str) -> None:
    assert [TriAttention(stats=stats, recent=r).forced(16) for r in (None, 0, 3)] == [16, 0, 3]


def test_a_score_before_it_is_standardised_does_not_depend_on_what_else_is_held() -> None:
    held = [*range(6), *range(20, 50, 2), *range(50, 60)]
    whole, part = (text(60, prompt_len=6, resident=resident).require("keys")[0] for resident in (None, held))
    queries, surplus = (x.unflatten(1, (HEADS, GROUP))[0] for x in averaged(STATISTICS, 60))
    scores = expected_attention(whole, queries, surplus)
    torch.testing.assert_close(expected_attention(part, queries, surplus), scores[..., held], rtol=1e-5, atol=1e-5)


def test_heads_that_hold_different_tokens_are_standardised_each_over_its_own(stats: str) -> None:
    candidates = text(60, prompt_len=6)
    other = candidates.require("positions").clone()
    other[1, 1] = torch.arange(60) + torch.arange(60).ge(20) * 7  # one head evicted what the others still hold
    moved = replace(candidates, positions=other, prompt_len=24)
    scores = [
        TriAttention(stats=stats, mode="layer_head").scores(c, noise())
        for c in (replace(candidates, prompt_len=24), moved)
    ]
    same = (scores[0] == scores[1]).all(dim=-1)
    assert same.tolist() == [[True, True], [True, False], [True, True]]


@modes
def test_a_token_that_is_no_number_does_not_spoil_the_others(mode: str, stats: str) -> None:
    candidates = text(60, prompt_len=6)
    candidates.require("keys")[0, 0, 40, 3] = torch.nan
    policy = TriAttention(stats=stats, mode=mode)  # type: ignore[arg-type]
    scores = policy.scores(candidates, noise())
    assert scores.isnan().sum() == 1
    kept = policy.select(candidates, 20, 8, noise())[0, 0].tolist()
    assert {*range(6), 40} <= set(kept)


@pytest.mark.parametrize("mode", ["kv_head", "layer_head"])
def test_a_rank_reads_the_statistics_of_its_own_heads(mode: str, stats: str) -> None:
    candidates = text(60, prompt_len=6)
    policy = TriAttention(stats=stats, mode=mode)  # type: ignore[arg-type]
    of_rank = replace(
        candidates,
        shape=(LAYERS, 1, 60),
        keys=candidates.require("keys")[:, 1:],
        positions=candidates.require("positions")[:, 1:],
    )
    whole = policy.select(candidates, 20, 8, noise())
    assert torch.equal(policy.select(of_rank, 20, 8, noise(head=1)), whole[:, 1:])


def test_a_chunk_of_layers_reads_the_statistics_of_its_own(stats: str) -> None:
    candidates = text(60, prompt_len=6)
    policy = TriAttention(stats=stats, mode="layer_head")
    last = replace(
        candidates,
        shape=(1, HEADS, 60),
        keys=candidates.require("keys")[2:],
        positions=candidates.require("positions")[2:],
    )
    assert torch.equal(policy.select(last, 20, 8, noise(1, layer=2)), policy.select(candidates, 20, 8, noise())[2:])


def test_a_bf16_cache_is_scored_as_its_values_in_fp32(stats: str) -> None:
    candidates = text(60, prompt_len=6, dtype=torch.bfloat16)
    wide = replace(candidates, keys=candidates.require("keys").float())
    policy = TriAttention(stats=stats)
    assert torch.equal(policy.scores(candidates, noise()), policy.scores(wide, noise()))
