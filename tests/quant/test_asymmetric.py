"""Low-bit integers as a codec: what is stored is what is counted, and what a reader sees is what is packed."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.pack_rows import BITS, pack_rows
from kvpolicy.quant.asymmetric import AsymmetricInt

LAYOUTS = [(d, g) for d in (64, 80, 96, 128) for g in (16, 32, 64, None) if g is None or d % g == 0]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(2).to(dtype)


@dtypes
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("head_dim", "group"), LAYOUTS)
def test_a_number_is_off_by_half_a_step_and_its_own_rounding(
    head_dim: int, group: int | None, bits: int, dtype: torch.dtype
) -> None:
    rows = random_rows(3, 5, head_dim, dtype=dtype)
    seen = AsymmetricInt(bits, group).round_trip(rows)
    ulp = torch.finfo(dtype).eps
    members = group or head_dim
    for row, back in zip(
        rows.view(-1, members).double().tolist(), seen.view(-1, members).double().tolist(), strict=True
    ):
        step = (max(row) - min(row)) / (2**bits - 1)
        largest = max(abs(x) for x in row)
        for x, y in zip(row, back, strict=True):
            assert abs(x - y) <= step / 2 * (1 + 2 * ulp) + ulp * largest


@dtypes
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("head_dim", "group"), LAYOUTS)
def test_the_bits_are_those_of_the_stored_tensors(
    head_dim: int, group: int | None, bits: int, dtype: torch.dtype
) -> None:
    packed = pack_rows(random_rows(7, 3, head_dim, dtype=dtype), bits, group or head_dim)
    stored = sum(8 * tensor.nbytes for tensor in packed)
    assert AsymmetricInt(bits, group).bits(head_dim, dtype) == stored / (7 * 3 * head_dim)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_span_beyond_fp32_is_refused(bits: int, dtype: torch.dtype) -> None:
    rows = random_rows(2, 64, dtype=dtype)
    rows[1, :2] = torch.tensor([-3e38, 3e38])
    with pytest.raises(ValueError, match=f"int{bits}-g32 cannot store these rows: .* span more than fp32 can hold"):
        AsymmetricInt(bits, 32).round_trip(rows)


@pytest.mark.parametrize("bits", BITS)
def test_all_of_fp16_is_stored(bits: int) -> None:
    rows = random_rows(2, 64, dtype=torch.float16)
    rows[1, :2] = torch.tensor([-65504, 65504])
    errors = (AsymmetricInt(bits, 64).round_trip(rows).double() - rows.double()).abs()[1]
    step = 131008 / (2**bits - 1)
    assert errors[0] == 0
    assert errors[1] <= step  # the nearest code stands for more than fp16 holds
    assert (errors[2:] <= step / 2 * 1.01).all()


def test_a_smaller_group_loses_less() -> None:
    rows = random_rows(200, 64, dtype=torch.float32)
    errors = [float((AsymmetricInt(4, group).round_trip(rows) - rows).norm()) for group in (16, 32, 64)]
    assert errors == sorted(errors)
    assert torch.equal(AsymmetricInt(4, None).round_trip(rows), AsymmetricInt(4, 64).round_trip(rows))


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (4, 0), (4, 48), (4, -1)])
def test_layouts_that_do_not_exist_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ValueError, match=r"not supported|cannot be divided"):
        AsymmetricInt(bits, group).round_trip(random_rows(2, 64, dtype=torch.float32))
