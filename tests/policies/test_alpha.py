"""alpha: what another policy scores highest, less what is alike, in one set for all layers and heads."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, get_args

import pytest
import torch

from kvpolicy.kernels.greedy_diversity import Redundancy, greedy_diversity_reference
from kvpolicy.policies.alpha import Alpha, signatures
from kvpolicy.policies.base import Candidates, Granularity, ModelShape, Needs, Noise
from kvpolicy.policies.options import build, parse_options
from kvpolicy.policies.selecting import ScoredPolicy
from kvpolicy.policies.triattention import TriAttention
from tests.policies.candidates import random_candidates
from tests.policies.matrix import noise_of
from tests.policies.statistics_file import random_statistics, statistics_file

LAYERS, HEADS, TOKENS, HEAD_DIM, PERIOD = 3, 2, 120, 16, 8
BASES = (
    "keydiff",
    "curdkv",
    "random",
    "vase-dkv[sinks:2;recent:5]",
    "evict-small-range",
    "triattention",
    "triattention[mode:global]",
)
bases = pytest.mark.parametrize("base", BASES)


@pytest.fixture
def stats(tmp_path: Path) -> str:
    return statistics_file(tmp_path, random_statistics(LAYERS, HEADS, 2, HEAD_DIM))


def candidates(*, prompt_len: int = 10, seed: int = 0) -> Candidates:
    """Tokens of which many have nearly the same value."""
    drawn = random_candidates(LAYERS, HEADS, TOKENS, HEAD_DIM, seed=seed)
    values, generator = drawn.require("values"), torch.Generator().manual_seed(seed)
    topics = values[:, :, torch.randint(8, (TOKENS,), generator=generator)] + 0.1 * values
    positions = torch.cat([torch.arange(40), torch.arange(60, 60 + TOKENS - 40)])
    return replace(
        drawn,
        values=topics,
        positions=positions.expand(LAYERS, HEADS, -1),
        prompt_len=prompt_len,
        true_len=60 + TOKENS - 40,
    )


def alpha(base: str, stats: str, **options: str) -> Alpha:
    """As kv_options would make it; with `stats` where the base needs it."""
    if base.startswith("triattention"):
        base = f"triattention[stats:{stats};{base.partition('[')[2].rstrip(']')}]"
    text = ";".join(f"{name}:{value}" for name, value in {"base": base, **options}.items())
    policy = build(Alpha, parse_options(text))
    assert isinstance(policy, Alpha)
    return policy


def standardised(scores: torch.Tensor, competing: list[int]) -> torch.Tensor:
    """fp64 ``[N]``, row by row."""
    rows = []
    for row in scores.double().flatten(0, 1):
        among = row[competing]
        rows.append((row - among.mean()) / among.std(unbiased=False).clamp(min=1e-6))
    return torch.stack(rows).mean(dim=0)


@bases
@pytest.mark.parametrize("redundancy", get_args(Redundancy))
@pytest.mark.parametrize("diversity", ["0.5", "3"])
def test_tokens_are_chosen_one_by_one_beside_those_that_the_base_always_keeps(
    base: str, redundancy: Redundancy, diversity: str, stats: str
) -> None:
    policy, given = alpha(base, stats, redundancy=redundancy, diversity=diversity), candidates()
    kept = policy.select(given, 50, PERIOD, noise_of(LAYERS))
    assert kept.shape == (LAYERS, HEADS, 50)
    assert len(kept.flatten(0, 1).unique(dim=0)) == 1
    prompt = 10 if base.startswith("triattention") else 0
    sinks, recent = {"triattention": (0, 0), "vase-dkv": (2, 5)}.get(base.partition("[")[0], (4, PERIOD))
    stay = sorted({*range(max(prompt, sinks)), *range(TOKENS - recent, TOKENS)})
    competing = [token for token in range(TOKENS) if token not in stay]
    expected = greedy_diversity_reference(
        standardised(policy.scorer.scores(given, noise_of(LAYERS)), competing),
        given.require("values").double().mean(dim=(0, 1)).float(),
        torch.zeros(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(stay, dtype=torch.int64), True),
        50,
        weight=float(diversity),
        redundancy=redundancy,
    )
    assert kept[0, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("prompt_len", [0, 10, 45, 200])
@pytest.mark.parametrize("options", ["sinks:0", "sinks:3;recent:5", "recent:none"])
def test_without_diversity_it_is_its_base_with_one_set(prompt_len: int, options: str, stats: str) -> None:
    base = f"triattention[mode:global;{options}]"
    of_alpha, given = alpha(base, stats, diversity="0"), candidates(prompt_len=prompt_len)
    of_base = of_alpha.scorer
    assert isinstance(of_base, TriAttention)
    assert of_base.mode == "global"
    kept = (policy.select(given, 50, PERIOD, noise_of(LAYERS)) for policy in (of_alpha, of_base))
    assert torch.equal(*kept)


@dataclass(frozen=True)
class Told(ScoredPolicy):
    """Scores that are values of a channel; fp32 in which neighbours differ in the last bit, or NaN."""

    name: ClassVar[str] = "told"

    def needs(self, period: int) -> Needs:
        return Needs(keys=True)

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        return candidates.require("keys")[:1, :1, :, 0]


TOLD = f"{__name__}:Told"


def told(scores: list[float], values: list[list[float]]) -> Candidates:
    keys = torch.tensor(scores, dtype=torch.float32)[None, None, :, None]
    return Candidates(keys.shape[:3], keys=keys, values=torch.tensor(values, dtype=torch.float32)[None, None])


def test_without_diversity_the_last_bit_of_a_score_decides() -> None:
    rising = (
        torch.tensor([1e9]).repeat(40).view(torch.int32).add(torch.arange(40, dtype=torch.int32)).view(torch.float32)
    )
    given = told(rising.tolist(), [[1.0]] * 40)
    policy = Alpha(base=TOLD, diversity=0, sinks=0, recent=0)
    assert policy.select(given, 7, PERIOD, noise_of(1)).tolist() == [[[*range(33, 40)]]]


def test_without_diversity_scores_too_close_to_tell_in_standard_deviations_decide() -> None:
    given = told([1e-20, 3e-20, 2e-20, 1e9], [[1.0]] * 4)
    assert Alpha(base=TOLD, diversity=0, sinks=0, recent=0).select(given, 2, PERIOD, noise_of(1)).tolist() == [[[1, 3]]]


@bases
def test_without_diversity_a_score_for_each_head_is_brought_to_one(base: str, stats: str) -> None:
    policy, given = alpha(base, stats, diversity="0", sinks="3", recent="6"), candidates(prompt_len=0)
    scores = standardised(policy.scorer.scores(given, noise_of(LAYERS)), list(range(3, TOKENS - 6)))
    best = scores[3 : TOKENS - 6].topk(30).indices + 3
    kept = policy.select(given, 39, PERIOD, noise_of(LAYERS))
    assert kept[0, 0].tolist() == [0, 1, 2, *sorted(best.tolist()), *range(TOKENS - 6, TOKENS)]


def test_like_tokens_lose_to_unlike_ones() -> None:
    given = told([5, 4, 3, 2, 1, 0], [[2, 0], [1, 0], [1, 0.1], [0, 1], [0, 7], [-1, 0]])
    kept = [
        Alpha(base=TOLD, diversity=diversity, sinks=0, recent=0).select(given, 3, PERIOD, noise_of(1)).tolist()[0][0]
        for diversity in (0, 0.7, 1.5, 9)
    ]
    assert kept == [[0, 1, 2], [0, 1, 3], [0, 3, 5], [0, 3, 5]]


def test_tokens_that_are_always_kept_make_like_ones_redundant() -> None:
    given = told([5, 4, 3, 0, 0, 0], [[0, 1], [1, 0], [0, 2], [9, 9], [0, 1], [0, 3]])
    without, beside = (
        Alpha(base=TOLD, sinks=0, recent=recent, diversity=4).select(given, 3, PERIOD, noise_of(1)).tolist()[0][0]
        for recent in (0, 2)
    )
    assert without == [0, 1, 2]
    assert beside == [1, 4, 5]


def test_a_score_that_is_no_number_is_the_highest_and_spoils_no_other() -> None:
    scores, values = torch.randn(30, generator=torch.Generator().manual_seed(0)), torch.eye(30)
    plain = Alpha(base=TOLD, sinks=0, recent=0).select(told(scores.tolist(), values.tolist()), 9, PERIOD, noise_of(1))
    worst = int(scores.argmin())
    scores[worst] = torch.nan
    kept = Alpha(base=TOLD, sinks=0, recent=0).select(told(scores.tolist(), values.tolist()), 10, PERIOD, noise_of(1))
    assert sorted({*plain[0, 0].tolist(), worst}) == kept[0, 0].tolist()


def test_the_signature_is_the_mean_over_layers_and_heads() -> None:
    values = random_candidates(5, 3, 40, 16, dtype=torch.bfloat16).require("values")
    found = signatures(values)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, values.float().mean(dim=(0, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prompt_len", [50, 55, 200])
def test_where_the_prompt_fills_the_budget_the_base_decides(prompt_len: int, stats: str) -> None:
    given = candidates(prompt_len=prompt_len)
    of_alpha = alpha("triattention[mode:global;recent:6]", stats)
    kept = (policy.select(given, 40, PERIOD, noise_of(LAYERS)) for policy in (of_alpha, of_alpha.scorer))
    assert torch.equal(*kept)


@bases
@pytest.mark.parametrize("diversity", ["0", "0.5"])
def test_sinks_and_recent_tokens_of_its_own_go_before_those_of_the_base(base: str, diversity: str, stats: str) -> None:
    policy = alpha(base, stats, sinks="3", recent="6", diversity=diversity)
    assert policy.forced(PERIOD) == 9
    assert (policy.scorer.sinks, policy.scorer.recent) == (3, 6)
    kept = policy.select(candidates(), 40, PERIOD, noise_of(LAYERS))[0, 0].tolist()
    assert {0, 1, 2, *range(TOKENS - 6, TOKENS)} <= set(kept)


def test_sinks_and_recent_tokens_are_those_of_the_base_by_default(stats: str) -> None:
    forced = {
        base: alpha(base, stats).forced(PERIOD) for base in ("keydiff", "keydiff[sinks:2;recent:5]", "triattention")
    }
    assert forced == {"keydiff": 4 + PERIOD, "keydiff[sinks:2;recent:5]": 7, "triattention": 0}


def test_its_needs_are_those_of_the_base_and_values(stats: str) -> None:
    assert alpha("triattention", stats).needs(PERIOD) == Needs(keys=True, values=True, positions=True)
    assert alpha("keydiff", stats).needs(PERIOD) == Needs(keys=True, values=True)
    assert alpha("random", stats).needs(PERIOD) == Needs(values=True)
    assert alpha("random", stats).shares == Granularity.GLOBAL


def test_checks_are_those_of_the_base(stats: str) -> None:
    with pytest.raises(ValueError, match="triattention needs stats:FILE, statistics of the model's queries"):
        Alpha().check(100, PERIOD)
    with pytest.raises(ValueError, match="kv_budget=12 leaves nothing to choose: keydiff always keeps 12 tokens"):
        Alpha(base="keydiff").check(12, PERIOD)
    Alpha(base="keydiff", sinks=3).check(12, PERIOD)
    policy = alpha("triattention", stats)
    policy.check(1, PERIOD)
    policy.fit(ModelShape(LAYERS, 2 * HEADS, HEADS, HEAD_DIM, 10000.0))
    with pytest.raises(ValueError, match="but this model has 9 layers"):
        policy.fit(ModelShape(9, 2 * HEADS, HEADS, HEAD_DIM, 10000.0))


def test_evictions_are_due_when_the_base_says() -> None:
    policy = Alpha(base="keydiff")
    assert [policy.due(resident, 100, 64) for resident in (163, 164)] == [False, True]
    assert [policy.n_keep(resident, 100) for resident in (63, 164)] == [63, 100]


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        pytest.param("keydif", "'keydif' is not known; did you mean 'keydiff'?", id="unknown"),
        pytest.param("snapkv", "'snapkv' is not one score per token alone; policies that are include", id="no score"),
        pytest.param("alpha", "'alpha' is not one score per token alone", id="itself"),
        pytest.param("full", "'full' is not one score per token alone", id="full"),
        pytest.param("keydiff[sink:3]", "'keydiff' has no option 'sink'", id="unknown option"),
        pytest.param("keydiff[sinks:many]", "option 'sinks' must be a whole number, got 'many'", id="wrong value"),
        pytest.param("keydiff[sinks:3", "must end with ']'", id="bracket"),
    ],
)
def test_a_base_that_it_cannot_choose_by_is_refused_in_one_sentence(base: str, reason: str) -> None:
    for attempt in (lambda policy: policy.check(100, PERIOD), lambda policy: policy.needs(PERIOD)):
        with pytest.raises(ValueError, match=re.escape(reason)) as caught:
            attempt(Alpha(base=base))
        assert f"base:{base}" in str(caught.value)
        assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Sampling(Told):
    """Has scores, but does not keep the highest."""

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        raise NotImplementedError


def test_a_base_that_chooses_in_its_own_way_is_refused() -> None:
    with pytest.raises(ValueError, match="Sampling' is not one score per token alone"):
        Alpha(base=f"{__name__}:Sampling").check(100, PERIOD)


def test_inputs_are_not_modified(stats: str) -> None:
    given, untouched = candidates(), candidates()
    alpha("triattention", stats).select(given, 50, PERIOD, noise_of(LAYERS))
    for name in ("keys", "values", "positions"):
        assert torch.equal(given.require(name), untouched.require(name))
