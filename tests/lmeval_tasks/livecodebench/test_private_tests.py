import base64
import json
import os
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.livecodebench import private_tests
from kvpolicy.lmeval_tasks.livecodebench.private_tests import decode
from tests.lmeval_tasks.livecodebench.toys import case, encoded

CASES = [case("1 2\n", "3"), case("é\N{GREEK SMALL LETTER PI}", "\N{GRINNING FACE}")]


class Calls:
    """A pickle of this calls `function` when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_decodes_what_the_hub_stores(protocol: int) -> None:
    pickled = pickle.dumps(json.dumps(CASES), protocol)
    assert decode(base64.b64encode(zlib.compress(pickled)).decode()) == CASES


def test_decodes_plain_json() -> None:
    assert decode(json.dumps(CASES)) == CASES
    assert decode(" []") == []


def test_a_pickle_that_calls_a_function_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "made-by-the-pickle"
    hostile = Calls(os.mkdir, str(victim))
    pickle.loads(pickle.dumps(hostile))
    assert victim.is_dir(), "the pickle does call it, elsewhere"
    victim.rmdir()
    with pytest.raises(ValueError, match=r"posix\.mkdir"):
        decode(encoded(hostile))
    assert not victim.exists()


@pytest.mark.parametrize(
    "value",
    [Calls(eval, "1"), ["a", Calls(os.getcwd)], OrderedDict(a=1), Calls(str, "[]"), os.system, Path("a")],
    ids=["eval", "inside a list", "harmless class", "even str itself", "function", "path"],
)
def test_every_class_and_function_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="only a string is allowed"):
        decode(encoded(value))


@pytest.mark.parametrize("value", [b"[]", ["[]"], 1, None, {"a": 1}, True], ids=repr)
def test_only_a_string_is_allowed(value: Any) -> None:
    with pytest.raises(ValueError, match="only a string is allowed"):
        decode(encoded(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no base 64!",
        base64.b64encode(b"not compressed").decode(),
        base64.b64encode(zlib.compress(b"no pickle")).decode(),
        base64.b64encode(zlib.compress(b"")).decode(),
        base64.b64encode(zlib.compress(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff")).decode(),
        base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-3]).decode(),
        encoded("no json"),
        encoded('{"a": 1}'),
        "[",
    ],
    ids=range(10),
)
def test_what_is_broken_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"private test cases|JSON|Expecting"):
        decode(text)


def test_a_small_text_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_tests, "_MOST_BYTES", 1_000_000)
    assert decode(encoded(json.dumps([case("x" * 900_000, "")])))
    with pytest.raises(ValueError, match="more than 1000000 bytes"):
        decode(encoded(json.dumps([case("x" * 1_100_000, "")])))
