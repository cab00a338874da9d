"""Which arms are compared, and what each costs."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.quant.asymmetric import AsymmetricInt
from kvpolicy.quant.codecs import codec
from kvpolicy.quant.mixed import MixedPrecision
from kvpolicy.reports.quant_error.arms import (
    Arm,
    both_arms,
    codecs_of,
    comparison,
    default_codecs,
    key_arms,
)

BF16 = torch.bfloat16


def controls(name: str, head_dim: int, share: float = 0.05) -> tuple[str | None, str | None]:
    found = comparison(codec(name), share, head_dim, BF16, 1000)
    smaller, larger = (arm.name if arm else None for arm in (found.smaller, found.larger))
    return smaller, larger


def test_bits_of_an_arm_are_what_is_stored() -> None:
    found = comparison(codec("int4-g64"), 0.05, 128, BF16, 1000)
    assert found.plain.bits(128, BF16, 1000) == (4 + 2 * 16 / 64, 16)
    # 50 of 1000 rows of 128 numbers in 16 bits, and an index of 32 bits for each row
    assert found.protected["range"].bits(128, BF16, 1000) == (pytest.approx(4.5 + 16 * 50 / 1000 + 32 / 128), 16)
    assert Arm(keys=MixedPrecision(codec("int8-g32"), 0, "none")).bits(128, BF16, 1000) == (16, 9)
    assert Arm().bits(64, BF16, 10) == (16, 16)


@pytest.mark.parametrize(
    ("name", "head_dim", "smaller", "larger"),
    [
        # 4.5 + 0.8 + 0.25 = 5.55: a smaller group costs 5.0 or 6.0
        ("int4-g64", 128, "int4-g32", "int4-g16"),
        # 2.5 + 0.8 + 0.25 = 3.55
        ("int2-g64", 128, "int2-g32", "int2-g16"),
        # 3 + 0.8 + 0.25 = 4.05: int2-g16 at 4.0, then int4 over the whole head at 4.25
        ("int2-g32", 128, "int2-g16", "int4-gD"),
        # 4 + 0.8 + 0.5 = 5.3: more bits cost less than protection
        ("int2-g16", 64, "int4-g32", "int4-g16"),
        # 6 + 0.8 + 2 = 8.8: nothing lies between
        ("int4-g16", 16, None, "int8-g16"),
        # 10 + 0.8 + 2: nothing costs more
        ("int8-g16", 16, None, None),
        # 4 + 32 / 80 + 0.8 + 0.4 = 5.6 in heads that only 16 divides: 6.0
        ("int4-gD", 80, None, "int4-g16"),
    ],
)
def test_controls_cost_as_much_as_protection(name: str, head_dim: int, smaller: str | None, larger: str | None) -> None:
    assert controls(name, head_dim) == (smaller, larger)


def test_a_control_that_costs_exactly_as_much_is_no_more_bits() -> None:
    # 4 of 64 rows: 4.5 + 16 / 16 + 0.5 = 6.0, as int4-g16
    found = comparison(codec("int4-g64"), 1 / 16, 64, BF16, 64)
    assert found.smaller is not None
    assert found.smaller.name == "int4-g16"


def test_a_control_is_not_the_codec_under_another_name() -> None:
    assert controls("int4-gD", 64, 0.01) == ("int4-g32", "int4-g16")
    assert controls("int4-gD", 64, 0.001) == ("int4-g32", "int4-g16")  # 4.5 + 0.016 + 0.5 is above 5.0


@pytest.mark.parametrize(
    ("head_dim", "names"),
    [
        (64, ["int4-g64", "int2-g32"]),
        (128, ["int4-g64", "int2-g32"]),
        (96, ["int4-g32", "int2-g32"]),
        (80, ["int4-g16", "int2-g16"]),
        (20, ["int4-gD", "int2-gD"]),
    ],
)
def test_default_codecs_fit_the_head(head_dim: int, names: list[str]) -> None:
    found = default_codecs(head_dim)
    assert [one.name for one in found] == names
    for one in found:
        one.check(head_dim)


def test_codecs_are_named_with_commas_each_once() -> None:
    assert codecs_of("int4, int2-gD,int4-g64") == [AsymmetricInt(4, 64), AsymmetricInt(2, None)]
    with pytest.raises(ValueError, match="there is no codec 'int3'"):
        codecs_of("int4,int3")
    with pytest.raises(ValueError, match="the codec none changes nothing"):
        codecs_of("int4,none")


def test_keys_and_values_are_stored_together_plain_and_protected() -> None:
    values = comparison(codec("int4-g64"), 0.025, 64, BF16, 100)
    names = [arm.name for arm in both_arms(key_arms(codecs_of("int8,int4")), [values])]
    assert names == [
        "int4-g64, keys int8-g64",
        "int4-g64 range 2.5%, keys int8-g64",
        "int4-g64, keys int4-g64",
        "int4-g64 range 2.5%, keys int4-g64",
    ]
    assert Arm().name == "16 bits"
