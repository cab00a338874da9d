"""Paged window attention against the reference request by request, which itself is held to loops in fp64."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvpolicy.kernels.paged import Pool, Rows
from kvpolicy.kernels.window_attention_paged import window_attention_paged, window_attention_paged_reference
from tests.kernels.attention_by_loops import attention_by_loops
from tests.kernels.compiling import machine_code
from tests.kernels.far_slots import far_buffer
from tests.kernels.interpreting import interpreted
from tests.kernels.paged_cases import random_pool, shuffled_rows
from tests.kernels.tolerance import assert_close

PLAIN: dict[str, Any] = {"domain": "candidates", "group": "mean", "pooling": "none", "kernel": 1}
KERNELS = {"avg": 5, "max": 7, "none": 1}
ARMS: list[dict[str, Any]] = [
    {"domain": domain, "group": group, "pooling": pooling, "kernel": KERNELS[pooling]}
    for domain, group, pooling in itertools.product(("candidates", "all"), ("mean", "max"), KERNELS)
]
arms = pytest.mark.parametrize("arm", ARMS, ids=lambda arm: " ".join(map(str, arm.values())))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Size:
    """Tokens of each request, how many of them are scored, queries of each, query heads of a KV head, and D."""

    lengths: tuple[int, ...]
    older: tuple[int, ...]
    window: int
    group_size: int
    head_dim: int
    heads: int = 2
    layers: int = 2

    def __str__(self) -> str:
        tokens = ",".join(f"{scored}of{length}" for scored, length in zip(self.older, self.lengths, strict=True))
        return f"{tokens} w={self.window} G={self.group_size} D={self.head_dim}"

    def draw(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Pool, Rows]:
        """Queries, keys and rows; slots are scattered, and those of nobody hold NaN."""
        seed, slots = sum(self.lengths) + self.head_dim, sum(self.lengths) + 9
        shape = (len(self.lengths), self.layers, self.heads * self.group_size, self.window, self.head_dim)
        queries = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(2).to(device, dtype)
        rows = shuffled_rows(self.lengths, slots, device, seed)
        return queries, random_pool((self.layers, slots, self.heads, self.head_dim), dtype, rows, seed), rows


BATCH = Size((63, 0, 111), (50, 0, 103), window=5, group_size=2, head_dim=64)
SMALL = Size((63, 0, 111), (50, 0, 103), window=5, group_size=2, head_dim=64, heads=1, layers=1)
SIZES = (
    SMALL,
    Size((2, 63), (1, 62), window=1, group_size=1, head_dim=60, layers=1),
    Size((200,), (195,), window=5, group_size=7, head_dim=80, heads=1, layers=1),
    Size((9, 111), (1, 90), window=8, group_size=2, head_dim=96, heads=1, layers=1),
    Size((63, 17, 16), (47, 1, 0), window=16, group_size=1, head_dim=128, heads=1, layers=1),
    Size((111,), (40,), window=16, group_size=7, head_dim=60, heads=1, layers=1),
    Size((65, 200), (1, 130), window=64, group_size=1, head_dim=64, heads=1, layers=1),
    Size((111,), (47,), window=64, group_size=2, head_dim=128, heads=1, layers=1),
    Size((63,), (54,), window=8, group_size=3, head_dim=256, heads=1, layers=1),
    Size((64, 65), (59, 60), window=5, group_size=2, head_dim=16, heads=1, layers=1),
)


@arms
def test_scores_are_those_of_the_reference(device: torch.device, arm: dict[str, Any]) -> None:
    queries, keys, rows = BATCH.draw(device)
    scores = window_attention_paged(queries, keys, rows, BATCH.older, **arm)
    assert scores.dtype == torch.float32
    assert_close(scores, window_attention_paged_reference(queries, keys, rows, BATCH.older, **arm))
    recent = torch.cat([torch.arange(n) >= k for n, k in zip(BATCH.lengths, BATCH.older, strict=True)])
    assert torch.equal(scores.isinf().cpu(), recent.expand(2, 2, -1))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_size_is_scored_as_by_the_reference(device: torch.device, size: Size, dtype: torch.dtype) -> None:
    queries, keys, rows = size.draw(device, dtype)
    # Four arms each, so that every size meets all twelve, and every dtype too.
    for arm in ARMS[(SIZES.index(size) + list(DTYPES.values()).index(dtype)) % 3 :: 3]:
        scores = window_attention_paged(queries, keys, rows, size.older, **arm)
        assert_close(scores, window_attention_paged_reference(queries, keys, rows, size.older, **arm))


@arms
def test_the_reference_is_the_definition(arm: dict[str, Any]) -> None:
    size = Size((12, 0, 20), (9, 0, 13), window=3, group_size=2, head_dim=16)
    queries, keys, rows = size.draw(torch.device("cpu"))
    scores = window_attention_paged_reference(queries, keys, rows, size.older, **arm)
    grouped = queries.unflatten(2, (2, 2))  # [R, L, H_kv, G, w, D]
    for layer, head in itertools.product(range(2), range(2)):
        for request, start in ((0, 0), (2, 12)):
            older, end = size.older[request], start + size.lengths[request]
            row = keys.buffers[layer][rows.slots[start:end], head]
            expected = attention_by_loops(grouped[request, layer, head], row, older, **arm)
            assert_close(scores[layer, head, start : start + older], torch.tensor(expected))
            assert bool((scores[layer, head, start + older : end] == torch.inf).all())


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("arm", ARMS[1:12:4] + ARMS[6:7], ids=lambda arm: " ".join(map(str, arm.values())))
def test_the_size_of_a_tile_does_not_matter(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, arm: dict[str, Any], block: int
) -> None:
    from kvpolicy.kernels import window_attention_paged_kernel

    queries, keys, rows = SMALL.draw(device)
    expected = window_attention_paged_reference(queries, keys, rows, SMALL.older, **arm)
    monkeypatch.setattr(window_attention_paged_kernel, "BLOCK", block)
    monkeypatch.setattr(window_attention_paged_kernel, "POOLING_BLOCK", block)
    assert_close(window_attention_paged(queries, keys, rows, SMALL.older, **arm), expected)


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[1], ARMS[10]], ids=lambda arm: " ".join(map(str, arm.values())))
def test_a_request_is_scored_bit_for_bit_alike_in_any_batch(device: torch.device, arm: dict[str, Any]) -> None:
    queries, keys, rows = SMALL.draw(device, torch.float16)
    parts = rows.slots.split(list(SMALL.lengths))
    together = window_attention_paged(queries, keys, rows, SMALL.older, **arm).split(list(SMALL.lengths), dim=-1)
    for order in ((2, 0, 1), (2, 2), (0,), (1,)):
        batch = Rows.of([parts[request] for request in order])
        older = [SMALL.older[request] for request in order]
        scores = window_attention_paged(queries[list(order)], keys, batch, older, **arm)
        assert torch.equal(scores, torch.cat([together[request] for request in order], dim=-1))


@pytest.mark.parametrize(("pooling", "launched"), [("none", 2), ("avg", 3), ("max", 3)])
def test_launches_do_not_grow_with_requests_layers_or_heads(
    device: torch.device, launches: Counter[str], pooling: str, launched: int
) -> None:
    for size in (Size((9,), (3,), window=2, group_size=1, head_dim=16, heads=1, layers=1), BATCH):
        launches.clear()
        queries, keys, rows = size.draw(device)
        window_attention_paged(queries, keys, rows, size.older, **{**PLAIN, "pooling": pooling, "kernel": 3})
        assert launches.total() == launched


def test_the_temperature_divides_the_logits(device: torch.device) -> None:
    queries, keys, rows = SMALL.draw(device)
    for temperature in (0.5, 2.0):
        arm = {**PLAIN, "domain": "all", "temperature": temperature}
        scores = window_attention_paged(queries, keys, rows, SMALL.older, **arm)
        assert_close(scores, window_attention_paged_reference(queries, keys, rows, SMALL.older, **arm))


def test_strides_do_not_matter_and_inputs_stay_as_they_are(device: torch.device) -> None:
    queries, keys, rows = SMALL.draw(device)
    before = [tensor.clone() for tensor in (queries, *keys.buffers)]
    scores = window_attention_paged(queries, keys, rows, SMALL.older, **ARMS[6])
    ring = queries.permute(1, 0, 3, 2, 4).contiguous().permute(1, 0, 3, 2, 4)  # the engine's order
    components_apart = queries.transpose(3, 4).contiguous().transpose(3, 4)
    for view in (ring, components_apart):
        assert not view.is_contiguous()
        assert torch.equal(window_attention_paged(view, keys, rows, SMALL.older, **ARMS[6]), scores)
    for now, then in zip((queries, *keys.buffers), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("domain", ["candidates", "all"])
def test_very_large_logits_give_all_attention_to_one_token(
    device: torch.device, domain: str, dtype: torch.dtype
) -> None:
    # Logits are 2^28 / 8 for the token that a query points at and 0 for the others.
    keys = Pool.of([torch.eye(64)[:20].mul(2.0**14).to(device, dtype).view(20, 1, 64)])
    targets = [3, 3, 19, 19]  # the last token is later than the third query, which then sees only logits of 0
    queries = torch.eye(64)[targets].mul(2.0**14).to(device, dtype).view(1, 1, 1, 4, 64)
    rows = Rows.of([torch.arange(20, device=device)])
    scores = window_attention_paged(queries, keys, rows, [16], **{**PLAIN, "domain": domain})[0, 0, :16]
    alike = 1 / 16 + 1 / 16 if domain == "candidates" else 1 / 19
    expected = [((2 if token == 3 else 0) + alike) / 4 for token in range(16)]
    assert scores.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("arm", ARMS[1::3], ids=lambda arm: " ".join(map(str, arm.values())))
def test_what_is_no_number_stays_in_its_request_layer_and_head(device: torch.device, arm: dict[str, Any]) -> None:
    queries, keys, rows = BATCH.draw(device)
    queries[2, 1, 1, 4, 7] = torch.nan  # the last query of the first KV head's second query head
    scores = window_attention_paged(queries, keys, rows, BATCH.older, **arm)
    assert_close(scores, window_attention_paged_reference(queries, keys, rows, BATCH.older, **arm))
    wrong = torch.zeros(2, 2, 63 + 111, dtype=torch.bool)
    wrong[1, 0, 63 : 63 + 103] = True
    assert torch.equal(scores.isnan().cpu(), wrong)


def test_slots_lie_beyond_what_32_bits_address(device: torch.device) -> None:
    size = Size((40,), (30,), window=8, group_size=2, head_dim=128, heads=8, layers=1)
    queries, near, rows = size.draw(device)
    keys = Pool.of([far_buffer(8, 128, device)])
    end = keys.shape[1] - near.shape[1]
    keys.buffers[0][end:] = near.buffers[0]
    far = Rows.of([rows.slots + end])
    scores = window_attention_paged(queries, keys, far, size.older, **PLAIN)
    assert_close(scores, window_attention_paged_reference(queries, near, rows, size.older, **PLAIN))


def test_no_token_gives_no_score_and_no_launch(device: torch.device, launches: Counter[str]) -> None:
    size = Size((0, 0), (0, 0), window=4, group_size=2, head_dim=16)
    queries, keys, rows = size.draw(device)
    assert window_attention_paged(queries, keys, rows, size.older, **ARMS[0]).shape == (2, 2, 0)
    assert launches.total() == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({"queries": (2, 1, 4, 3, 16)}, "does not fit", id="queries of fewer layers"),
        pytest.param({"queries": (2, 2, 4, 3, 12)}, "does not fit", id="queries of another head size"),
        pytest.param({"queries": (2, 2, 3, 3, 16)}, "must be a multiple", id="a group that is no whole number"),
        pytest.param({"queries": (1, 2, 4, 3, 16)}, "must be of", id="queries of fewer requests"),
        pytest.param({"queries": (2, 2, 4, 0, 16)}, "at least 1", id="no query"),
        pytest.param({"queries": (2, 2, 4, 10, 16), "older": (0, 0)}, "must not be fewer", id="too few tokens"),
        pytest.param({"older": (7, 0)}, "must not reach into", id="a scored token in the window"),
        pytest.param({"older": (6, 1)}, "must not reach into", id="a scored token of nobody"),
        pytest.param({"older": (-1, 0)}, "must not reach into", id="a negative number"),
        pytest.param({"older": (6,)}, "must be of", id="a request without its number"),
        pytest.param({"dtype": torch.float16}, "as the keys", id="queries of another dtype"),
        pytest.param({"kernel": 2}, "must be odd", id="an even kernel"),
        pytest.param({"temperature": 0.0}, "must be positive", id="no temperature"),
    ],
)
def test_what_the_kernels_cannot_do_is_a_programming_error(change: dict[str, Any], sentence: str) -> None:
    size = Size((9, 0), (6, 0), window=3, group_size=2, head_dim=16)
    queries, keys, rows = size.draw(torch.device("cpu"), torch.float32)
    queries = torch.zeros(change.get("queries", queries.shape), dtype=change.get("dtype"))
    arm = {**PLAIN, **{name: change[name] for name in ("kernel", "temperature") if name in change}}
    with pytest.raises(AssertionError, match=sentence):
        window_attention_paged(queries, keys, rows, change.get("older", size.older), **arm)


@pytest.mark.parametrize("group", ["mean", "max"])
def test_products_are_those_of_tensor_cores(group: str) -> None:
    pytest.importorskip("triton")
    size = Size((70,), (5,), window=64, group_size=4, head_dim=128, heads=8, layers=1)
    queries, keys, rows = size.draw(torch.device("cpu"))
    with interpreted() as launched:
        window_attention_paged(queries, keys, rows, size.older, **{**PLAIN, "group": group})
    assert len(launched) == 2
    for launch in launched:
        code = machine_code(launch)
        assert "wgmma" in code.ptx
        assert code.ptx.count("cp.async.cg") >= 8  # loaded ahead, 16 bytes at a time
        assert code.spilled == 0
        assert code.shared <= 227 * 2**10 // 2  # so that two programs share a multiprocessor of an H100 or H200
