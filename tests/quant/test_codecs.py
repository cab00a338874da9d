"""What every codec promises, and the names they go by."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy.quant.asymmetric import AsymmetricInt
from kvpolicy.quant.blockwise import Blockwise
from kvpolicy.quant.codec import Codec, Unchanged
from kvpolicy.quant.codecs import CODECS, codec

FULL = {name: name if "int" not in name or "-" in name else f"{name}-g64" for name in CODECS}
# Largest relative Frobenius error of Gaussian rows: between what 8, 4 and 2 bits lead to.
LARGEST_ERROR = {"none": 0.0, "int8": 0.012, "nf4": 0.12, "fp4": 0.16, "int4": 0.13, "int2": 0.65}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


@pytest.fixture(params=CODECS)
def each(request: pytest.FixtureRequest) -> Codec:
    made = codec(request.param)
    if isinstance(made, Blockwise):
        request.getfixturevalue("bitsandbytes")
    return made


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(2).to(dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_round_trip_gives_new_rows_near_the_old_ones(each: Codec, head_dim: int, dtype: torch.dtype) -> None:
    rows = random_rows(2, 3, 20, head_dim, dtype=dtype)
    untouched = rows.clone()
    seen = each.round_trip(rows)
    assert seen.dtype == dtype
    assert seen.shape == rows.shape
    assert torch.equal(rows, untouched)
    assert seen.data_ptr() != rows.data_ptr()
    largest = next(error for kind, error in LARGEST_ERROR.items() if each.name.startswith(kind))
    error = float((seen.double() - rows.double()).norm() / rows.double().norm())
    assert largest / 12 <= error <= largest


def test_every_row_is_stored_by_itself(each: Codec) -> None:
    rows = random_rows(2, 7, 64)
    rows[1, 3] *= 100
    one_by_one = [each.round_trip(row) for row in rows.view(-1, 64)]
    assert torch.equal(each.round_trip(rows).view(-1, 64), torch.stack(one_by_one))
    assert torch.equal(each.round_trip(rows.transpose(0, 1)), each.round_trip(rows).transpose(0, 1))


def test_no_row_is_no_trouble(each: Codec) -> None:
    assert each.round_trip(random_rows(2, 0, 64)).shape == (2, 0, 64)


@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_no_number_is_refused(each: Codec, bad: float, dtype: torch.dtype) -> None:
    rows = random_rows(2, 3, 64, dtype=dtype)
    rows[1, 2, 63] = bad
    with pytest.raises(ValueError, match=f"{each.name} stores finite numbers only"):
        each.round_trip(rows)


@dtypes
def test_a_token_of_zeros_stays_one(each: Codec, dtype: torch.dtype) -> None:
    rows = random_rows(4, 64, dtype=dtype)
    rows[2] = 0
    assert not each.round_trip(rows)[2].any()


@dtypes
def test_the_largest_numbers_of_a_dtype_stay_finite(each: Codec, dtype: torch.dtype) -> None:
    rows = torch.full((2, 64), torch.finfo(dtype).max, dtype=dtype)
    rows[0, :32] /= 3
    assert each.round_trip(rows).isfinite().all()


@pytest.mark.parametrize("name", [name for name in CODECS if name.startswith("int") and "-g" in name])
def test_heads_that_a_group_does_not_divide_are_refused(name: str) -> None:
    one = codec(name)
    wrong, message = (0, "a head of 0 channels") if name.endswith("-gD") else (72, "a head of 72 channels cannot be")
    with pytest.raises(ValueError, match=message):
        one.check(wrong)
    with pytest.raises(ValueError, match=message):
        one.round_trip(random_rows(3, wrong))
    for head_dim in (64, 128):
        one.check(head_dim)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("name", ["none", "nf4", "fp4", "int8-blockwise"])
def test_others_take_any_head(name: str) -> None:
    codec(name).check(63)
    assert codec(name).round_trip(random_rows(3, 63)).shape == (3, 63)
    if name != "none":
        with pytest.raises(ValueError, match="at least one channel, got 0"):
            codec(name).check(0)


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_is_found_by_the_name_it_gives(name: str) -> None:
    made = codec(name)
    assert made.name == FULL[name]
    assert codec(made.name) == made


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", Unchanged()),
        ("int2", AsymmetricInt(2, 64)),
        ("int4", AsymmetricInt(4, 64)),
        ("int8", AsymmetricInt(8, 64)),
        ("int2-g16", AsymmetricInt(2, 16)),
        ("int4-g32", AsymmetricInt(4, 32)),
        ("int8-g64", AsymmetricInt(8, 64)),
        ("int4-gD", AsymmetricInt(4, None)),
        ("nf4", Blockwise("nf4")),
        ("fp4", Blockwise("fp4")),
        ("int8-blockwise", Blockwise("int8-blockwise")),
    ],
)
def test_names(name: str, expected: Codec) -> None:
    assert codec(name) == expected


@pytest.mark.parametrize("name", ["", "int3", "int4-g", "int4-g48", "INT4", "int4-gd", "nf4-g64", "int4 "])
def test_another_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="there is no codec") as refused:
        codec(name)
    assert all(known in str(refused.value) for known in CODECS)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "expected"),
    [
        ("none", 128, torch.bfloat16, 16),
        ("none", 80, torch.float32, 32),
        ("int4", 128, torch.bfloat16, 4.5),
        ("int4", 64, torch.float32, 5),
        ("int4-g32", 96, torch.float16, 5),
        ("int2-g16", 64, torch.bfloat16, 4),
        ("int8-gD", 80, torch.bfloat16, 8.4),
        ("int8-gD", 128, torch.bfloat16, 8.25),
        ("nf4", 128, torch.bfloat16, 4.5),
        ("fp4", 64, torch.float32, 4.5),
        ("nf4", 80, torch.bfloat16, 4.8),
        ("int8-blockwise", 96, torch.bfloat16, 8 + 2 / 3),
        ("int8-blockwise", 64, torch.bfloat16, 8.5),
    ],
)
def test_real_bits(name: str, head_dim: int, dtype: torch.dtype, expected: float) -> None:
    assert codec(name).bits(head_dim, dtype) == pytest.approx(expected, rel=1e-12)
