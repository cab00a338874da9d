"""Kept tokens of several requests in one launch against `keep_highest` on each request alone, index by index."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
import torch

from kvpolicy.kernels import keep_highest_paged as op
from kvpolicy.kernels.keep_highest_paged import Kept, keep_highest_paged, keep_highest_paged_reference
from kvpolicy.kernels.paged import Rows
from kvpolicy.policies.selecting import keep_highest

ON_GPUS = (op.BLOCK, op.WARPS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


class Request(NamedTuple):
    tokens: int
    n_keep: int
    recent: int = 0


# In tiles of 64: none, one token, less than one, one, one token more, two; some keep nothing but what they must.
MIXED = [Request(63, 20, 3), Request(0, 0), Request(1, 1), Request(64, 12, 8), Request(65, 64), Request(111, 40, 32)]


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "BLOCK", 64)
    monkeypatch.setattr(op, "WARPS", 1)


def rows_of(requests: list[Request], device: torch.device) -> Rows:
    return Rows.of([torch.arange(request.tokens, device=device) for request in requests])


def normal(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(dtype)


def scattered(shape: tuple[int, ...], dtype: torch.dtype, values: list[float]) -> torch.Tensor:
    chosen = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(shape[-1]))
    return torch.tensor(values, dtype=dtype)[chosen]


def special(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every number that has a rule of its own, among ordinary ones."""
    info = torch.finfo(dtype)
    ends = [info.max, info.min, info.tiny, -info.tiny, info.tiny * info.eps, -info.tiny * info.eps, 0.0, -0.0]
    values = scattered(shape, dtype, [float("nan"), float("inf"), float("-inf"), *ends, 1.0, -1.0])
    return torch.where(torch.arange(shape[-1]) % 3 == 0, normal(shape, dtype), values)


def kept_alone(scores: torch.Tensor, requests: list[Request], sinks: int) -> list[torch.Tensor]:
    """What each request keeps by itself; `keep_highest` wants no more sinks than there are tokens."""
    kept, start = [], 0
    for tokens, n_keep, recent in requests:
        row = scores[..., start : start + tokens].cpu()
        kept.append(keep_highest(row, n_keep, sinks=min(sinks, tokens), recent=recent))
        start += tokens
    return kept


def run(scores: torch.Tensor, requests: list[Request], sinks: int, *, device: torch.device) -> Kept:
    n_keep, recent = [request.n_keep for request in requests], [request.recent for request in requests]
    return keep_highest_paged(scores.to(device), rows_of(requests, device), n_keep, sinks=sinks, recent=recent)


def check(scores: torch.Tensor, requests: list[Request], sinks: int, *, device: torch.device) -> None:
    """Kernel and reference keep what each request keeps alone, and leave the scores as they were."""
    untouched = scores.clone()
    n_keep, recent = [request.n_keep for request in requests], [request.recent for request in requests]
    rows = rows_of(requests, torch.device("cpu"))
    reference = keep_highest_paged_reference(scores, rows, n_keep, sinks=sinks, recent=recent)
    expected = torch.cat(kept_alone(scores, requests, sinks), dim=-1)
    starts = [sum(n_keep[:request]) for request in range(len(requests) + 1)]
    for kept in (run(scores, requests, sinks, device=device), reference):
        assert kept.indices.dtype == kept.starts.dtype == torch.int64
        assert torch.equal(kept.indices.cpu(), expected)
        assert kept.starts.tolist() == starts
    torch.testing.assert_close(scores, untouched, rtol=0, atol=0, equal_nan=True)


@dtypes
@pytest.mark.parametrize("sinks", [0, 1])
def test_every_request_keeps_what_it_keeps_alone(device: torch.device, dtype: torch.dtype, sinks: int) -> None:
    tokens = sum(request.tokens for request in MIXED)
    check(normal((2, 1, tokens), dtype), MIXED, sinks, device=device)


@dtypes
def test_of_equal_scores_the_oldest_stay(device: torch.device, dtype: torch.dtype) -> None:
    tokens = sum(request.tokens for request in MIXED)
    scores = scattered((1, 3, tokens), dtype, [1.0, 2.0, 3.0])
    scores[:, 1] = -7.0
    check(scores, MIXED, 1, device=device)


@dtypes
def test_nan_infinities_zeros_of_both_signs_and_subnormal_numbers(device: torch.device, dtype: torch.dtype) -> None:
    tokens = sum(request.tokens for request in MIXED)
    check(special((1, 3, tokens), dtype), MIXED, 1, device=device)
    zeros = scattered((1, 1, tokens), dtype, [0.0, -0.0])
    check(zeros, MIXED, 1, device=device)


@dtypes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0], ids=str)
def test_rows_of_one_value_keep_sinks_recent_tokens_and_the_oldest(
    device: torch.device, dtype: torch.dtype, value: float
) -> None:
    check(torch.full((1, 1, 70), value, dtype=dtype), [Request(70, 9, 4)], 2, device=device)


@dtypes
def test_all_bits_of_a_score_count(device: torch.device, dtype: torch.dtype) -> None:
    """Neighbouring floats on either side of zero and of one, one unit in the last place apart, the highest newest."""
    around = []
    for start in (-1.0, 0.0, 1.0):
        below, above, far = [], [start], torch.tensor(torch.inf, dtype=dtype)
        for _ in range(5):
            below.insert(0, float(torch.tensor((below or above)[0], dtype=dtype).nextafter(-far)))
            above.append(float(torch.tensor(above[-1], dtype=dtype).nextafter(far)))
        around += below + above
    scores = torch.tensor(around, dtype=dtype)[torch.randperm(33, generator=torch.Generator().manual_seed(0))]
    requests = [Request(33, n_keep) for n_keep in (1, 5, 6, 16, 17, 32)]
    check(scores.repeat(len(requests)).view(1, 1, -1), requests, 0, device=device)


def test_none_all_and_no_tokens(device: torch.device) -> None:
    requests = [Request(63, 0), Request(63, 63), Request(0, 0), Request(64, 64, 64), Request(5, 5, 5)]
    check(normal((1, 2, 195), torch.float32), requests, 0, device=device)
    check(normal((2, 2, 63), torch.float32), [Request(63, 0)], 0, device=device)
    check(normal((2, 2, 0), torch.float32), [Request(0, 0), Request(0, 0)], 0, device=device)


def test_a_row_shorter_than_the_sinks_is_kept_whole(device: torch.device) -> None:
    check(normal((1, 2, 20), torch.float32), [Request(3, 3), Request(0, 0), Request(17, 6)], 4, device=device)


@dtypes
@pytest.mark.parametrize("n_keep", [1024, 4096])
def test_a_long_row(device: torch.device, dtype: torch.dtype, n_keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # tiles of the length that GPUs run
    scores = normal((1, 1, 4160), torch.bfloat16).to(dtype)  # so many of 8 significant bits, that there are ties
    check(scores, [Request(4160, n_keep, 64)], 4, device=device)


def test_neither_the_length_of_tiles_nor_the_other_requests_matter(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = special((1, 2, sum(request.tokens for request in MIXED)), torch.float32)
    parts = list(zip(MIXED, scores.split([request.tokens for request in MIXED], dim=-1), strict=True))
    expected = dict(zip(MIXED, kept_alone(scores, MIXED, 1), strict=True))
    for seed, (block, warps) in enumerate([(32, 1), ON_GPUS]):
        monkeypatch.setattr(op, "BLOCK", block)
        monkeypatch.setattr(op, "WARPS", warps)
        random.Random(seed).shuffle(parts)
        requests = [request for request, _ in parts]
        kept = run(torch.cat([part for _, part in parts], dim=-1), requests, 1, device=device)
        for request, indices in zip(requests, kept.indices.split([r.n_keep for r in requests], dim=-1), strict=True):
            assert torch.equal(indices.cpu(), expected[request]), request


def test_strides_of_layers_and_heads_do_not_matter(device: torch.device) -> None:
    requests = [Request(40, 11, 2), Request(30, 7, 1)]
    swapped = normal((2, 3, 70), torch.float32).transpose(0, 1)
    check(swapped[1:], requests, 1, device=device)
    check(normal((1, 1, 70), torch.float32).expand(2, 2, 70), requests, 1, device=device)
    check(normal((1, 2, 100), torch.float32)[..., 17:87], requests, 1, device=device)


def test_all_requests_layers_and_heads_are_one_launch(device: torch.device, launches: Counter[str]) -> None:
    run(normal((2, 2, 26), torch.float32), [Request(13, 5, 2), Request(0, 0), Request(13, 6, 3)], 2, device=device)
    assert launches == {"_keep_highest_kernel": 1}


@pytest.mark.parametrize(
    ("request_", "sinks", "sentence"),
    [
        pytest.param(Request(9, 10), 0, "n_keep = 10 <= N = 9", id="more than there are"),
        pytest.param(Request(9, 3, 2), 2, "must hold", id="sinks and recent tokens do not fit"),
        pytest.param(Request(9, 3, -1), 2, "must hold", id="a negative number of recent tokens"),
        pytest.param(Request(9, 3), -1, "must not be negative", id="a negative number of sinks"),
        pytest.param(Request(8, 3), 0, "must have rows.total = 8 tokens", id="scores of more tokens"),
    ],
)
def test_numbers_that_do_not_fit_are_programming_errors(request_: Request, sinks: int, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        run(torch.zeros(1, 1, 9), [request_], sinks, device=torch.device("cpu"))


def test_scores_that_the_kernel_does_not_read_are_programming_errors() -> None:
    requests, cpu = [Request(9, 3)], torch.device("cpu")
    with pytest.raises(AssertionError, match="must be float32 or float64"):
        run(torch.zeros(1, 1, 9, dtype=torch.bfloat16), requests, 0, device=cpu)
    with pytest.raises(AssertionError, match="tokens must be adjacent"):
        run(torch.zeros(1, 1, 18)[..., ::2], requests, 0, device=cpu)
    with pytest.raises(AssertionError, match=r"rows\.longest = 2097152 must be at most"):
        run(torch.zeros(1, 1, 2**21), [Request(2**21, 3)], 0, device=cpu)
    with pytest.raises(AssertionError, match=r"layers \* heads = 65536 must be below"):
        run(torch.zeros(1, 1, 9).expand(256, 256, 9), requests, 0, device=cpu)
