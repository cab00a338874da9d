"""`meta_info` on generated texts, through what lm-eval does to a text between the engine and the task."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

from kvpolicy.sglang_plugin.lmeval_text import TextWithMeta, after_generate

META = {"kv_policy": {"policy": "vase-dkv", "evictions": 3}, "completion_tokens": 9}


ANSWER = "<think>one\n\ntwo</think>\n\n so #### 42\n\nQuestion: next"


@pytest.fixture
def text() -> TextWithMeta:
    return TextWithMeta(ANSWER, copy.deepcopy(META))


@pytest.mark.parametrize(
    "arguments", [(), ("\n\n",), ("\n\n", 1), ("not there",)], ids=["blank", "empty lines", "first", "nothing"]
)
def test_every_piece_of_a_split_remembers(text: TextWithMeta, arguments: tuple[Any, ...]) -> None:
    pieces = text.split(*arguments)
    assert pieces == str(text).split(*arguments)
    assert all(piece.meta_info is text.meta_info for piece in pieces)  # type: ignore[attr-defined]


def test_split_takes_keywords_as_str_does(text: TextWithMeta) -> None:
    assert text.split(sep="\n\n", maxsplit=1) == str(text).split(sep="\n\n", maxsplit=1)
    assert text.split(maxsplit=1) == str(text).split(maxsplit=1)


@pytest.mark.parametrize("chars", [None, "<"], ids=["blank", "a character"])
def test_a_stripped_text_remembers(chars: str | None) -> None:
    stripped = TextWithMeta("  < 42 ", META).lstrip(chars)
    assert stripped == "  < 42 ".lstrip(chars)
    assert stripped.meta_info is META


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_text_remembers(text: TextWithMeta, protocol: int) -> None:
    loaded = pickle.loads(pickle.dumps(text, protocol))
    assert (type(loaded), loaded, loaded.meta_info) == (TextWithMeta, text, META)


def test_copies_remember_and_deep_ones_are_independent(text: TextWithMeta) -> None:
    assert copy.copy(text).meta_info is text.meta_info
    deep = copy.deepcopy([text])[0]
    assert (type(deep), deep, deep.meta_info) == (TextWithMeta, text, META)
    deep.meta_info["kv_policy"]["evictions"] = 0
    assert text.meta_info == META


def test_it_is_text_everywhere_else(text: TextWithMeta) -> None:
    assert isinstance(text, str)
    assert {text: 1}[str(text)] == 1
    assert json.loads(json.dumps([text])) == [str(text)]
    assert type(str(text)) is str


@pytest.mark.parametrize(
    ("stop", "think_end_token", "expected"),
    [
        pytest.param(None, None, ANSWER, id="nothing"),
        pytest.param(None, "</think>", "so #### 42\n\nQuestion: next", id="end of thinking"),
        pytest.param(["Question:", "\n\n"], "</think>", "so #### 42", id="thinking and two stop strings"),
        pytest.param("</think>", None, "<think>one\n\ntwo", id="one stop string"),
        pytest.param(["", "not there"], "not there", ANSWER, id="none met"),
    ],
)
def test_texts_come_through_lm_eval_with_their_meta_info(
    text: TextWithMeta, stop: Any, think_end_token: str | None, expected: str
) -> None:
    utils = pytest.importorskip("lm_eval.models.utils")
    result = utils.postprocess_generated_text(text, stop, think_end_token)
    assert result == expected
    assert result.meta_info == META


def responses() -> list[dict[str, Any]]:
    return [{"text": f"answer {i}", "meta_info": {"id": i}} for i in range(2)]


def test_under_lm_eval_the_engine_returns_texts_that_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    result = after_generate(responses(), None, ["prompt"], {"temperature": 0})
    assert result == responses()
    assert [response["text"].meta_info for response in result] == [{"id": 0}, {"id": 1}]
    assert after_generate(responses()[1], None)["text"].meta_info == {"id": 1}


def test_without_lm_eval_responses_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    assert [type(response["text"]) for response in after_generate(responses(), None)] == [str, str]


@pytest.mark.parametrize("result", [iter([{"text": "a"}]), None], ids=["a stream", "nothing"])
def test_what_is_no_response_is_passed_on(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    assert after_generate(result, None) is result


def test_a_response_without_text_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    response = {"output_ids": [1, 2], "meta_info": {}}
    assert after_generate([response], None) == [{"output_ids": [1, 2], "meta_info": {}}]
