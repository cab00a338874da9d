"""Quest against loops over pages and channels."""

from __future__ import annotations

import random

import pytest
import torch

from kvpolicy.policies.options import build
from kvpolicy.policies.quest import Quest
from kvpolicy.policies.reading import ReadingPolicy, ServedModel
from kvpolicy.policies.registry import policy_type
from tests.policies.candidates import random_candidates
from tests.policies.matrix import noise_of

MODEL = ServedModel(4, 4, 2, 0, 8, torch.device("cpu"))


def scores_by_loops(query: torch.Tensor, keys: torch.Tensor, page: int) -> list[list[float]]:
    """Per query head the score of every page, an incomplete one included; `keys` ``[H_kv, N, D]``."""
    scores = []
    for head, q in enumerate(query.double()):
        of_head = keys[head * len(keys) // len(query)].double()
        pages = [of_head[first : first + page] for first in range(0, len(of_head), page)]
        scores.append(
            [sum(max(float(x * c.max()), float(x * c.min())) for x, c in zip(q, p.T, strict=True)) for p in pages]
        )
    return scores


def summaries_of(policy: Quest, keys: torch.Tensor) -> torch.Tensor:
    complete = keys.shape[1] // policy.page
    return policy.summarise(keys[:, : complete * policy.page].unflatten(1, (complete, policy.page)), 0, 9)


def choose(policy: Quest, query: torch.Tensor, keys: torch.Tensor, budget: int) -> torch.Tensor:
    return policy.choose(query, summaries_of(policy, keys), keys.shape[1], budget, 9)


class Case:
    """A random request of an ugly shape, with a budget that it does not fit into."""

    def __init__(self, seed: int, *, whole_numbers: bool) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.policy = Quest(page=rng.choice([1, 2, 3, 7, 16]))
        heads, group, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 5, 7]), rng.choice([1, 3, 16, 60])
        least = 3 * self.policy.page
        tokens = rng.choice(
            [least + 1, least + 2, rng.randint(least + 1, 12 * self.policy.page), 12 * self.policy.page]
        )
        self.budget = rng.choice([least, tokens - 1, rng.randint(least, tokens - 1)])
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])

        def draw(*shape: int) -> torch.Tensor:
            if whole_numbers:  # exact in every dtype, with many ties
                return torch.randint(-3, 4, shape, generator=generator).to(dtype)
            return torch.randn(*shape, generator=generator).to(dtype)

        self.query, self.keys = draw(heads * group, head_dim), draw(heads, tokens, head_dim)


@pytest.mark.parametrize("seed", range(200))
def test_the_best_pages_and_the_newest_are_read_and_of_equal_ones_the_oldest(seed: int) -> None:
    case = Case(seed, whole_numbers=True)
    pages = choose(case.policy, case.query, case.keys, case.budget)
    for chosen, scores in zip(pages.tolist(), scores_by_loops(case.query, case.keys, case.policy.page), strict=True):
        newest = len(scores) - 1
        best = sorted(range(newest), key=lambda page: (-scores[page], page))
        expected = {newest, *best[: case.budget // case.policy.page - 1]}
        assert {page for page, read in enumerate(chosen) if read} == expected


@pytest.mark.parametrize("seed", range(60))
def test_no_page_that_is_read_scores_lower_than_one_that_is_not(seed: int) -> None:
    case = Case(seed, whole_numbers=False)
    pages = choose(case.policy, case.query, case.keys, case.budget)
    assert pages.sum(dim=1).tolist() == [case.budget // case.policy.page] * len(case.query)
    for chosen, scores in zip(pages.tolist(), scores_by_loops(case.query, case.keys, case.policy.page), strict=True):
        assert chosen[-1]
        read = [score for score, is_read in zip(scores[:-1], chosen[:-1], strict=True) if is_read]
        left = [score for score, is_read in zip(scores, chosen, strict=True) if not is_read]
        assert min(read) >= max(left) - 1e-4


def test_a_page_score_bounds_q_times_k_of_its_tokens() -> None:
    candidates = random_candidates(1, 2, 64, 60, queries=1)
    query, keys = candidates.require("queries")[0, :, 0], candidates.require("keys")[0]
    scores = torch.tensor(scores_by_loops(query, keys, 16))
    products = torch.einsum("hgd,htd->hgt", query.view(2, 2, 60), keys).view(4, 4, 16)
    assert (scores >= products.amax(dim=-1) - 1e-4).all()


def test_a_token_that_matches_the_query_is_read_wherever_it_stands() -> None:
    policy = Quest()
    for token in range(0, 160, 7):
        keys = torch.randn(1, 170, 32, generator=torch.Generator().manual_seed(token)) * 0.1
        keys[0, token] = 3.0
        assert choose(policy, torch.ones(2, 32), keys, 48)[:, token // 16].all()


def test_a_key_that_is_not_a_number_is_for_the_model_to_show() -> None:
    keys = torch.randn(2, 100, 8)
    keys[1, 20] = torch.nan
    pages = choose(Quest(), torch.randn(4, 8), keys, 48)
    assert pages.sum(dim=1).tolist() == [3] * 4
    assert pages[2:, 1].all()


def test_summaries_of_pages_do_not_depend_on_when_they_were_made() -> None:
    policy, keys = Quest(page=4), torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = summaries_of(policy, keys)
    parts = [
        policy.summarise(keys[:, a * 4 : b * 4].unflatten(1, (b - a, 4)), a, 9) for a, b in ((0, 3), (3, 4), (4, 10))
    ]
    assert whole.shape == (2, 10, 12)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_inputs_are_not_modified() -> None:
    case = Case(3, whole_numbers=False)
    summaries = summaries_of(case.policy, case.keys)
    copies = case.query.clone(), summaries.clone()
    case.policy.choose(case.query, summaries, case.keys.shape[1], case.budget, 9)
    assert torch.equal(case.query, copies[0])
    assert torch.equal(summaries, copies[1])


def test_everything_is_read_in_the_first_layers_and_while_it_fits() -> None:
    policy = Quest()
    assert [policy.reads_all(layer, 1000, 64) for layer in (0, 1, 2, 3)] == [True, True, False, False]
    assert [policy.reads_all(2, length, 64) for length in (1, 63, 64, 65)] == [True, True, True, False]
    assert not Quest(dense_layers=0).reads_all(0, 65, 64)


@pytest.mark.parametrize("length", [49, 50, 63, 64, 65, 500])
@pytest.mark.parametrize("budget", [48, 49, 63])
def test_no_head_reads_more_than_the_budget(length: int, budget: int) -> None:
    policy = Quest()
    assert not policy.reads_all(2, length, 48)
    tokens = choose(policy, torch.randn(4, 8), torch.randn(2, length, 8), budget)
    sizes = torch.tensor([16] * (tokens.shape[1] - 1) + [(length - 1) % 16 + 1])
    assert int((tokens * sizes).sum(dim=1).max()) <= budget


def test_a_budget_below_three_pages_is_refused() -> None:
    Quest().check(48, 64)
    Quest(page=4).check(12, 64)
    with pytest.raises(ValueError, match=r"kv_budget=47 is less than the 3 pages of 16 tokens .* at least 48; raise"):
        Quest().check(47, 64)


def test_it_is_never_due_and_keeps_everything() -> None:
    policy = build(policy_type("quest"), {"page": "8", "dense_layers": "0"})
    assert policy == Quest(page=8, dense_layers=0)
    assert isinstance(policy, ReadingPolicy)
    assert policy.per_query_head
    assert not any(policy.due(resident, 100, 64) for resident in (1, 100, 164, 10**6))
    assert policy.n_keep(1000, 100) == 1000
    assert policy.reader(MODEL) is policy
    with pytest.raises(AssertionError, match="quest keeps every token"):
        policy.select(random_candidates(1, 1, 10, 4), 5, 64, noise_of(1))


def test_what_it_saves_is_said_plainly() -> None:
    assert "saves no memory" in Quest.card.score
    assert "It saves no memory" in (Quest.__doc__ or "")
