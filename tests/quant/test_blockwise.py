"""bitsandbytes' formats against their definitions: the nearest of the format's numbers times the block's largest."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

from kvpolicy.quant.blockwise import CODE_BITS, Blockwise

BLOCK = 64
# NormalFloat (arXiv 2305.14314, appendix E), and a float of 2 exponent bits, 1 mantissa bit and a sign.
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.24611229, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
FP4 = [sign * size / 12 for sign in (-1, 1) for size in (0, 0.0625, 2, 3, 4, 6, 8, 12)]


def dynamic_map() -> list[float]:
    """The signed 8-bit map of arXiv 2110.02861: from 1e-7 to 1 each decade has twice the numbers of the last."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        edges = [0.1 + 0.9 * i / count for i in range(count + 1)]
        sizes = [10.0 ** (decade - 6) * (a + b) / 2 for a, b in pairwise(edges)]
        numbers += sizes + [-size for size in sizes]
    return numbers


TABLES = {"nf4": NF4, "fp4": FP4, "int8-blockwise": dynamic_map()}


def by_loops(row: list[float], table: list[float]) -> list[float]:
    restored = []
    for start in range(0, len(row), BLOCK):
        block = row[start : start + BLOCK]
        largest = max(abs(x) for x in block)
        restored += [min((largest * number for number in table), key=lambda y, x=x: abs(y - x)) for x in block]
    return restored


def random_rows(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.randn((*shape[:-1], 1), generator=generator).exp()


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("head_dim", [1, 63, 64, 80, 96, 128])
def test_every_number_is_the_nearest_of_the_format(head_dim: int, kind: str) -> None:
    """Sizes that are not whole blocks are those that bitsandbytes itself restores wrongly from two dimensions."""
    rows = random_rows(2, 3, 11, head_dim)
    seen = Blockwise(kind).round_trip(rows)  # type: ignore[arg-type]
    expected = [by_loops(row, TABLES[kind]) for row in rows.view(-1, head_dim).double().tolist()]
    nearest = torch.tensor(expected, dtype=torch.float64)
    error, least = ((x - rows.view(-1, head_dim)).abs() for x in (seen.view(-1, head_dim).double(), nearest))
    largest = rows.view(-1, head_dim).abs().amax(dim=1, keepdim=True)
    # fp4's and the map's thresholds lie between numbers as rounded: where two are as near, either may be taken.
    assert ((error - least).abs() <= 1e-3 * largest).all()
    apart = (seen.view(-1, head_dim).double() - nearest).abs() > 1e-5 * largest
    assert float(apart.double().mean()) < 0.01


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("head_dim", [80, 96])
def test_rows_laid_end_to_end_lose_no_more_than_bitsandbytes_alone(head_dim: int, kind: str) -> None:
    """Where a row is no whole number of blocks it mixes them up on some CPUs, and loses several times as much there."""
    from bitsandbytes import functional

    rows = random_rows(9, head_dim)
    codes, state = functional.quantize_4bit(rows, blocksize=BLOCK, quant_type=kind)
    alone = functional.dequantize_4bit(codes, state)
    ours = Blockwise(kind).round_trip(rows)  # type: ignore[arg-type]
    assert float((ours - rows).norm()) < 1.05 * float((alone - rows).norm())


@pytest.mark.parametrize("kind", TABLES)
def test_where_it_is_missing_a_sentence_says_what_to_install(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    one = Blockwise(kind)  # type: ignore[arg-type]
    sentence = rf"^{kind} needs bitsandbytes; run pip install 'sglang-kvpolicy\[quant\]'$"
    with pytest.raises(ModuleNotFoundError, match=sentence):
        one.check(64)
    with pytest.raises(ModuleNotFoundError, match=sentence):
        one.round_trip(random_rows(2, 64))
    assert one.bits(64, torch.bfloat16) == CODE_BITS[kind] + 0.5
