"""Packed buffers against codes taken out of their bytes, and against what must stay as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpolicy.kernels.packed_buffer import PackedBuffer
from tests.kernels.packed_cases import DTYPES, LAYOUTS, empty_buffer, random_buffer

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "D={} bits={} group={}".format(*layout))


def row_of(buffer: PackedBuffer, slot: int, head: int) -> torch.Tensor:
    """``[D]``, each channel's code taken out of its byte."""
    if buffer.index is not None and buffer.rows is not None and (number := int(buffer.index[slot, head])) >= 0:
        return buffer.rows[number, head]
    channels, per_byte = torch.arange(buffer.shape[2]), 8 // buffer.bits
    byte = buffer.codes[slot, head].int()[channels // per_byte]
    code = byte // 2 ** (channels % per_byte * buffer.bits) % 2**buffer.bits
    scale, minimum = (x[slot, head].float()[channels // buffer.group] for x in (buffer.scale, buffer.minimum))
    return (code * scale + minimum).to(buffer.dtype)


@dtypes
@layouts
@pytest.mark.parametrize("protected", [0.0, 0.3])
def test_rows_are_read_as_they_are_defined(
    layout: tuple[int, int, int], dtype: torch.dtype, protected: float, poisoned: None
) -> None:
    used = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:7]
    buffer = random_buffer(used, 12, 2, layout, dtype, protected)
    slots = used[[4, 0, 0, 6, 3, 2, 1, 5]]
    rows = buffer.read(slots)
    assert rows.dtype == buffer.dtype == dtype
    assert not rows.isnan().any()
    expected = torch.stack([torch.stack([row_of(buffer, slot, h) for h in range(2)]) for slot in slots.tolist()])
    assert torch.equal(rows, expected)
    assert torch.equal(buffer[slots], expected)


def test_a_worked_example() -> None:
    # Channels 0 and 1 are a group: 10 + 0.5 * 1 and 10 + 0.5 * 15; channels 2 and 3 another: -1 + 2 * 0 and -1 + 2 * 9.
    codes = torch.tensor([[[0xF1, 0x90], [0x00, 0x00]]], dtype=torch.uint8)
    scale, minimum = torch.tensor([[[0.5, 2.0], [1.0, 1.0]]]), torch.tensor([[[10.0, -1.0], [7.0, 8.0]]])
    buffer = PackedBuffer(codes, scale, minimum, 4, 2)
    assert buffer[torch.tensor([0])].tolist() == [[[10.5, 17.5, -1, 17], [7, 7, 8, 8]]]
    index, rows = torch.tensor([[-1, 1]], dtype=torch.int32), torch.arange(24.0).view(3, 2, 4)
    protected = replace(buffer, index=index, rows=rows)
    assert protected[torch.tensor([0])].tolist() == [[[10.5, 17.5, -1, 17], [12, 13, 14, 15]]]


@dtypes
@layouts
def test_what_is_written_is_read(layout: tuple[int, int, int], dtype: torch.dtype, poisoned: None) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, slots = torch.randn(5, 3, layout[0], generator=generator).to(dtype), torch.tensor([8, 1, 0, 5, 2])
    buffer = empty_buffer(9, 3, layout, dtype, rows=4)
    assert buffer.index is not None
    assert buffer.rows is not None
    buffer.index[[8, 5], 1], buffer.index[5, 0] = torch.tensor([2, 0], dtype=torch.int32), 3
    before = [tensor.clone() for tensor in buffer.tensors]
    buffer.write(slots, rows)
    found = buffer[slots]
    named = buffer.index[slots] >= 0
    assert torch.equal(found[named], rows[named])
    scale = buffer.scale[slots].float().repeat_interleave(layout[2], dim=-1)
    error, rounding = (found.float() - rows.float()).abs(), torch.finfo(dtype).eps * 6  # of numbers up to 6
    assert bool((error <= 0.5 * scale + rounding).all())
    assert bool((error[~named] > 0).any())
    others = torch.tensor([3, 4, 6, 7])
    for now, then in zip(buffer.tensors[:3], before[:3], strict=True):
        torch.testing.assert_close(now[others], then[others], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(buffer.index, before[3])
    written = torch.zeros(4, 3, dtype=torch.bool)
    written[2, 1] = written[0, 1] = written[3, 0] = True
    assert torch.equal(~buffer.rows[:4].isnan().any(dim=-1), written)  # the last row is spare


@pytest.mark.parametrize("protected", [0.0, 0.5])
def test_rows_may_lie_apart(protected: float) -> None:
    layout, slots = LAYOUTS[0], torch.tensor([4, 2, 3])
    packed, same = (random_buffer(torch.arange(6), 6, 2, layout, torch.float32, protected) for _ in range(2))
    qkv = torch.randn(3, 5 * 64)
    view = qkv[:, 2 * 64 : 4 * 64].view(3, 2, 64)
    assert not view.is_contiguous()
    packed.write(slots, view)
    same.write(slots, view.contiguous())
    for one, other in zip(packed.tensors, same.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_no_row_is_read_or_written() -> None:
    buffer = random_buffer(torch.arange(6), 6, 2, LAYOUTS[0], torch.float32, protected=0.5)
    before = [tensor.clone() for tensor in buffer.tensors]
    nothing = torch.empty(0, dtype=torch.int64)
    assert buffer[nothing].shape == (0, 2, 64)
    buffer.write(nothing, torch.empty(0, 2, 64))
    for now, then in zip(buffer.tensors, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_it_stands_in_for_a_tensor() -> None:
    buffer = empty_buffer(7, 3, (80, 4, 16), torch.bfloat16)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((7, 3, 80), torch.bfloat16, "cpu")
    assert len(buffer.tensors) == 3
    assert len(empty_buffer(7, 3, (80, 4, 16), torch.bfloat16, rows=2).tensors) == 5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({"codes": torch.zeros(7, 3, 40)}, "must be uint8", id="codes that are no bytes"),
        pytest.param({"scale": torch.zeros(7, 3, 4)}, "scale is", id="too few groups"),
        pytest.param({"minimum": torch.zeros(7, 3, 5).half()}, "minimum is", id="a minimum of another dtype"),
        pytest.param({"rows": None}, "belong together", id="an index without rows"),
        pytest.param({"index": torch.zeros(7, 3)}, "must be int32", id="an index that is none"),
        pytest.param({"index": torch.zeros(3, 7, dtype=torch.int32)}, "self.index.shape", id="an index of other slots"),
        pytest.param({"rows": torch.zeros(4, 3, 64)}, "self.rows.shape", id="rows of another head size"),
        pytest.param({"rows": torch.zeros(0, 3, 80)}, "spare", id="no spare row"),
        pytest.param({"rows": torch.zeros(4, 3, 80).half()}, "must be self.dtype", id="rows of another dtype"),
        pytest.param({"rows": torch.zeros(4, 80, 3).transpose(1, 2)}, "contiguous", id="rows that lie apart"),
    ],
)
def test_tensors_that_do_not_fit_are_programming_errors(change: dict[str, torch.Tensor], sentence: str) -> None:
    buffer = empty_buffer(7, 3, (80, 4, 16), torch.float32, rows=3)
    with pytest.raises(AssertionError, match=sentence):
        replace(buffer, **change)


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 30"):
        replace(empty_buffer(7, 3, (80, 4, 16), torch.float32), group=30)
