"""``name:value;name:value`` becomes typed fields, or a sentence that says what would."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
import torch

from kvpolicy.policies.base import Candidates, Noise, Policy
from kvpolicy.policies.curdkv import CurDKV
from kvpolicy.policies.full import Full
from kvpolicy.policies.options import build, parse_options


@dataclass(frozen=True)
class Sample(Policy):
    """A policy with a field of every type that options can set."""

    name: ClassVar[str] = "sample"

    count: int = 1
    share: float = 0.5
    smooth: bool = False
    mode: Literal["mean", "max"] = "mean"
    recent: int | None = None
    ratio: float | None = 0.25
    kernel: int | None = field(default=None, metadata={"least": 3, "odd": True})
    temperature: float = field(default=1.0, metadata={"least": 1e-6})

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param("", {}, id="empty"),
        pytest.param("rank:8", {"rank": "8"}, id="one"),
        pytest.param("rank:8;sinks:0", {"rank": "8", "sinks": "0"}, id="two"),
        pytest.param(" rank : 8 ;; sinks:0 ; ", {"rank": "8", "sinks": "0"}, id="spaces and empty pieces"),
        pytest.param("path:a:b", {"path": "a:b"}, id="a colon in the value"),
        pytest.param("rank:8,sinks", {"rank": "8,sinks"}, id="a comma in the value"),
        pytest.param("base:x[a:1;b:2];rank:8", {"base": "x[a:1;b:2]", "rank": "8"}, id="semicolons in brackets"),
        pytest.param("base:x[y:z[a:1;b:2];c:3]", {"base": "x[y:z[a:1;b:2];c:3]"}, id="brackets in brackets"),
        pytest.param("a:[];b:[;];;c:1", {"a": "[]", "b": "[;]", "c": "1"}, id="nothing in brackets"),
    ],
)
def test_text_is_split_into_names_and_values(text: str, options: dict[str, str]) -> None:
    assert parse_options(text) == options


@pytest.mark.parametrize("text", ["rank", "rank:", ":8", "rank:8;sinks", "rank=8"])
def test_a_piece_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="written name:value;name:value, got '"):
        parse_options(text)


@pytest.mark.parametrize("text", ["base:x[a:1;rank:8", "base:x]a:1;rank:8", "base:x]a:1[;rank:8", "base:x[[a:1];b:2"])
def test_brackets_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the brackets of kv_options {text!r} do not match")):
        parse_options(text)


def test_a_name_is_given_twice_only_outside_of_brackets() -> None:
    assert parse_options("base:x[sinks:1;base:y];sinks:2") == {"base": "x[sinks:1;base:y]", "sinks": "2"}
    with pytest.raises(ValueError, match="gives 'sinks' twice"):
        parse_options("sinks:2;base:x[sinks:1];sinks:3")


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_options gives 'rank' twice"):
        parse_options("rank:8;sinks:4;rank:8")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        pytest.param("count", "7", 7, id="whole number"),
        pytest.param("count", "0", 0, id="zero"),
        pytest.param("share", "0.125", 0.125, id="number"),
        pytest.param("share", "1e-3", 0.001, id="exponent"),
        pytest.param("smooth", "true", True, id="true"),
        pytest.param("smooth", "False", False, id="false"),
        pytest.param("mode", "max", "max", id="choice"),
        pytest.param("recent", "none", None, id="none"),
        pytest.param("recent", "16", 16, id="number where none is possible"),
        pytest.param("ratio", "None", None, id="none in capitals"),
        pytest.param("ratio", "0.5", 0.5, id="fraction where none is possible"),
        pytest.param("kernel", "3", 3, id="odd number and the least"),
        pytest.param("kernel", "7", 7, id="odd number"),
        pytest.param("kernel", "none", None, id="none where numbers must be odd"),
        pytest.param("count", "4", 4, id="even number where any will do"),
        pytest.param("temperature", "1e-6", 1e-6, id="the least number"),
        pytest.param("share", "1e308", 1e308, id="a number that is nearly infinite"),
    ],
)
def test_values_take_the_type_of_their_field(name: str, text: str, value: object) -> None:
    built = getattr(build(Sample, {name: text}), name)
    assert built == value
    assert type(built) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        pytest.param("count", "many", "option 'count' must be a whole number, got 'many'", id="word"),
        pytest.param("count", "1.5", "option 'count' must be a whole number, got '1.5'", id="fraction"),
        pytest.param("count", "-1", "option 'count' must be at least 0, got '-1'", id="negative"),
        pytest.param("count", "none", "option 'count' must be a whole number, got 'none'", id="none"),
        pytest.param("share", "half", "option 'share' must be a number, got 'half'", id="no number"),
        pytest.param("share", "-0.5", "option 'share' must be at least 0, got '-0.5'", id="negative number"),
        pytest.param("smooth", "yes", "option 'smooth' is true or false, got 'yes'", id="yes"),
        pytest.param("smooth", "1", "option 'smooth' is true or false, got '1'", id="one for true"),
        pytest.param("mode", "median", "option 'mode' is one of mean, max, got 'median'", id="no choice"),
        pytest.param("recent", "some", "option 'recent' must be a whole number, got 'some'", id="neither"),
        pytest.param("kernel", "4", "option 'kernel' must be odd, got '4'", id="even"),
        pytest.param("kernel", "1", "option 'kernel' must be at least 3, got '1'", id="odd but too small"),
        pytest.param("kernel", "2", "option 'kernel' must be at least 3, got '2'", id="even and too small"),
        pytest.param("kernel", "3.0", "option 'kernel' must be a whole number, got '3.0'", id="odd fraction"),
        pytest.param("temperature", "0", "option 'temperature' must be at least 1e-06, got '0'", id="below the least"),
    ],
)
def test_values_that_do_not_fit_are_refused(name: str, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        build(Sample, {name: text})


@pytest.mark.parametrize("name", ["share", "ratio", "temperature"])
@pytest.mark.parametrize("text", ["inf", "-inf", "Infinity", "1e400", "nan", "NaN"])
def test_infinities_and_what_is_no_number_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^option '{name}' must be .*, got '{text}'$"):
        build(Sample, {name: text})


@pytest.mark.parametrize("text", ["inf", "nan", "1e3"])
def test_a_whole_number_is_written_in_digits(text: str) -> None:
    with pytest.raises(ValueError, match=f"^option 'count' must be a whole number, got '{text}'$"):
        build(Sample, {"count": text})


def test_an_unknown_option_lists_the_options_with_their_defaults() -> None:
    with pytest.raises(ValueError, match="'curdkv' has no option 'ranks'; its options and defaults: ") as caught:
        build(CurDKV, {"ranks": "8"})
    assert str(caught.value).endswith("sinks (4), recent (None), variant (fixed), rank (20), window (16)")


def test_a_policy_without_options_says_so() -> None:
    with pytest.raises(ValueError, match="'full' has no option 'sinks'; its options and defaults: none"):
        build(Full, {"sinks": "4"})


def test_options_that_are_not_given_keep_their_defaults() -> None:
    assert build(CurDKV, {"rank": "8"}) == CurDKV(rank=8)
    assert build(Sample, {}) == Sample()
