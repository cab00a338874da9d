"""Requests in the launching process: what is refused before it is sent, and how samples get their numbers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.sglang_plugin import arguments, incoming
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.request_settings import SAMPLE_KEY

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LAUNCH = KVPolicyConfig("vase-dkv|full", budget=256)


class ServerArgs:
    """A record with a `__dict__`, as SGLang's is."""


def validate(request: dict[str, Any], preferred: dict[str, Any] | None = None) -> None:
    """Hand a request of these attributes to the hook of a launch with policies."""
    server_args = ServerArgs()
    arguments.attach(server_args, LAUNCH)
    manager = SimpleNamespace(server_args=server_args, preferred_sampling_params=preferred)
    incoming.before_validate_request(manager, SimpleNamespace(**request), [1, 2])


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        pytest.param({"session_params": {"id": "s"}}, "sessions: a session reuses a row", id="session parameters"),
        pytest.param({"sampling_params": {"beam_width": 2}}, "beam search: beams share the rows", id="beams"),
    ],
)
def test_an_unsupported_request_is_refused(request_: dict[str, Any], reason: str) -> None:
    with pytest.raises(KVPolicyError, match=f"^kv_policy does not work with {reason}"):
        validate(request_)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({}, id="bare"),
        pytest.param({"session_params": None, "sampling_params": None}, id="nothing given"),
        pytest.param({"sampling_params": {"beam_width": 1, "temperature": 0}}, id="one beam"),
        pytest.param({"sampling_params": {"beam_width": None}}, id="no beam width"),
        pytest.param({"sampling_params": {"custom_params": None}}, id="no custom parameters"),
        pytest.param({"sampling_params": {"custom_params": {}}}, id="empty custom parameters"),
        pytest.param({"sampling_params": {"custom_params": {"thinking_budget": 3}}}, id="of others"),
        pytest.param({"sampling_params": {"custom_params": {"kv_policy": "full", "kv_budget": 100}}}, id="ours"),
    ],
)
def test_other_requests_pass_unchanged(request_: dict[str, Any]) -> None:
    before = copy.deepcopy(request_)
    validate(request_)
    assert request_ == before


@pytest.mark.parametrize(
    ("custom", "sentence"),
    [
        pytest.param({"kv_policy": "random"}, "kv_policy 'random' of a request was not named at launch", id="policy"),
        pytest.param({"kv_budget": 257}, "kv_budget=257 of a request exceeds", id="budget"),
        pytest.param({"kv_bugdet": 100}, "custom_params has no kv_bugdet", id="unknown name"),
        pytest.param({SAMPLE_KEY: 1}, f"custom_params must not contain {SAMPLE_KEY}.", id="the plugin's own key"),
        pytest.param({SAMPLE_KEY: 0}, f"custom_params must not contain {SAMPLE_KEY}.", id="its harmless value"),
        pytest.param([1], r"custom_params must be an object of names and values, got \[1\].", id="list"),
        pytest.param("kv_policy", "custom_params must be an object of names and values, got 'kv_policy'.", id="text"),
        pytest.param(7, "custom_params must be an object of names and values, got 7.", id="number"),
    ],
)
def test_wrong_custom_parameters_are_refused(custom: Any, sentence: str) -> None:
    with pytest.raises(KVPolicyError, match=sentence):
        validate({"sampling_params": {"custom_params": custom}})


@pytest.mark.parametrize(
    ("preferred", "own"),
    [
        pytest.param({"custom_params": {"kv_budget": 257}}, {}, id="nothing own"),
        pytest.param({"custom_params": {"kv_budget": 257}}, {"temperature": 0}, id="another parameter"),
        pytest.param({"custom_params": {"kv_budget": 100}}, {"custom_params": {"kv_budget": 257}}, id="own"),
        pytest.param({"temperature": 0}, {"custom_params": {"kv_budget": 257}}, id="own beside preferred"),
    ],
)
def test_preferred_parameters_count_where_a_request_has_none(preferred: dict[str, Any], own: dict[str, Any]) -> None:
    with pytest.raises(KVPolicyError, match="kv_budget=257 of a request exceeds"):
        validate({"sampling_params": own}, preferred)


@pytest.mark.parametrize("own", [{"kv_budget": 100}, {}, None], ids=["a budget", "empty", "null"])
def test_custom_parameters_of_a_request_replace_all_preferred_ones(own: dict[str, Any] | None) -> None:
    validate({"sampling_params": {"custom_params": own}}, {"custom_params": {"kv_budget": 257, "kv_policy": "random"}})


def test_a_preferred_beam_width_is_refused() -> None:
    with pytest.raises(KVPolicyError, match=r"^kv_policy does not work with beam search"):
        validate({"sampling_params": {"temperature": 0}}, {"beam_width": 2})


def test_another_engine_of_the_process_that_has_no_policy_takes_every_request() -> None:
    """`Engine(...)` beside `Engine(kv_policy=…)`: the hooks of the one are in the process of both."""
    stock = SimpleNamespace(server_args=ServerArgs(), preferred_sampling_params=None)
    for custom in ({"kv_policy": "vase-dkv"}, {"anything": 1}, None):
        request = SimpleNamespace(session_params={"id": "s"}, sampling_params={"custom_params": custom})
        incoming.before_validate_request(stock, request, [1, 2])


def parameters(**changed: Any) -> Any:
    """SGLang's own record of sampling parameters."""
    return pytest.importorskip("sglang.srt.sampling.sampling_params").SamplingParams(**changed)


def send(numbers: incoming.SampleNumbers, shared: Any) -> Any:
    """The parameters with which one shallow copy of a request leaves."""
    request = SimpleNamespace(sampling_params=shared)
    assert numbers.before_send_one_request(None, request) is None
    return request.sampling_params


def number_of(sent: Any) -> int:
    return (sent.custom_params or {}).get(SAMPLE_KEY, 0)


def waits_for_nothing(numbers: incoming.SampleNumbers) -> bool:
    return vars(numbers) == vars(incoming.SampleNumbers())


@pytest.mark.parametrize("custom", [None, {"kv_seed": 3}], ids=["no custom parameters", "a seed"])
def test_a_single_sample_is_sent_as_it_is(custom: dict[str, Any] | None) -> None:
    numbers, shared = incoming.SampleNumbers(), parameters(custom_params=custom)
    assert send(numbers, shared) is shared
    assert shared == parameters(custom_params=custom)
    assert waits_for_nothing(numbers)


def test_a_request_without_sampling_parameters_is_sent_as_it_is() -> None:
    numbers, request = incoming.SampleNumbers(), SimpleNamespace(text="an embedding")
    assert numbers.before_send_one_request(None, request) is None
    assert vars(request) == {"text": "an embedding"}
    assert waits_for_nothing(numbers)


@pytest.mark.parametrize("custom", [None, {"kv_seed": 3, "other": 1}], ids=["no custom parameters", "a seed"])
def test_samples_are_numbered_and_the_shared_parameters_stay_as_they_are(custom: dict[str, Any] | None) -> None:
    numbers, shared = incoming.SampleNumbers(), parameters(n=4, temperature=0.5, custom_params=custom)
    sent = [send(numbers, shared) for _ in range(4)]
    assert [number_of(each) for each in sent] == [0, 1, 2, 3]
    assert shared == parameters(n=4, temperature=0.5, custom_params=custom)
    for number, each in enumerate(sent):
        added = {SAMPLE_KEY: number} if number else {}
        expected = {**(custom or {}), **added} or None
        assert each == parameters(n=4, temperature=0.5, custom_params=expected)
    assert waits_for_nothing(numbers)


def test_the_warm_up_copy_is_no_sample() -> None:
    """SGLang first sends a copy that computes the prompt alone, with parameters of its own."""
    numbers, shared = incoming.SampleNumbers(), parameters(n=3)
    warm_up = copy.copy(shared)
    warm_up.max_new_tokens = 0
    assert send(numbers, warm_up) is warm_up
    assert SAMPLE_KEY not in (warm_up.custom_params or {})
    assert waits_for_nothing(numbers)
    assert [number_of(send(numbers, shared)) for _ in range(3)] == [0, 1, 2]


def test_requests_that_are_sent_in_turns_are_numbered_apart() -> None:
    numbers = incoming.SampleNumbers()
    first, second = parameters(n=3, custom_params={"kv_seed": 1}), parameters(n=3, custom_params={"kv_seed": 2})
    turns = [first, second, second, first, second, first]
    sent = [send(numbers, shared) for shared in turns]
    assert [number_of(each) for each in sent] == [0, 0, 1, 1, 2, 2]
    assert [each.custom_params["kv_seed"] for each in sent] == [1, 2, 2, 1, 2, 1]
    assert waits_for_nothing(numbers)


def test_equal_parameters_of_different_requests_are_numbered_apart() -> None:
    numbers, one, other = incoming.SampleNumbers(), parameters(n=2), parameters(n=2)
    assert [number_of(send(numbers, shared)) for shared in (one, other, one, other)] == [0, 0, 1, 1]
    assert waits_for_nothing(numbers)


def test_parameters_that_are_sent_again_start_over() -> None:
    numbers, shared = incoming.SampleNumbers(), parameters(n=2)
    assert [number_of(send(numbers, shared)) for _ in range(4)] == [0, 1, 0, 1]


def test_a_request_that_is_half_sent_keeps_its_parameters_from_being_mistaken_for_others() -> None:
    """An object's identity is free to be used again once it is gone; so the one that is waited for must not go."""
    numbers = incoming.SampleNumbers()
    send(numbers, parameters(n=2))
    assert [number_of(send(numbers, parameters(n=2))) for _ in range(50)] == [0] * 50
