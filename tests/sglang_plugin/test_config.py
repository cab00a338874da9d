"""Which `kv_*` arguments make a configuration, and the sentence that each wrong one is answered with."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from kvpolicy.policies.curdkv import CurDKV
from kvpolicy.policies.registry import POLICIES
from kvpolicy.policies.vase_dkv import VaseDKV
from kvpolicy.sglang_plugin.config import ARGUMENTS, KVPolicyConfig, check_numbers, config_from
from kvpolicy.sglang_plugin.errors import KVPolicyError

VASE = {"kv_policy": "vase-dkv"}


def test_a_policy_alone_has_the_documented_defaults() -> None:
    config = config_from(VASE)
    assert config == KVPolicyConfig("vase-dkv", budget=4096, period=64, seed=0, options="", trace=None)
    assert config is not None
    assert [(arm.name, arm.policy) for arm in config.arms.values()] == [("vase-dkv", VaseDKV())]


@pytest.mark.parametrize("arguments", [{}, {"kv_policy": None}, dict.fromkeys(ARGUMENTS)], ids=["none", "one", "all"])
def test_nothing_given_is_no_configuration(arguments: dict[str, Any]) -> None:
    assert config_from(arguments) is None


def test_text_and_numbers_mean_the_same() -> None:
    text = {**VASE, "kv_budget": "512", "kv_period": " 32 ", "kv_seed": "7", "kv_options": "rank:8", "kv_trace": "out"}
    numbers = {**text, "kv_budget": 512, "kv_period": 32, "kv_seed": 7}
    assert config_from(text) == KVPolicyConfig("vase-dkv", 512, 32, 7, "rank:8", "out")
    assert config_from(numbers) == config_from(text)


def test_a_value_of_none_is_not_given() -> None:
    assert config_from({**VASE, "kv_budget": None, "kv_options": None}) == KVPolicyConfig("vase-dkv")


def test_a_folder_that_looks_like_a_number_stays_text() -> None:
    config = config_from({**VASE, "kv_trace": 2026})
    assert config is not None
    assert config.trace == "2026"


def test_options_reach_the_policy() -> None:
    config = KVPolicyConfig("curdkv", 128, options="variant:windowed;recent:8")
    assert config.arms["curdkv"].policy == CurDKV(variant="windowed", recent=8)


def test_every_field_is_an_argument() -> None:
    assert list(ARGUMENTS) == [f"kv_{field.name}" for field in dataclasses.fields(KVPolicyConfig)]


@pytest.mark.parametrize(
    ("policy", "options", "least"),
    [
        pytest.param("vase-dkv", "", 4 + 64 + 1, id="sinks and a period"),
        pytest.param("vase-dkv", "recent:8;sinks:0", 9, id="recent tokens only"),
        pytest.param("streaming-llm", "", 5, id="sinks only"),
        pytest.param("full", "", 1, id="full"),
    ],
)
def test_the_smallest_budget_leaves_one_token_to_choose(policy: str, options: str, least: int) -> None:
    assert KVPolicyConfig(policy, least, options=options).budget == least
    with pytest.raises(KVPolicyError):
        KVPolicyConfig(policy, least - 1, options=options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({"kv_policy": "vase"}, "kv_policy 'vase' is not known; did you mean 'vase-dkv'?", id="unknown"),
        pytest.param({"kv_policy": "zzz"}, f"known: {', '.join(POLICIES)}.", id="like no other"),
        pytest.param({"kv_policy": ""}, "kv_policy '' is not known", id="empty policy"),
        pytest.param({"kv_policy": True}, "kv_policy 'True' is not known", id="true for a policy"),
        pytest.param({"kv_policy": "no_such:Policy"}, "kv_policy 'no_such:Policy' could not be imported", id="module"),
        pytest.param({"kv_policy": "pathlib:Path"}, "'pathlib:Path' is not a subclass of kvpolicy", id="another class"),
        pytest.param({**VASE, "kv_budget": "much"}, "kv_budget must be a whole number, got 'much'.", id="word"),
        pytest.param({**VASE, "kv_budget": ""}, "kv_budget must be a whole number, got ''.", id="empty number"),
        pytest.param({**VASE, "kv_budget": "4096.0"}, "kv_budget must be a whole number, got '4096.0'.", id="fraction"),
        pytest.param({**VASE, "kv_budget": 512.0}, "kv_budget must be a whole number, got 512.0.", id="float"),
        pytest.param({**VASE, "kv_seed": True}, "kv_seed must be a whole number, got True.", id="true"),
        pytest.param({**VASE, "kv_budget": 0}, "kv_budget must be at least 1 and fit 64 bits, got 0.", id="no budget"),
        pytest.param({**VASE, "kv_budget": "-1"}, "kv_budget must be at least 1", id="negative budget"),
        pytest.param({**VASE, "kv_period": 0}, "kv_period must be at least 1", id="no period"),
        pytest.param({**VASE, "kv_seed": -1}, "kv_seed must be at least 0", id="negative seed"),
        pytest.param({**VASE, "kv_seed": 2**63}, "fit 64 bits, got 9223372036854775808.", id="65 bits"),
        pytest.param({**VASE, "kv_budget": 68}, "kv_budget=68 leaves nothing to choose: vase-dkv", id="forced"),
        pytest.param({**VASE, "kv_budget": 68}, "always keeps 68 tokens (sinks + recent)", id="forced count"),
        pytest.param({**VASE, "kv_budget": 68}, "the budget must be at least 69;", id="smallest budget"),
        pytest.param({**VASE, "kv_period": 5000}, "raise kv_budget, or lower kv_period or the", id="long period"),
        pytest.param({**VASE, "kv_options": "rank"}, "written name:value;name:value, got 'rank'.", id="no value"),
        pytest.param({**VASE, "kv_options": "rank:8;rank:9"}, "kv_options gives 'rank' twice.", id="twice"),
        pytest.param({**VASE, "kv_options": "ranks:8"}, "'vase-dkv' has no option 'ranks'; its options", id="option"),
        pytest.param({**VASE, "kv_options": "rank:x"}, "option 'rank' must be a whole number, got", id="word for rank"),
        pytest.param(
            {**VASE, "kv_options": "rank:-2"}, "option 'rank' must be at least 1, got '-2'", id="negative option"
        ),
        pytest.param(
            {"kv_policy": "curdkv", "kv_options": "variant:open"}, "is one of fixed, windowed, got 'open'.", id="choice"
        ),
        pytest.param({"kv_policy": "full", "kv_options": "sinks:4"}, "defaults: none.", id="options of full"),
        pytest.param({"kv_policy": "full|vase-dkv", "kv_options": "rank:8"}, "belongs to one policy,", id="two"),
        pytest.param({"kv_policy": "full|full"}, "kv_policy names 'full' twice.", id="same policy twice"),
        pytest.param({"kv_budget": 512}, "kv_budget would have no effect without kv_policy; name", id="no policy"),
        pytest.param(
            {"kv_seed": 1, "kv_budget": 5, "kv_policy": None}, "kv_budget, kv_seed would have", id="two, no policy"
        ),
    ],
)
def test_a_wrong_configuration_is_answered_with_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KVPolicyError) as caught:
        config_from(arguments)
    message = str(caught.value)
    assert sentence in message
    assert message.endswith(".")
    assert not message.endswith("..")
    assert "\n" not in message


@pytest.mark.parametrize("option", ["rank:0", "variant:windowed;window:0"])
def test_a_size_of_zero_is_refused_before_anything_is_loaded(option: str) -> None:
    with pytest.raises(KVPolicyError):
        config_from({"kv_policy": "curdkv", "kv_options": option})


@pytest.mark.parametrize(
    ("policy", "budget", "period", "sentence"),
    [
        pytest.param("vase-dkv|full", 68, 64, "vase-dkv always keeps 68 tokens", id="budget of the first"),
        pytest.param("full|vase-dkv[recent:8]|vase-dkv", 68, 64, "always keeps 68", id="budget of the last"),
        pytest.param("full|snapkv[window:9;recent:8]", 512, 64, "recent option must be at least 9", id="window"),
        pytest.param("full|snapkv[recent:8]", 512, 9, "recent option must be at least 9", id="period as a window"),
        pytest.param("full|vase-attnv[n_value_reserve:0.9]", 512, 64, "460 of kv_budget=512 tokens", id="reserve"),
    ],
)
def test_every_arm_is_checked_with_the_budget_and_period_of_the_launch(
    policy: str, budget: int, period: int, sentence: str
) -> None:
    with pytest.raises(KVPolicyError) as caught:
        KVPolicyConfig(policy, budget, period)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "period", "window"),
    [
        pytest.param("full", 64, 0, id="full"),
        pytest.param("vase-dkv|random", 64, 0, id="no policy reads queries"),
        pytest.param("snapkv", 48, 48, id="the period"),
        pytest.param("full|snapkv[window:8]|vase-dkv", 48, 8, id="one of three"),
        pytest.param("snapkv[window:8]|vase-attnv[window:16]|full", 48, 16, id="the largest, second"),
        pytest.param("vase-attnv[window:16]|snapkv[window:8]", 48, 16, id="the largest, first"),
        pytest.param("snapkv[variant:kvpress]|snapkv", 48, 64, id="more than the period"),
    ],
)
def test_the_query_window_is_the_largest_of_all_arms(policy: str, period: int, window: int) -> None:
    assert KVPolicyConfig(policy, budget=512, period=period).query_window == window


@pytest.mark.parametrize("name", ["budget", "period", "seed"])
@pytest.mark.parametrize(
    "value", [True, False, 64.0, "64", None, [64], -1, 2**63], ids=lambda value: f"{type(value).__name__} {value}"
)
def test_a_number_that_is_not_whole_or_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(KVPolicyError, match=f"^kv_{name} must be"):
        check_numbers(**{name: value})


def test_the_ends_of_the_ranges_pass() -> None:
    check_numbers(budget=1, period=1, seed=0)
    check_numbers(budget=2**63 - 1, period=2**63 - 1, seed=2**63 - 1)


def test_a_configuration_is_the_same_in_another_process() -> None:
    config = KVPolicyConfig("vase-dkv", 512, options="rank:8")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 1  # type: ignore[misc]


def test_arms_that_were_read_change_neither_equality_nor_what_arrives_in_another_process() -> None:
    read, fresh = (KVPolicyConfig("snapkv[window:8]|full", 512) for _ in range(2))
    vars(fresh).pop("arms")  # as if its arms had never been asked for
    assert list(read.arms) == ["snapkv[window:8]", "full"]
    assert read == fresh
    assert hash(read) == hash(fresh)
    for config in (read, fresh):
        arrived = pickle.loads(pickle.dumps(config))
        assert arrived == read
        assert list(arrived.arms.items()) == list(read.arms.items())


def test_a_replaced_policy_has_arms_of_its_own() -> None:
    config = KVPolicyConfig("vase-dkv", 512)
    assert list(config.arms) == ["vase-dkv"]
    assert list(dataclasses.replace(config, policy="full").arms) == ["full"]
