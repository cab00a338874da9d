"""What the launching process makes of arguments, and which reports of a scheduler it accepts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpolicy.sglang_plugin import launcher, platform
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.runtime import handshake

CONFIG = KVPolicyConfig("vase-dkv", budget=256)


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launcher, platform):
        monkeypatch.setattr(module, "has_accelerator", lambda: False)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Not caplog: an engine that ran in this process before has configured logging for good."""
    found: list[str] = []
    monkeypatch.setattr(launcher.logger, "warning", lambda message, *values: found.append(message % values))
    return found


def test_the_cuda_device_of_lm_eval_becomes_the_cpu_with_one_warning(warnings: list[str]) -> None:
    keywords = {"device": "cuda:0", "mem_fraction_static": None}
    launcher.fit_to_machine(keywords)
    launcher.fit_to_machine(keywords)
    assert keywords == {
        "device": "cpu",
        "mem_fraction_static": launcher.CPU_MEMORY_FRACTION,
        "attention_backend": "kvp_cpu",
    }
    assert warnings == ["device=cuda:0, but there is no GPU here: serving on the CPU."]


def test_the_device_is_the_cpu_when_none_is_named() -> None:
    keywords: dict[str, Any] = {"mem_fraction_static": 0.2}
    launcher.fit_to_machine(keywords)
    assert keywords["device"] == "cpu"


def test_with_an_accelerator_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "has_accelerator", lambda: True)
    keywords = {"device": "cuda:0", "mem_fraction_static": None}
    launcher.fit_to_machine(keywords)
    assert keywords == {"device": "cuda:0", "mem_fraction_static": None}


def test_memory_that_was_chosen_is_left_alone() -> None:
    keywords = {"device": "cpu", "mem_fraction_static": 0.2}
    launcher.fit_to_machine(keywords)
    assert keywords["mem_fraction_static"] == 0.2


@pytest.mark.parametrize(
    ("given", "environment", "chosen"),
    [
        ({}, "", "kvp_cpu"),
        ({"attention_backend": None, "page_size": 1}, "", "kvp_cpu"),
        ({"attention_backend": "torch_native"}, "", "torch_native"),
        ({"page_size": 16}, "", None),
        ({}, "1", None),
    ],
    ids=["not given", "none", "chosen", "pages of several tokens", "SGLang's own CPU engine"],
)
def test_on_a_cpu_the_attention_backend_is_the_platform_s(
    given: dict[str, Any], environment: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", environment)
    keywords: dict[str, Any] = {"device": "cpu", **given}
    launcher.fit_to_machine(keywords)
    assert keywords.get("attention_backend") == chosen


@pytest.mark.parametrize("policy", ["snapkv[window:48]", "full|snapkv[window:48]|vase-dkv"], ids=["alone", "among"])
def test_a_policy_that_reads_queries_bounds_the_requests_at_once_with_one_warning(
    policy: str, warnings: list[str]
) -> None:
    for keywords in ({}, {"max_running_requests": None}):
        warnings.clear()
        launcher.fit_to_policy(keywords, KVPolicyConfig(policy, budget=256))
        assert keywords == {"max_running_requests": launcher.TAPPED_REQUESTS}
        (warning,) = warnings
        assert f"max_running_requests={launcher.TAPPED_REQUESTS}, because kv_policy={policy} keeps" in warning
        assert "the newest 48 queries" in warning


@pytest.mark.parametrize(
    ("config", "keywords"),
    [
        pytest.param(None, {"max_running_requests": None}, id="no policy"),
        pytest.param(KVPolicyConfig("vase-dkv|full"), {}, id="no queries, not given"),
        pytest.param(KVPolicyConfig("vase-dkv|full"), {"max_running_requests": None}, id="no queries, none"),
        pytest.param(KVPolicyConfig("snapkv"), {"max_running_requests": 7}, id="chosen"),
        pytest.param(KVPolicyConfig("snapkv"), {"max_running_requests": 4096}, id="chosen larger"),
    ],
)
def test_otherwise_the_number_of_requests_is_left_alone(
    config: KVPolicyConfig | None, keywords: dict[str, Any], warnings: list[str]
) -> None:
    before = dict(keywords)
    launcher.fit_to_policy(keywords, config)
    assert keywords == before
    assert warnings == []


@pytest.mark.parametrize("accelerator", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("config", "passed_by"),
    [
        pytest.param(KVPolicyConfig("epikv"), True, id="hidden states"),
        pytest.param(KVPolicyConfig("full", quant="int4"), True, id="low bits"),
        pytest.param(KVPolicyConfig("vase-dkv|snapkv"), False, id="neither"),
    ],
)
def test_what_a_captured_prefill_passes_by_has_none(
    config: KVPolicyConfig, passed_by: bool, accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "has_accelerator", lambda: accelerator)
    keywords: dict[str, Any] = {"max_running_requests": 4}
    launcher.fit_to_policy(keywords, config)
    assert ("disable_prefill_cuda_graph" in keywords) == (passed_by and accelerator)
    assert keywords.get("disable_prefill_cuda_graph", True) is True


def test_a_scheduler_that_reports_the_policy_is_accepted() -> None:
    launcher.check_handshake(handshake(KVPolicyConfig("vase-dkv", budget=256)), CONFIG)


def test_a_launch_that_reads_queries_wants_the_hooks_that_record_them() -> None:
    reading = dataclasses.replace(CONFIG, policy="snapkv")
    launcher.check_handshake(handshake(reading), reading)
    with pytest.raises(KVPolicyError, match="where kv_policy=snapkv was asked for"):
        launcher.check_handshake({**handshake(reading), "hooks": handshake(CONFIG)["hooks"]}, reading)


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(None, id="nothing"),
        pytest.param({}, id="empty"),
        pytest.param(handshake(dataclasses.replace(CONFIG, budget=512)), id="other budget"),
        pytest.param(handshake(dataclasses.replace(CONFIG, policy="full")), id="other policy"),
        pytest.param(handshake(dataclasses.replace(CONFIG, policy="vase-dkv|full")), id="a policy more"),
        pytest.param(handshake(dataclasses.replace(CONFIG, seed=1)), id="other seed"),
        pytest.param({**handshake(CONFIG), "hooks": handshake(CONFIG)["hooks"][1:]}, id="a hook less"),
        pytest.param({**handshake(CONFIG), "version": "0"}, id="other version"),
    ],
)
def test_any_other_report_of_a_scheduler_is_refused(report: dict[str, Any] | None) -> None:
    with pytest.raises(KVPolicyError, match="where kv_policy=vase-dkv was asked for"):
        launcher.check_handshake(report, CONFIG)


def test_a_request_has_one_report_and_an_unfinished_one_has_none() -> None:
    customized = {"kv_policy": [None, {"evictions": 2}], "other": [[1], [2]]}
    for index, meta in enumerate(({"id": "a"}, {"id": "b", "kv_policy": {"evictions": 2}})):
        arguments = (None, {"id": meta["id"]}, None, customized, index, "reason")
        passed_on, keywords = launcher.before_request_meta_info(*arguments)
        assert passed_on == (None, meta, None, {"other": [[1], [2]]}, index, "reason")
        assert keywords == {}


def test_info_without_a_report_is_passed_on() -> None:
    passed_on, _ = launcher.before_request_meta_info(None, {"id": "a"}, None, {"other": [[1]]}, 0, None)
    assert passed_on == (None, {"id": "a"}, None, {"other": [[1]]}, 0, None)
