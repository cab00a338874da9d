from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning.options import Options

MODEL_ARGS = {
    "pretrained": "m",
    "kv_policy": "full",
    "enable_strict_thinking": True,
    "version": 1.0,
    "think_end_token": None,
}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        pytest.param({}, Options(), id="nothing"),
        pytest.param({"split": None, "subset": None}, Options(), id="none"),
        pytest.param({"split": "dev", "subset": 3}, Options("dev", 3), id="part"),
        pytest.param({"repeats": 16, "enable_thinking": False}, Options(repeats=16, enable_thinking=False), id="rest"),
    ],
)
def test_options_are_found_among_the_arguments_of_the_model(given: dict[str, Any], options: Options) -> None:
    assert Options.of(MODEL_ARGS | given) == options


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        pytest.param({"split": "test"}, r"^split must be all, dev or confirm, got 'test'\.$", id="split"),
        pytest.param({"split": 1}, r"^split must be all, dev or confirm, got 1\.$", id="split as a number"),
        pytest.param({"subset": 0}, r"^subset must be a whole number of at least 1, got 0\.$", id="no problem"),
        pytest.param({"subset": "ten"}, r"^subset must be .* got 'ten'\.$", id="a word"),
        pytest.param({"subset": 0.5}, r"^subset must be .* got 0\.5\.$", id="a share"),
        pytest.param({"repeats": True}, r"^repeats must be .* got True\.$", id="a truth value"),
        pytest.param({"repeats": -1}, r"^repeats must be .* got -1\.$", id="less than none"),
        pytest.param({"enable_thinking": "no"}, r"^enable_thinking must be True or False, got 'no'\.$", id="thinking"),
        pytest.param({"think_end_token": "</think>"}, r"^think_end_token=</think> makes lm-eval cut", id="cut off"),
        pytest.param({"spilt": "dev"}, r"^--metadata has no spilt; did you mean split\?$", id="misspelt split"),
        pytest.param({"Subset": 3}, r"did you mean subset\?$", id="capital"),
        pytest.param({"repeat": 3}, r"did you mean repeats\?$", id="singular"),
        pytest.param({"enable-thinking": False}, r"did you mean enable_thinking\?$", id="hyphen"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        Options.of(MODEL_ARGS | given)
