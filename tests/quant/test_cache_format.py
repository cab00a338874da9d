"""Formats of the cache: what is refused, which group is chosen, and bytes against tensors that were allocated."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvpolicy.kernels.packed_buffer import PackedBuffer
from kvpolicy.quant.cache_format import FORMATS, KEY_FORMATS, CacheFormat
from kvpolicy.sglang_plugin.protected_rows import ProtectedRows

BITS = {"int8": 8, "int4": 4, "int2": 2}
NAMES = "int8, int4, int2, range-int8, range-int4, range-int2"


def test_the_formats_there_are() -> None:
    assert ", ".join(FORMATS) == NAMES
    assert KEY_FORMATS == ("none", "int8", "int4")
    for name in FORMATS:
        found = CacheFormat(name)
        assert (found.group, found.protect, found.keys, found.key_bits) == (None, 0.05, "none", None)
        assert found.value_bits == BITS[name.removeprefix("range-")]
        assert found.protects == (name != name.removeprefix("range-"))
    assert [CacheFormat("int2", keys=keys).key_bits for keys in KEY_FORMATS] == [None, 8, 4]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({"name": "int3"}, f"kv_quant='int3' is not a format; use {NAMES}", id="format"),
        pytest.param({"name": ""}, f"kv_quant='' is not a format; use {NAMES}", id="empty"),
        pytest.param({"name": "range-"}, f"kv_quant='range-' is not a format; use {NAMES}", id="half a format"),
        pytest.param({"name": "range-range-int4"}, "kv_quant='range-range-int4' is not a format; use", id="twice"),
        pytest.param({"name": "INT4"}, "kv_quant='INT4' is not a format; use", id="capitals"),
        pytest.param({"keys": "int2"}, "kv_quant_keys='int2' is not a format of keys; use none, int8, int4", id="keys"),
        pytest.param({"keys": "range-int8"}, "kv_quant_keys='range-int8' is not a format of keys", id="range of keys"),
        pytest.param({"protect": 0.0}, "kv_protect=0.0 must be above 0 and at most 0.5", id="nothing protected"),
        pytest.param({"protect": -0.1}, "kv_protect=-0.1 must be above 0 and at most 0.5", id="less than nothing"),
        pytest.param({"protect": 0.5000001}, "kv_protect=0.5000001 must be above 0 and at most 0.5", id="just over"),
        pytest.param({"protect": 5}, "kv_protect=5 must be above 0 and at most 0.5", id="per cent"),
        pytest.param({"protect": float("nan")}, "kv_protect=nan must be above 0 and at most 0.5", id="no number"),
        pytest.param({"protect": float("inf")}, "kv_protect=inf must be above 0 and at most 0.5", id="infinite"),
        pytest.param({"group": 64.0}, "kv_quant_group must be a whole number, got 64.0", id="group with a fraction"),
        pytest.param({"group": True}, "kv_quant_group must be a whole number, got True", id="true for a group"),
    ],
)
def test_what_is_no_format_is_refused_in_one_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match="kv_") as caught:
        CacheFormat(**{"name": "range-int4", **arguments})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(sentence)
    assert not message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("protect", [0.5, 1e-9, 0.3333])
def test_shares_at_the_ends_pass(protect: float) -> None:
    assert CacheFormat("range-int2", protect=protect).protect == protect


@pytest.mark.parametrize(
    ("head_dim", "group"), [(32, 32), (64, 64), (80, 16), (96, 32), (128, 64), (256, 64), (48, 16), (40, 40), (16, 16)]
)
@pytest.mark.parametrize("name", ["int8", "range-int2"])
def test_the_group_is_the_largest_of_three_that_divides_the_head_or_else_the_head(
    head_dim: int, group: int, name: str
) -> None:
    asked = CacheFormat(name, protect=0.1, keys="int8")
    assert asked.fitted(head_dim) == dataclasses.replace(asked, group=group)
    assert asked.group is None


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 8, 16, 20, 32, 40, 48, 64, 80, 96, 128, 256, 0, -16])
def test_a_group_that_was_asked_for_is_one_of_three_or_the_head_and_divides_it(head_dim: int, group: int) -> None:
    possible = [each for each in sorted({16, 32, 64, head_dim}) if head_dim % each == 0]
    if group in possible:
        assert CacheFormat("int4", group).fitted(head_dim).group == group
        return
    with pytest.raises(ValueError, match=f"^kv_quant_group={group} does not fit") as caught:
        CacheFormat("int4", group).fitted(head_dim)
    assert str(caught.value) == (
        f"kv_quant_group={group} does not fit the model's heads of {head_dim} channels; use "
        f"{' or '.join(str(each) for each in possible)}"
    )


@pytest.mark.parametrize(("name", "keys"), [("int2", "none"), ("int8", "int4")], ids=["values", "keys"])
def test_heads_whose_codes_fill_no_whole_bytes_are_refused(name: str, keys: str) -> None:
    with pytest.raises(ValueError, match=r"a group of 5 codes of \d bits does not fill whole bytes"):
        CacheFormat(name, keys=keys).fitted(5)


def allocated(found: CacheFormat, layers: int, slots: int, heads: int, head_dim: int, rows: int) -> tuple[int, int]:
    """Bytes of keys and values as they are really allocated, and of protected rows with all that belongs to them."""
    dtype, group = torch.bfloat16, found.group
    assert group is not None
    protected = ProtectedRows(layers, slots, heads, rows, head_dim, dtype, torch.device("cpu"))
    tensors: list[torch.Tensor] = []
    for layer in range(layers):
        for bits, protects in ((found.key_bits, False), (found.value_bits, found.protects)):
            if bits is None:
                tensors.append(torch.zeros(slots, heads, head_dim, dtype=dtype))
                continue
            codes = torch.zeros(slots, heads, head_dim * bits // 8, dtype=torch.uint8)
            scale, minimum = (torch.zeros(slots, heads, head_dim // group, dtype=dtype) for _ in range(2))
            index, of_layer = (protected.index[layer], protected.rows[layer]) if protects else (None, None)
            buffer = PackedBuffer(codes, scale, minimum, bits, group, index, of_layer)
            tensors += buffer.tensors[:3]
    return sum(tensor.nbytes for tensor in tensors), protected.nbytes if found.protects else 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keys", KEY_FORMATS)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 16), (80, 80), (128, None)])
def test_bytes_are_those_of_the_tensors(name: str, keys: str, head_dim: int, group: int | None) -> None:
    layers, slots, heads, rows = 3, 37, 2, 11
    found = CacheFormat(name, group, keys=keys).fitted(head_dim)
    of_slots, of_rows = allocated(found, layers, slots, heads, head_dim, rows)
    expected = layers * slots * found.slot_bytes(heads, head_dim, 2)
    if found.protects:
        # One spare row; and once per cache, the places of layers and heads, counters of free rows and of denials.
        expected += layers * (rows + 1) * found.protected_row_bytes(heads, head_dim, 2)
        expected += 8 * (layers + heads) + 8 * layers * heads + 8
    assert of_slots + of_rows == expected


def test_bits_of_the_design() -> None:
    """int4 in groups of 64 of 128 channels, 5 % protected: 4 + 0.5 for scale and minimum + 0.25 for the index +
    0.05 * 16 for rows, and 0.05 * 0.25 for the list of rows."""
    found = CacheFormat("range-int4").fitted(128)
    keys = 128 * 2
    bits = 8 * (found.slot_bytes(1, 128, 2) - keys + 0.05 * found.protected_row_bytes(1, 128, 2)) / 128
    assert bits == pytest.approx(4 + 0.5 + 0.25 + 0.05 * (16 + 0.25))
    plain = CacheFormat("int4").fitted(128)
    assert 2 * keys / plain.slot_bytes(1, 128, 2) == pytest.approx(1.56, abs=0.005)
    assert plain.slot_bytes(5, 128, 2) == 5 * plain.slot_bytes(1, 128, 2)


def test_scales_and_minima_are_of_the_precision_of_the_model() -> None:
    found = CacheFormat("int8", 32, keys="int4").fitted(64)
    assert found.slot_bytes(1, 64, 4) == (64 + 2 * 2 * 4) + (32 + 2 * 2 * 4)
    assert CacheFormat("range-int2").fitted(64).protected_row_bytes(3, 64, 4) == 3 * (64 * 4 + 4)


@pytest.mark.parametrize(
    ("protect", "fraction"),
    [(0.05, (1, 20)), (0.1, (1, 10)), (0.07, (7, 100)), (0.29, (29, 100)), (0.5, (1, 2)), (1e-05, (1, 100000))],
)
def test_shares_are_exact_decimals(protect: float, fraction: tuple[int, int]) -> None:
    """``0.07 * 100`` is 7.000000000000001 in floating point, ``0.29 * 100`` is 28.999999999999996."""
    found = CacheFormat("range-int4", protect=protect)
    numerator, denominator = fraction
    for tokens in (*range(400), 10**6, 10**9, 10**15):
        assert found.allowed(tokens) == tokens * numerator // denominator


def test_a_twentieth_of_sixty_is_three() -> None:
    found = CacheFormat("range-int4")
    assert [found.allowed(tokens) for tokens in (0, 19, 20, 59, 60, 61)] == [0, 0, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("slots", "requests", "recent", "rows"),
    [
        pytest.param(1000, 2, 16, 50 + 2 * (32 + 4), id="share and requests"),
        pytest.param(1000, 0, 16, 50, id="no request"),
        pytest.param(100, 8, 64, 100, id="never more than slots"),
    ],
)
def test_there_are_rows_for_the_share_of_all_tokens_and_for_sinks_and_newest_of_each_request(
    slots: int, requests: int, recent: int, rows: int
) -> None:
    found = CacheFormat("range-int4").protected_rows(slots, requests, recent)
    assert rows <= found <= min(slots, rows + 1)
    assert CacheFormat("int4").protected_rows(slots, requests, recent) == 0
