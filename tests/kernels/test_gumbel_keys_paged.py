"""Random numbers of several requests in one launch against `Noise` for each alone, and samples drawn with them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from kvpolicy.kernels import gumbel_keys_paged as op
from kvpolicy.kernels.gumbel_keys_paged import (
    gumbel_keys_paged,
    gumbel_keys_paged_reference,
    uniform_paged,
    uniform_paged_reference,
)
from kvpolicy.kernels.keep_highest_paged import keep_highest_paged
from kvpolicy.kernels.paged import Rows
from kvpolicy.kernels.weighted_sample import SMALLEST_WEIGHT, weighted_sample
from kvpolicy.policies.base import Noise

LAYERS = (3, 9)
HEADS = 3
# (tokens, seed, eviction): rows of no token, one, less than a tile, one, one token more, two; the largest seeds.
REQUESTS = [(63, 5, 0), (0, 1, 1), (1, -1, 7), (64, 2**63 - 1, 0), (65, -(2**63), 2**40), (111, 5, 1)]
TOTAL = sum(tokens for tokens, _, _ in REQUESTS)
# fp64 logarithms of different libraries differ by a unit or two in the last place.
LAST_BITS = 2.0**-50


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "BLOCK", 64)
    monkeypatch.setattr(op, "WARPS", 1)


def keyed(requests: list[tuple[int, int, int]], device: torch.device) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Rows, seeds and evictions."""
    rows = Rows.of([torch.arange(tokens, device=device) for tokens, _, _ in requests])
    seeds, evictions = ([request[key] for request in requests] for key in (1, 2))
    return rows, torch.tensor(seeds, device=device), torch.tensor(evictions, device=device)


def drawn_alone(requests: list[tuple[int, int, int]], first_head: int = 0, stream: int = 0) -> list[torch.Tensor]:
    return [
        Noise(seed, eviction, LAYERS, first_head=first_head).uniform(HEADS, tokens, stream=stream)
        for tokens, seed, eviction in requests
    ]


def random_weights(tokens: int) -> torch.Tensor:
    return torch.rand(len(LAYERS), HEADS, tokens, generator=torch.Generator().manual_seed(tokens))


def assert_keys_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=LAST_BITS, atol=LAST_BITS, equal_nan=True)


@pytest.mark.parametrize(
    ("first_head", "stream"),
    [
        pytest.param(0, 0, id="first head 0, stream 0"),
        pytest.param(1, 1, id="first head 1, stream 1"),
        pytest.param(16, 2**40, id="first head 16, stream 2**40"),
        pytest.param(0, -1, id="stream -1"),
    ],
)
def test_uniform_numbers_are_those_of_each_request_alone_bit_for_bit(
    device: torch.device, first_head: int, stream: int
) -> None:
    expected = torch.cat(drawn_alone(REQUESTS, first_head, stream), dim=-1)
    for draw, where in ((uniform_paged, device), (uniform_paged_reference, torch.device("cpu"))):
        drawn = draw(*keyed(REQUESTS, where), LAYERS, HEADS, first_head, stream)
        assert drawn.dtype == torch.float64
        assert torch.equal(drawn.cpu(), expected)


def test_a_long_row_has_the_numbers_of_the_request_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # tiles of the length that GPUs run
    requests = [(4160, 3, 2)]
    assert torch.equal(uniform_paged(*keyed(requests, device), LAYERS, HEADS).cpu(), drawn_alone(requests)[0])


def test_a_key_is_that_of_the_weight_and_the_uniform_number(device: torch.device) -> None:
    weights = random_weights(TOTAL)
    weights[..., ::7] = 0.0
    expected = gumbel_keys_paged_reference(weights, *keyed(REQUESTS, torch.device("cpu")), LAYERS, 2, 1)
    u = torch.cat(drawn_alone(REQUESTS, 2, 1), dim=-1)
    assert_keys_equal(expected, weights.double().clamp_min(SMALLEST_WEIGHT).log() - (-u.log()).log())
    untouched = weights.clone()
    keys = gumbel_keys_paged(weights.to(device), *keyed(REQUESTS, device), LAYERS, 2, 1)
    assert keys.dtype == torch.float64
    assert_keys_equal(keys, expected)
    assert torch.equal(weights, untouched)


def test_weights_at_the_ends_of_fp32(device: torch.device) -> None:
    ends = [0.0, -0.0, 2.0**-149, 2.0**-126, torch.finfo(torch.float32).max, float("inf"), float("nan"), -1.0]
    weights = torch.tensor(ends).expand(len(LAYERS), HEADS, len(ends))
    request = [(len(ends), 1, 1)]
    keys = gumbel_keys_paged(weights.to(device), *keyed(request, device), LAYERS)
    assert_keys_equal(keys, gumbel_keys_paged_reference(weights, *keyed(request, torch.device("cpu")), LAYERS))
    assert (keys[..., 2:5] > keys[..., :2].amax(dim=-1, keepdim=True)).all()
    assert keys[..., 6].isnan().all()


def test_the_highest_keys_are_the_weighted_sample_of_each_request(device: torch.device) -> None:
    weights = random_weights(TOTAL)
    weights[0] = weights[0].mul(4).round()  # many zeros and ties
    rows, seeds, evictions = keyed(REQUESTS, device)
    draws = [tokens // 3 for tokens in rows.lengths]
    keys = gumbel_keys_paged(weights.to(device), rows, seeds, evictions, LAYERS)
    kept = keep_highest_paged(keys, rows, draws, sinks=0, recent=[0] * len(draws)).indices.cpu().split(draws, dim=-1)
    alone = zip(weights.split(rows.lengths, dim=-1), drawn_alone(REQUESTS), draws, kept, strict=True)
    for part, u, n, indices in alone:
        assert torch.equal(indices, weighted_sample(part, n, u).sort(dim=-1).values)


def test_the_other_requests_do_not_matter(device: torch.device) -> None:
    weights = random_weights(TOTAL).split([tokens for tokens, _, _ in REQUESTS], dim=-1)
    numbers: dict[tuple[int, int, int], list[torch.Tensor]] = {request: [] for request in REQUESTS}
    for seed in (0, 1):
        order = list(zip(REQUESTS, weights, strict=True))
        random.Random(seed).shuffle(order)
        requests = [request for request, _ in order]
        keys = gumbel_keys_paged(torch.cat([w for _, w in order], -1).to(device), *keyed(requests, device), LAYERS)
        for request, part in zip(requests, keys.split([tokens for tokens, _, _ in requests], dim=-1), strict=True):
            numbers[request].append(part)
    for request, (first, second) in numbers.items():
        assert torch.equal(first, second), request


def test_strides_of_layers_and_heads_do_not_matter(device: torch.device) -> None:
    shared = random_weights(TOTAL)[:1, :1].expand(len(LAYERS), HEADS, TOTAL)
    swapped = random_weights(TOTAL).transpose(0, 1).contiguous().transpose(0, 1)
    for weights in (shared, swapped, random_weights(TOTAL + 5)[..., 3:-2]):
        keys = gumbel_keys_paged(weights.to(device), *keyed(REQUESTS, device), LAYERS)
        expected = gumbel_keys_paged_reference(weights, *keyed(REQUESTS, torch.device("cpu")), LAYERS)
        assert_keys_equal(keys, expected)


def test_no_tokens_and_no_layers(device: torch.device) -> None:
    empty = keyed([(0, 1, 1), (0, 2, 2)], device)
    assert uniform_paged(*empty, LAYERS, HEADS).shape == (2, 3, 0)
    assert gumbel_keys_paged(torch.ones(2, 3, 0, device=device), *empty, LAYERS).shape == (2, 3, 0)
    assert uniform_paged(*keyed(REQUESTS, device), (), HEADS).shape == (0, 3, TOTAL)


def test_all_requests_layers_and_heads_are_one_launch(device: torch.device, launches: Counter[str]) -> None:
    gumbel_keys_paged(random_weights(TOTAL).to(device), *keyed(REQUESTS, device), LAYERS)
    assert launches == {"_gumbel_keys_kernel": 1}


def test_arguments_that_do_not_fit_are_programming_errors() -> None:
    rows, seeds, evictions = keyed(REQUESTS, torch.device("cpu"))
    weights = random_weights(TOTAL)
    with pytest.raises(AssertionError, match="must be float32"):
        gumbel_keys_paged(weights.double(), rows, seeds, evictions, LAYERS)
    with pytest.raises(AssertionError, match="layers, tokens and device of weights"):
        gumbel_keys_paged(weights[..., 1:], rows, seeds, evictions, LAYERS)
    with pytest.raises(AssertionError, match="layers, tokens and device of weights"):
        gumbel_keys_paged(weights, rows, seeds, evictions, (1, 2, 3))
    with pytest.raises(AssertionError, match="tokens must be adjacent"):
        gumbel_keys_paged(random_weights(2 * TOTAL)[..., ::2], rows, seeds, evictions, LAYERS)
    with pytest.raises(AssertionError, match="must be int64"):
        uniform_paged(rows, seeds.int(), evictions, LAYERS, HEADS)
    with pytest.raises(AssertionError, match="of seeds and evictions must be"):
        uniform_paged(rows, seeds, evictions[1:], LAYERS, HEADS)
