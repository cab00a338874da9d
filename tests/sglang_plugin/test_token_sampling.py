"""Tokens of requests with a seed and without one in the same batch, around a stand-in for SGLang's sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kvpolicy.kernels.seeded_sampling import filtered_weights, sample_tokens
from kvpolicy.sglang_plugin.token_sampling import NO_SEED, TokenSampling

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

VOCABULARY = 50


class Mask(NamedTuple):
    """As SGLang's capture of what a token was chosen from."""

    weights: torch.Tensor
    token_ids: torch.Tensor | None
    selected_weight: torch.Tensor | None
    batch_rows: torch.Tensor


class Original:
    """SGLang's function: always draws token 7, and remembers what it was called with."""

    def __init__(self, dtype: torch.dtype = torch.int64, mask: Mask | None = None, fail: bool = False) -> None:
        self.dtype, self.mask, self.fail = dtype, mask, fail
        self.seeds_seen: list[torch.Tensor | None] = []
        self.arguments: tuple[Any, ...] = ()
        self.drawn = torch.tensor([])

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, Mask | None]:
        self.arguments = arguments
        self.seeds_seen.append(arguments[2].sampling_seed)
        if self.fail:
            raise RuntimeError("out of memory")
        self.drawn = torch.full((len(arguments[1]),), 7, dtype=self.dtype)
        return self.drawn, self.mask


def batch_of(*seeds: int | None) -> Any:
    return SimpleNamespace(reqs=[SimpleNamespace(seed=seed) for seed in seeds])


def sampling_of(*batches: tuple[int | None, ...]) -> tuple[TokenSampling, list[Any]]:
    """The hooks after these batches came in, and what they left on SGLang's record of each."""
    sampling, infos = TokenSampling(lambda req: req.seed), []
    for number, seeds in enumerate(batches):
        rows = len(seeds)
        generator = torch.Generator().manual_seed(number)
        info = SimpleNamespace(
            device="cpu",
            sampling_seed=None,
            top_ks=torch.randint(2, VOCABULARY, (rows,), generator=generator, dtype=torch.int32),
            top_ps=torch.rand(rows, generator=generator).clamp_min(0.3),
            min_ps=torch.rand(rows, generator=generator) * 0.1,
        )
        assert sampling.after_from_schedule_batch(info, object, batch_of(*seeds), VOCABULARY) is None
        infos.append(info)
    return sampling, infos


def probabilities(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)


def test_under_deterministic_inference_all_have_a_seed() -> None:
    """SGLang then made a tensor of its own, with 42 for requests without a seed."""
    info = SimpleNamespace(device="cpu", sampling_seed=torch.tensor([5, 42]))
    TokenSampling(lambda req: req.seed).after_from_schedule_batch(info, object, batch_of(5, None), VOCABULARY)
    assert info.sampling_seed.tolist() == [5, 42]


def test_the_record_of_a_batch_carries_each_seed_or_that_there_is_none() -> None:
    _, (info,) = sampling_of((5, None, 0, 2**63 - 1))
    assert info.sampling_seed.tolist() == [5, NO_SEED, 0, 2**63 - 1]
    assert info.sampling_seed.dtype == torch.int64


def sample(sampling: TokenSampling, info: Any, original: Original, simple: bool = True) -> tuple[torch.Tensor, Any]:
    """A step of the batch behind `info`."""
    rows = len(info.sampling_seed)
    return sampling.around_sample_from_probs(original, None, probabilities(rows), info, torch.arange(rows), simple)


@pytest.mark.parametrize("simple", [True, False], ids=["whole vocabulary", "filtered"])
def test_without_any_seed_the_tokens_are_sglangs(simple: bool) -> None:
    mask = Mask(probabilities(1), None, torch.tensor([0.1]), torch.tensor([1]))
    sampling, (info,) = sampling_of((None, None, None))
    original, seeds = Original(mask=mask), info.sampling_seed
    tokens, found = sample(sampling, info, original, simple)
    assert tokens is original.drawn
    assert found is mask
    assert original.seeds_seen == [None]
    assert info.sampling_seed is seeds


@pytest.mark.parametrize("simple", [True, False], ids=["whole vocabulary", "filtered"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_in_a_mixed_batch_only_requests_with_a_seed_are_drawn_anew(simple: bool, dtype: torch.dtype) -> None:
    seeds = (None, 11, None, 0, 2**63 - 1)
    sampling, (info,) = sampling_of(seeds)
    noted, probs, positions = info.sampling_seed, probabilities(5), torch.tensor([3, 40, 5, 6, 4000])
    before, original = probs.clone(), Original(dtype)
    tokens, mask = sampling.around_sample_from_probs(original, "sampler", probs, info, positions, simple)
    weights = probs if simple else filtered_weights(probs, info.top_ks, info.top_ps, info.min_ps)
    drawn = sample_tokens(weights, torch.tensor([seed or 0 for seed in seeds]), positions)
    expected = [7 if seed is None else int(token) for seed, token in zip(seeds, drawn, strict=True)]
    assert tokens.tolist() == expected
    assert expected.count(7) == 2
    assert tokens.dtype == dtype
    assert mask is None
    assert original.seeds_seen == [None]
    assert [argument is own for argument, own in zip(original.arguments[1:4], (probs, info, positions), strict=True)]
    assert (original.arguments[0], original.arguments[4]) == ("sampler", simple)
    assert info.sampling_seed is noted
    assert torch.equal(probs, before)


def test_a_filter_of_one_token_leaves_a_seed_no_choice() -> None:
    sampling, (info,) = sampling_of((1, 2, 3))
    info.top_ks = torch.ones(3, dtype=torch.int32)
    tokens, _ = sample(sampling, info, Original(), simple=False)
    assert tokens.tolist() == probabilities(3).argmax(dim=-1).tolist()


def test_a_request_draws_alike_in_any_row_of_any_batch() -> None:
    sampling, (alone, among) = sampling_of((9,), (None, 4, 9))
    probs = probabilities(3)
    for position in range(20):
        places = torch.tensor([1, 2, position])
        one, _ = sampling.around_sample_from_probs(Original(), None, probs[2:], alone, places[2:], True)
        three, _ = sampling.around_sample_from_probs(Original(), None, probs, among, places, True)
        assert one[0] == three[2]


def test_batches_with_and_without_seeds_may_take_turns() -> None:
    sampling, (seeded, others) = sampling_of((5,), (None, None))
    drawn = sample_tokens(probabilities(1), torch.tensor([5]), torch.arange(1)).tolist()
    assert drawn != [7]
    for _ in range(2):
        assert sample(sampling, others, Original())[0].tolist() == [7, 7]
        assert sample(sampling, seeded, Original())[0].tolist() == drawn


@pytest.mark.parametrize("seeds", [(None, None), (None, 3)], ids=["no seed", "a seed"])
def test_the_seeds_are_put_back_when_sglangs_sampler_fails(seeds: tuple[int | None, ...]) -> None:
    sampling, (info,) = sampling_of(seeds)
    noted = info.sampling_seed
    with pytest.raises(RuntimeError, match="out of memory"):
        sample(sampling, info, Original(fail=True))
    assert info.sampling_seed is noted


def test_the_weight_of_the_token_that_was_replaced_is_forgotten() -> None:
    mask = Mask(probabilities(2), torch.tensor([[1], [2]]), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]))
    sampling, (info,) = sampling_of((None, 3))
    assert sample(sampling, info, Original(mask=mask))[1] == mask._replace(selected_weight=None)


def sglang_info(sampling: TokenSampling, *seeds: int | None) -> Any:
    """SGLang's own record of a batch, as the hook leaves it."""
    module = pytest.importorskip("sglang.srt.sampling.sampling_batch_info")
    column = torch.ones(len(seeds))
    info = module.SamplingBatchInfo(
        temperatures=column[:, None],
        top_ps=column,
        top_ks=column.int(),
        min_ps=column,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCABULARY,
        penalizer_orchestrator=SimpleNamespace(filter=lambda _: None, merge=lambda _: None, is_required=False),
        device="cpu",
    )
    sampling.after_from_schedule_batch(info, type(info), batch_of(*seeds), VOCABULARY)
    return info


def test_sglang_keeps_the_seeds_in_step_with_the_batch() -> None:
    sampling = TokenSampling(lambda req: req.seed)
    running = sglang_info(sampling, None, None, None)
    running.merge_batch(sglang_info(sampling, 5, None))
    assert running.sampling_seed.tolist() == [NO_SEED, NO_SEED, NO_SEED, 5, NO_SEED]
    running.filter_batch([3, 0], torch.tensor([3, 0]))
    assert running.sampling_seed.tolist() == [5, NO_SEED]
    running.merge_batch(sglang_info(sampling, 8))
    assert running.copy_for_forward().sampling_seed.tolist() == [5, NO_SEED, 8]


def test_around_sglangs_own_sampler_a_seed_decides_and_the_mask_stays_true() -> None:
    """The whole-vocabulary case of the real function, which reads nothing of its sampler."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler").Sampler
    sampling = TokenSampling(lambda req: req.seed)
    info, probs, positions = sglang_info(sampling, None, 12, None), probabilities(3), torch.tensor([4, 5, 6])
    info.sampling_mask_batch_indices = torch.tensor([1, 2])
    original = sampler._sample_from_probs
    for state in range(5):
        torch.manual_seed(state)
        stock, _ = original(None, probs, SimpleNamespace(**{**vars(info), "sampling_seed": None}), positions, True)
        torch.manual_seed(state)
        tokens, mask = sampling.around_sample_from_probs(original, None, probs, info, positions, True)
        assert tokens[[0, 2]].tolist() == stock[[0, 2]].tolist()
        assert tokens[1] == sample_tokens(probs, info.sampling_seed.clamp_min(0), positions)[1]
        assert tokens.dtype == stock.dtype
        assert mask.selected_weight is None
        assert torch.equal(mask.weights, probs[1:])
