"""Attention over packed rows, as kernels and request by request, against the definition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from kvpolicy.kernels.packed_attention import packed_attention, packed_attention_reference
from kvpolicy.kernels.packed_buffer import Buffer, PackedBuffer
from tests.kernels.bf16_rounding import bf16_is_rounded  # noqa: F401
from tests.kernels.far_slots import far_buffer
from tests.kernels.packed_cases import Batch, Case
from tests.kernels.tolerance import RELATIVE, assert_close

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = Case("fp32", (1, 63, 0, 40), 2, 2, 64, None, (4, 32), protected_values=0.2)
CASES = (
    SMALL,
    Case("bf16", (33, 64, 65), 2, 2, 64, None, (4, 32), BF16, protected_values=0.2),
    Case("fp16", (1, 70), 1, 2, 80, None, (4, 16), FP16, protected_values=0.1),
    Case("one query head", (95, 2), 2, 1, 96, None, (2, 32), FP32),
    Case("seven query heads, bf16", (31, 1), 2, 7, 128, None, (4, 64), BF16, protected_values=0.1),
    Case("eight query heads", (66,), 1, 8, 128, None, (8, 128), FP32, protected_values=0.5),
    Case("twenty query heads", (34,), 1, 20, 64, (8, 64), None, FP32),
    Case("keys too", (5, 67), 2, 2, 64, (8, 64), (2, 16), FP32, protected_values=0.3),
    Case("keys too, bf16", (67,), 2, 2, 80, (4, 80), (4, 80), BF16, protected_keys=0.2, protected_values=0.2),
    Case("keys alone", (40, 9), 2, 2, 64, (4, 32), None, FP32, protected_keys=0.3),
    Case("nothing packed, bf16", (40, 9), 2, 2, 96, None, None, BF16),
    Case("all protected", (33,), 1, 2, 64, (2, 64), (2, 64), FP32, protected_keys=1.0, protected_values=1.0),
    Case("a head of 5", (33, 3), 2, 3, 5, (8, 5), (8, 5), FP32, protected_values=0.2),
    Case("a head of 60", (33, 3), 1, 3, 60, (4, 60), (4, 60), FP32, protected_values=0.2),
)
cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few dozen tokens are several parts."""
    pytest.importorskip("triton")
    from kvpolicy.kernels import packed_attention_kernel

    monkeypatch.setattr(packed_attention_kernel, "LEAST_PART", 32)


def attend(batch: Batch, keys: Buffer, values: Buffer, *, use_triton: bool = True) -> torch.Tensor:
    return packed_attention(
        batch.queries, keys, values, *batch.tensors, batch.queries.shape[-1] ** -0.5, use_triton=use_triton
    )


def reference(batch: Batch, keys: Buffer, values: Buffer) -> torch.Tensor:
    return packed_attention_reference(batch.queries, keys, values, *batch.tensors, batch.queries.shape[-1] ** -0.5)


@cases
def test_kernels_agree_with_the_reference(case: Case, device: torch.device) -> None:
    batch, keys, values = case.draw(device)
    output = attend(batch, keys, values)
    assert output.dtype == case.dtype
    assert not output.isnan().any()
    assert_close(output, reference(batch, keys, values), case.dtype)


@cases
def test_requests_one_by_one_agree_with_the_reference(case: Case, poisoned: None) -> None:
    batch, keys, values = case.draw(torch.device("cpu"))
    output = attend(batch, keys, values, use_triton=False)
    assert output.dtype == case.dtype
    # PyTorch rounds weights to the dtype of the values: an error of as much of the sum of all terms' magnitudes.
    plain = values if isinstance(values, torch.Tensor) else values[torch.arange(len(values.codes))]
    bound = 2 * RELATIVE[case.dtype] * reference(batch, keys, plain.abs())
    assert bool(((output.float() - reference(batch, keys, values)).abs() <= bound).all())


@pytest.mark.parametrize("use_triton", [False, True])
def test_a_worked_example(device: torch.device, use_triton: bool) -> None:
    # Powers of the logits are 1, 2 and 5. Values are 10 + 0.5 * code, but for the last token's first head.
    keys = torch.zeros(4, 2, 16)
    keys[:3, :, 0] = torch.tensor([1.0, 2.0, 5.0]).log()[:, None]
    codes = torch.zeros(4, 2, 8, dtype=torch.uint8)
    codes[:3, :, 0] = torch.tensor([0x00, 0x04, 0x0F], dtype=torch.uint8)[:, None]
    scale, minimum = torch.full((4, 2, 1), 0.5), torch.full((4, 2, 1), 10.0)
    index, rows = torch.full((4, 2), -1, dtype=torch.int32), torch.full((3, 2, 16), torch.nan)
    index[2, 0], rows[1, 0] = 1, 18.0
    values = PackedBuffer(*(x.to(device) for x in (codes, scale, minimum)), 4, 16, index.to(device), rows.to(device))
    table = torch.tensor([[3, 3, 3], [2, 0, 1]], dtype=torch.int32, device=device)
    query = torch.zeros(1, 2, 16, device=device)
    query[..., 0] = 2.0
    row, length = torch.tensor([1], device=device), torch.tensor([3], device=device)
    output = packed_attention(query, keys.to(device), values, table, row, length, 0.5, use_triton=use_triton)
    first, second = (10 * 1 + 12 * 2 + 18 * 5) / 8, (10 * 1 + 12 * 2 + 17.5 * 5) / 8
    assert output[0, :, 0].tolist() == pytest.approx([first, second], rel=1e-6)
    assert output[0, 0, 1:].tolist() == pytest.approx([(10 * 3 + 18 * 5) / 8] * 15, rel=1e-6)
    assert output[0, 1, 1:].tolist() == pytest.approx([10] * 15, rel=1e-6)


@pytest.mark.parametrize("sizes", [{"BLOCK": 32}, {"BLOCK": 128}, {"LEAST_PART": 64}, {"MOST_PARTS": 1}], ids=str)
def test_the_size_of_tiles_and_parts_does_not_matter(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    from kvpolicy.kernels import packed_attention_kernel

    batch, keys, values = SMALL.draw(device)
    for name, size in sizes.items():
        monkeypatch.setattr(packed_attention_kernel, name, size)
    assert_close(attend(batch, keys, values), reference(batch, keys, values))


def test_long_requests_have_longer_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpolicy.kernels import packed_attention_kernel

    monkeypatch.setattr(packed_attention_kernel, "MOST_PARTS", 3)
    case = Case("long", (97, 192, 193, 300), 1, 1, 16, None, (4, 16))
    batch, keys, values = case.draw(device)
    assert_close(attend(batch, keys, values), reference(batch, keys, values))


@pytest.mark.parametrize("use_triton", [False, True])
def test_a_request_gets_the_same_bit_for_bit_in_any_batch(device: torch.device, use_triton: bool) -> None:
    batch, keys, values = replace(CASES[1], lengths=(5, 33, 70), heads=1).draw(device)
    together = attend(batch, keys, values, use_triton=use_triton)
    wide = torch.nn.functional.pad(batch.req_to_token, (0, 200))
    for order, table in (([2, 0, 1], wide), ([1, 1], batch.req_to_token), ([0], wide), ([2], batch.req_to_token)):
        own = Batch(batch.queries[order], table, batch.req_pool_indices[order], batch.seq_lens[order])
        assert torch.equal(attend(own, keys, values, use_triton=use_triton), together[order])


def test_launches_do_not_depend_on_the_data(device: torch.device, launches: Counter[str]) -> None:
    for lengths in ((1, 1), (0, 0), (1, 130)):
        batch, keys, values = replace(SMALL, lengths=lengths).draw(device)
        launches.clear()
        attend(batch, keys, values)
        assert launches == {"_part_kernel": 1, "_reduce_kernel": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_holds_it() -> None:
    batch, keys, values = CASES[1].draw(torch.device("cuda"))
    attend(batch, keys, values)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(batch, keys, values)
    for lengths in ([33, 64, 65], [1, 2, 3], [33, 0, 64]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert_close(output, reference(batch, keys, values), BF16)


@pytest.mark.parametrize("use_triton", [False, True])
def test_types_of_indices_and_strides_do_not_matter(device: torch.device, use_triton: bool) -> None:
    batch, keys, values = replace(SMALL, lengths=(3, 40)).draw(device)
    expected = attend(batch, keys, values, use_triton=use_triton)
    short = replace(batch, seq_lens=batch.seq_lens.int(), req_pool_indices=batch.req_pool_indices.int())
    assert torch.equal(attend(short, keys, values, use_triton=use_triton), expected)
    wide = torch.nn.functional.pad(batch.req_to_token, (0, 5))[:, :-5]
    qkv = torch.nn.functional.pad(batch.queries, (0, 0, 0, 3))[:, :-3]
    heads_apart = torch.nn.functional.pad(batch.queries, (0, 8))[..., :-8]
    channels_apart = batch.queries.transpose(1, 2).contiguous().transpose(1, 2)
    for queries in (qkv, heads_apart, channels_apart):
        assert not queries.is_contiguous()
        view = replace(batch, queries=queries, req_to_token=wide)
        assert_close(attend(view, keys, values, use_triton=use_triton), expected)


@pytest.mark.parametrize("use_triton", [False, True])
def test_inputs_stay_as_they_are(device: torch.device, use_triton: bool) -> None:
    batch, keys, values = CASES[7].draw(device)
    assert isinstance(keys, PackedBuffer)
    assert isinstance(values, PackedBuffer)
    tensors = [*batch.tensors, batch.queries, *keys.tensors, *values.tensors]
    before = [tensor.clone() for tensor in tensors]
    attend(batch, keys, values, use_triton=use_triton)
    for now, then in zip(tensors, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("use_triton", [False, True])
def test_what_is_no_number_stays_in_its_request_and_head(device: torch.device, use_triton: bool) -> None:
    batch, keys, values = SMALL.draw(device)
    assert isinstance(values, PackedBuffer)
    assert values.index is not None
    slot = int(batch.req_to_token[batch.req_pool_indices[3], 17])
    values.index[slot, 1], values.scale[slot, 1], values.minimum[slot, 1, 0] = -1, 1, 0
    values.minimum[slot, 1, 1] = torch.nan  # channels 32 to 63
    output = attend(batch, keys, values, use_triton=use_triton)
    wrong = torch.zeros(4, 4, 64, dtype=torch.bool)
    wrong[3, 2:, 32:] = True
    assert torch.equal(output.isnan().cpu(), wrong)
    batch.queries[1, 3, 5] = torch.nan
    wrong[1, 3] = True
    assert torch.equal(attend(batch, keys, values, use_triton=use_triton).isnan().cpu(), wrong)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_very_large_logits_give_all_attention_to_one_token(device: torch.device, dtype: torch.dtype) -> None:
    batch, keys, values = replace(SMALL, lengths=(50,), heads=1, dtype=dtype).draw(device)
    assert isinstance(keys, torch.Tensor)
    slots, targets = batch.req_to_token[batch.req_pool_indices[0], :50].long(), [3, 40]
    large = (torch.eye(64, device=device)[:50] * 2.0**14).to(dtype)
    keys[slots, 0] = large
    output = attend(replace(batch, queries=large[targets].unsqueeze(0)), keys, values)
    assert torch.equal(output[0], values[slots[targets]][:, 0])


def test_packed_slots_lie_beyond_what_32_bits_address(device: torch.device) -> None:
    codes = far_buffer(8, 128, device).view(torch.uint8).flatten()[: 2**31 + 2**17].view(-1, 8, 128)
    scale, minimum = torch.zeros(2, len(codes), 8, 1, dtype=BF16, device=device)
    batch, keys, _ = Case("near", (40,), 8, 1, 128, (8, 128), (8, 128), BF16).draw(device)
    assert isinstance(keys, PackedBuffer)
    end = len(codes) - len(keys.codes)
    for far, near in zip((codes, scale, minimum), keys.tensors, strict=True):
        far[end:] = near
    packed = PackedBuffer(codes, scale, minimum, 8, 128)
    there = replace(batch, req_to_token=batch.req_to_token + end)
    assert_close(attend(there, packed, packed), reference(batch, keys, keys), BF16)


def test_plain_slots_lie_beyond_what_32_bits_address(device: torch.device) -> None:
    far = far_buffer(8, 128, device)
    batch, keys, _ = Case("near", (40,), 8, 1, 128, None, None, BF16).draw(device)
    assert isinstance(keys, torch.Tensor)
    end = len(far) - len(keys)
    far[end:] = keys
    there = replace(batch, req_to_token=batch.req_to_token + end)
    assert_close(attend(there, far, far), reference(batch, keys, keys), BF16)


def test_protected_rows_lie_beyond_what_32_bits_address(device: torch.device) -> None:
    far = far_buffer(8, 128, device)
    batch, keys, values = Case("near", (40,), 8, 1, 128, None, (8, 128), BF16, protected_values=0.3).draw(device)
    assert isinstance(values, PackedBuffer)
    assert values.index is not None
    assert values.rows is not None
    end = len(far) - len(values.rows)
    far[end:] = values.rows
    index = torch.where(values.index >= 0, values.index + end, -1)
    there = replace(values, index=index, rows=far)
    assert_close(attend(batch, keys, there), reference(batch, keys, values), BF16)
