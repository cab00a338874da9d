"""The arguments of low-bit storage: what is allowed, and what one sentence says of the rest."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from kvpolicy.quant.cache_format import CacheFormat
from kvpolicy.sglang_plugin.config import KVPolicyConfig, config_from
from kvpolicy.sglang_plugin.errors import KVPolicyError

VASE = {"kv_policy": "vase-dkv"}
RANGE = {"kv_quant": "range-int4"}
ALL_FORMATS = "int8, int4, int2, range-int8, range-int4, range-int2"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({"kv_quant": "int3"}, f"kv_quant='int3' is not a format; use {ALL_FORMATS}.", id="format"),
        pytest.param({"kv_quant": ""}, f"kv_quant='' is not a format; use {ALL_FORMATS}.", id="empty format"),
        pytest.param({"kv_quant": 4}, f"kv_quant='4' is not a format; use {ALL_FORMATS}.", id="bits for a format"),
        pytest.param({**VASE, "kv_quant": "none"}, "kv_quant='none' is not a format; use", id="none for a format"),
        pytest.param({**RANGE, "kv_quant_group": "x"}, "kv_quant_group must be a whole number, got 'x'.", id="word"),
        pytest.param(
            {**RANGE, "kv_quant_group": "64.0"}, "must be a whole number, got '64.0'.", id="text of a fraction"
        ),
        pytest.param({**RANGE, "kv_quant_group": 64.0}, "kv_quant_group must be a whole number, got 64.0.", id="float"),
        pytest.param({**RANGE, "kv_quant_group": True}, "kv_quant_group must be a whole number, got True.", id="true"),
        pytest.param({**RANGE, "kv_protect": "5%"}, "kv_protect must be a number, got '5%'.", id="per cent"),
        pytest.param({**RANGE, "kv_protect": [0.1]}, "kv_protect must be a number, got [0.1].", id="a list"),
        pytest.param({**RANGE, "kv_protect": 5}, "kv_protect=5.0 must be above 0 and at most 0.5.", id="too many"),
        pytest.param(
            {**RANGE, "kv_protect": "0"}, "kv_protect=0.0 must be above 0 and at most 0.5.", id="none of them"
        ),
        pytest.param({**RANGE, "kv_protect": "nan"}, "kv_protect=nan must be above 0 and at most", id="not a number"),
        pytest.param(
            {**RANGE, "kv_quant_keys": "int2"}, "kv_quant_keys='int2' is not a format of keys; use", id="keys"
        ),
        pytest.param({**RANGE, "kv_quant_keys": ""}, "is not a format of keys; use none, int8, int4.", id="empty keys"),
        pytest.param(
            {"kv_quant": "int4", "kv_protect": 0.05},
            "kv_protect would have no effect with kv_quant=int4; use kv_quant=range-int4.",
            id="nothing is protected",
        ),
        pytest.param(
            {**VASE, "kv_quant_group": 64},
            f"kv_quant_group would have no effect without kv_quant; name a format: {ALL_FORMATS}.",
            id="group without a format",
        ),
        pytest.param({**VASE, "kv_protect": 0.1}, "kv_protect would have no effect without kv_quant;", id="protect"),
        pytest.param(
            {**VASE, "kv_quant_keys": "none", "kv_protect": "0.1", "kv_quant_group": 64},
            "kv_quant_group, kv_protect, kv_quant_keys would have no effect without kv_quant; name a format:",
            id="all of a format but its name",
        ),
        pytest.param(
            {**RANGE, "kv_budget": 512}, "kv_budget would have no effect without kv_policy;", id="budget of no policy"
        ),
        pytest.param(
            {"kv_quant": "int4", "kv_period": 32}, "kv_period would have no effect without kv_policy;", id="no period"
        ),
        pytest.param({**RANGE, "kv_seed": 1}, "kv_seed would have no effect without kv_policy", id="seed of no policy"),
        pytest.param(
            {**RANGE, "kv_trace": "out"}, "kv_trace would have no effect without kv_policy", id="trace of no policy"
        ),
        pytest.param(
            {**RANGE, "kv_options": "rank:8"}, "kv_options would have no effect without kv_policy", id="options of none"
        ),
        pytest.param({**RANGE, "kv_period": 0}, "kv_period must be at least 1", id="no period"),
        pytest.param({"kv_protect": 0.1}, "kv_protect would have no effect without", id="alone"),
        pytest.param(
            {"kv_policy": "thinkv[ladder:R4E4T2]"},
            "thinkv[ladder:R4E4T2] stores tokens in 4 or 2 bits, in a cache of 4; use kv_quant=int4 or "
            "kv_quant=range-int4, or leave its ladder out.",
            id="a ladder without a format",
        ),
        pytest.param(
            {"kv_policy": "full|thinkv[ladder:R4E4T2]", "kv_quant": "int8"}, "in a cache of 4; use", id="wider than it"
        ),
        pytest.param(
            {"kv_policy": "thinkv[ladder:R8E4T2]", "kv_quant": "range-int4"}, "8 or 4 or 2 bits", id="narrower than it"
        ),
    ],
)
def test_a_wrong_format_is_answered_with_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KVPolicyError) as caught:
        config_from(arguments)
    message = str(caught.value)
    assert sentence in message
    assert message.endswith(".")
    assert not message.endswith("..")
    assert "\n" not in message


def test_a_format_alone_keeps_every_token() -> None:
    assert config_from({"kv_quant": "int4"}) == KVPolicyConfig("full", quant="int4")
    assert config_from({**RANGE, "kv_policy": None, "kv_period": "32", "kv_budget": None}) == KVPolicyConfig(
        "full", period=32, quant="range-int4"
    )


def test_a_format_and_a_policy_are_independent() -> None:
    config = config_from({**VASE, **RANGE, "kv_budget": 512})
    assert config == KVPolicyConfig("vase-dkv", 512, quant="range-int4")
    assert config.cache_format == CacheFormat("range-int4")
    assert KVPolicyConfig("vase-dkv").cache_format is None


def test_text_and_numbers_of_a_format_mean_the_same() -> None:
    text = {**RANGE, "kv_quant_group": " 32 ", "kv_protect": "0.1", "kv_quant_keys": "int8", "kv_period": "16"}
    numbers = {**text, "kv_quant_group": 32, "kv_protect": 0.1, "kv_period": 16}
    config = config_from(text)
    assert config == config_from(numbers)
    assert config is not None
    assert config.cache_format == CacheFormat("range-int4", group=32, protect=0.1, keys="int8")
    assert (type(config.quant_group), type(config.protect)) == (int, float)


def test_what_a_format_leaves_open_is_its_default() -> None:
    config = KVPolicyConfig("full", quant="int2", quant_keys="none")
    assert (config.quant_group, config.protect) == (None, None)
    assert config.cache_format == CacheFormat("int2", group=None, protect=0.05, keys="none")


def test_a_format_is_the_same_in_another_process() -> None:
    config = KVPolicyConfig("full", quant="range-int8", protect=0.2)
    arrived = pickle.loads(pickle.dumps(config))
    assert arrived == config
    assert arrived.cache_format == config.cache_format == CacheFormat("range-int8", protect=0.2)
    assert dataclasses.replace(config, quant="range-int2").cache_format == CacheFormat("range-int2", protect=0.2)
