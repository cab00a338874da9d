"""What a request's `custom_params` make of the launch's settings, and the sentence for each wrong one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvpolicy.kernels.keyed_noise import mixed_seed
from kvpolicy.policies.base import Needs
from kvpolicy.policies.full import Full
from kvpolicy.policies.vase_dkv import VaseDKV
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.request_settings import PARAMETERS, SAMPLE_KEY, RequestSettings, request_settings

LAUNCH = KVPolicyConfig("vase-dkv[rank:8]|full|snapkv|vase-attnv[window:8]", budget=512, period=64, seed=7)
RESERVE = KVPolicyConfig("vase-attnv[window:8;n_value_reserve:200]", budget=512, period=64)
SEED_ENDS = [pytest.param(seed, id=str(seed)) for seed in (0, 1, -1, 42, 2**63 - 1, -(2**63))]


@dataclass(frozen=True)
class Growing(Full):
    """Reads more queries the shorter the period is."""

    name: ClassVar[str] = "growing"

    def needs(self, period: int) -> Needs:
        return Needs(queries=128 - period)


@pytest.mark.parametrize(
    "custom",
    [
        pytest.param(None, id="no parameters"),
        pytest.param({}, id="empty"),
        pytest.param({"kv_policy": None}, id="no policy chosen"),
        pytest.param({"thinking_budget": 5, "kv": 1, "KV_BUDGET": 1, "my_kv_budget": 2}, id="of others"),
    ],
)
def test_a_request_that_chooses_nothing_has_the_settings_of_the_launch(custom: dict[str, Any] | None) -> None:
    settings = request_settings(LAUNCH, custom)
    assert settings == RequestSettings(LAUNCH.arms["vase-dkv[rank:8]"], 512, 64, 7, None)
    assert settings.arm.policy == VaseDKV(rank=8)


@pytest.mark.parametrize(
    ("custom", "expected"),
    [
        pytest.param({"kv_policy": "full"}, ("full", 512, 64, 7), id="policy"),
        pytest.param({"kv_policy": "vase-attnv[window:8]"}, ("vase-attnv[window:8]", 512, 64, 7), id="brackets"),
        pytest.param({"kv_policy": "vase-dkv[rank:8]"}, ("vase-dkv[rank:8]", 512, 64, 7), id="the default by name"),
        pytest.param({"kv_budget": 100}, ("vase-dkv[rank:8]", 100, 64, 7), id="budget"),
        pytest.param({"kv_period": 16}, ("vase-dkv[rank:8]", 512, 16, 7), id="period"),
        pytest.param({"kv_budget": 512, "kv_period": 64}, ("vase-dkv[rank:8]", 512, 64, 7), id="as at launch"),
        pytest.param({"kv_seed": 8}, ("vase-dkv[rank:8]", 512, 64, 8), id="seed"),
        pytest.param({"kv_seed": 0}, ("vase-dkv[rank:8]", 512, 64, 0), id="seed below that of the launch"),
        pytest.param(
            {"kv_policy": "snapkv", "kv_budget": 99, "kv_period": 9, "kv_seed": 3, "kvx": 1},
            ("snapkv", 99, 9, 3),
            id="all",
        ),
    ],
)
def test_each_parameter_overrides_the_launch(custom: dict[str, Any], expected: tuple[str, int, int, int]) -> None:
    settings = request_settings(LAUNCH, custom)
    assert (settings.arm.name, settings.budget, settings.period, settings.seed) == expected
    assert settings.arm is LAUNCH.arms[expected[0]]


@pytest.mark.parametrize(
    ("custom", "sentence"),
    [
        pytest.param({"kv_buget": 9}, "custom_params has no kv_buget: a request may set", id="misspelt"),
        pytest.param({"kv_buget": 9}, "; did you mean kv_budget?", id="suggestion"),
        pytest.param({"kv_zzzzzzzzzzzz": 9}, f"{', '.join(PARAMETERS)}.", id="like no other"),
        pytest.param({"kv_options": "rank:8"}, "custom_params has no kv_options", id="options"),
        pytest.param({"kv_trace": "out"}, "custom_params has no kv_trace", id="trace"),
        pytest.param({"kv_policy": "vase-dkv"}, "kv_policy 'vase-dkv' of a request was not named", id="other options"),
        pytest.param({"kv_policy": "random"}, " | full | snapkv | vase-attnv[window:8]: add it", id="not at launch"),
        pytest.param({"kv_policy": "full|snapkv"}, "kv_policy 'full|snapkv' of a request was not", id="several"),
        pytest.param({"kv_policy": ""}, "kv_policy '' of a request was not named at launch", id="empty policy"),
        pytest.param({"kv_policy": 1}, "kv_policy 1 of a request was not named at launch", id="number for a policy"),
        pytest.param({"kv_budget": 513}, "kv_budget=513 of a request exceeds the kv_budget=512", id="more budget"),
        pytest.param({"kv_period": 65}, "kv_period=65 of a request exceeds the kv_period=64", id="longer period"),
        pytest.param({"kv_budget": 0}, "kv_budget must be at least 1 and fit 64 bits, got 0.", id="no budget"),
        pytest.param({"kv_period": 0}, "kv_period must be at least 1", id="no period"),
        pytest.param({"kv_seed": -1}, "kv_seed must be at least 0 and fit 64 bits, got -1.", id="negative seed"),
        pytest.param({"kv_seed": 2**63}, "fit 64 bits, got 9223372036854775808.", id="65 bits"),
        pytest.param({"kv_budget": 68}, "kv_budget=68 leaves nothing to choose: vase-dkv", id="budget of the policy"),
        pytest.param({"kv_policy": "snapkv", "kv_budget": 64}, "snapkv always keeps 64", id="budget of the chosen"),
    ],
)
def test_a_wrong_parameter_is_answered_with_one_sentence(custom: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KVPolicyError) as caught:
        request_settings(LAUNCH, custom)
    message = str(caught.value)
    assert sentence in message
    assert message.endswith((".", "?"))
    assert not message.endswith("..")
    assert "\n" not in message


@pytest.mark.parametrize("policy", [["full"], {"name": "full"}], ids=["list", "object"])
def test_a_policy_that_is_no_text_is_refused_as_not_named_at_launch(policy: Any) -> None:
    with pytest.raises(KVPolicyError, match="of a request was not named at launch"):
        request_settings(LAUNCH, {"kv_policy": policy})


@pytest.mark.parametrize("name", ["kv_budget", "kv_period", "kv_seed"])
@pytest.mark.parametrize("value", [True, False, 64.0, "64", [64]], ids=["true", "false", "float", "text", "list"])
def test_a_value_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(KVPolicyError, match=f"^{name} must be a whole number, got "):
        request_settings(LAUNCH, {name: value})


def test_a_shorter_period_protects_fewer_recent_tokens_so_that_a_smaller_budget_will_do() -> None:
    with pytest.raises(KVPolicyError, match="always keeps 68 tokens"):
        request_settings(LAUNCH, {"kv_budget": 25})
    assert request_settings(LAUNCH, {"kv_budget": 25, "kv_period": 20}).budget == 25
    with pytest.raises(KVPolicyError, match="always keeps 24 tokens"):
        request_settings(LAUNCH, {"kv_budget": 24, "kv_period": 20})


def test_a_reserve_that_fits_the_launch_may_be_too_much_for_the_budget_of_a_request() -> None:
    assert request_settings(RESERVE, {"kv_budget": 264}).budget == 264
    with pytest.raises(KVPolicyError, match=r"200 of kv_budget=263 tokens for vase-attnv; .* at most the 199 tokens"):
        request_settings(RESERVE, {"kv_budget": 263})


def test_a_window_that_fits_the_launch_may_be_too_much_for_the_period_of_a_request() -> None:
    assert request_settings(RESERVE, {"kv_period": 8}).needs.queries == 8
    with pytest.raises(KVPolicyError, match="recent option must be at least 8"):
        request_settings(RESERVE, {"kv_period": 7})


def test_the_query_window_is_that_of_the_chosen_policy_and_period() -> None:
    windows = {name: request_settings(LAUNCH, {"kv_policy": name}).needs.queries for name in LAUNCH.arms}
    assert windows == {"vase-dkv[rank:8]": 0, "full": 0, "snapkv": 64, "vase-attnv[window:8]": 8}
    assert request_settings(LAUNCH, {"kv_policy": "snapkv", "kv_period": 20}).needs.queries == 20


def test_a_window_beyond_what_the_launch_records_is_refused() -> None:
    launch = KVPolicyConfig(f"full|{__name__}:Growing", budget=512, period=64)
    name = f"{__name__}:Growing"
    assert request_settings(launch, {"kv_policy": name}).needs.queries == launch.query_window == 64
    with pytest.raises(KVPolicyError, match=r"would read 65 queries with kv_period=63, .* records 64; leave kv_period"):
        request_settings(launch, {"kv_policy": name, "kv_period": 63})
    assert request_settings(launch, {"kv_period": 63}).period == 63


def test_without_a_seed_sglang_samples_and_the_seed_of_the_launch_evicts() -> None:
    settings = request_settings(LAUNCH, {"kv_policy": "full", "kv_budget": 100})
    assert (settings.seed, settings.sampling_seed) == (LAUNCH.seed, None)
    assert request_settings(LAUNCH, {SAMPLE_KEY: 2}).sampling_seed is None


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1], ids=["0", "that of the launch", "the largest"])
def test_the_seed_of_a_request_keys_evictions_and_tokens(seed: int) -> None:
    settings = request_settings(LAUNCH, {"kv_seed": seed})
    assert (settings.seed, settings.sampling_seed) == (seed, mixed_seed(seed, 0))


def test_a_sampling_seed_keys_the_tokens_and_leaves_the_evictions_alone() -> None:
    assert request_settings(LAUNCH, {}, sampling_seed=5).seed == LAUNCH.seed
    settings = request_settings(LAUNCH, {"kv_seed": 9}, sampling_seed=5)
    assert (settings.seed, settings.sampling_seed) == (9, mixed_seed(5, 0))


def test_the_samples_of_one_request_differ_in_both_seeds_and_are_the_same_each_time() -> None:
    samples = [request_settings(LAUNCH, {"kv_seed": 3, SAMPLE_KEY: number}) for number in range(8)]
    assert samples[0] == request_settings(LAUNCH, {"kv_seed": 3})
    assert samples == [request_settings(LAUNCH, {"kv_seed": 3, SAMPLE_KEY: number}) for number in range(8)]
    assert len({settings.seed for settings in samples}) == 8
    assert len({settings.sampling_seed for settings in samples}) == 8
    assert all(0 <= settings.seed < 2**63 for settings in samples)


def test_samples_without_a_seed_of_their_own_still_evict_differently() -> None:
    assert len({request_settings(LAUNCH, {SAMPLE_KEY: number}).seed for number in range(8)}) == 8


@pytest.mark.parametrize("number", [0, 1, 31])
@pytest.mark.parametrize("seed", SEED_ENDS)
def test_a_sampling_seed_of_any_sign_becomes_one_in_range(seed: int, number: int) -> None:
    custom = {SAMPLE_KEY: number}
    found = request_settings(LAUNCH, custom, sampling_seed=seed).sampling_seed
    assert found is not None
    assert 0 <= found < 2**63
    assert found == request_settings(LAUNCH, custom, sampling_seed=seed).sampling_seed
    others = [other.values[0] for other in SEED_ENDS if other.values[0] != seed]
    assert found not in [request_settings(LAUNCH, custom, sampling_seed=other).sampling_seed for other in others]


def test_the_parameters_of_the_client_are_left_alone() -> None:
    custom = {"kv_policy": "full", "kv_seed": 3, "other": [1], SAMPLE_KEY: 1}
    request_settings(LAUNCH, custom)
    assert custom == {"kv_policy": "full", "kv_seed": 3, "other": [1], SAMPLE_KEY: 1}
