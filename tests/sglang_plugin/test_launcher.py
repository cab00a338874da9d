"""What the launching process makes of arguments, and which reports of a scheduler it accepts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpolicy.sglang_plugin import launcher
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.runtime import handshake

CONFIG = KVPolicyConfig("vase-dkv", budget=256)


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "has_accelerator", lambda: False)


def test_the_cuda_device_of_lm_eval_becomes_the_cpu_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    # Not caplog: an engine that ran in this process before has configured logging for good.
    monkeypatch.setattr(launcher.logger, "warning", lambda message, *values: warnings.append(message % values))
    keywords = {"device": "cuda:0", "mem_fraction_static": None}
    launcher.fit_to_machine(keywords)
    launcher.fit_to_machine(keywords)
    assert keywords == {"device": "cpu", "mem_fraction_static": launcher.CPU_MEMORY_FRACTION}
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
    assert keywords == {"device": "cpu", "mem_fraction_static": 0.2}


def test_a_scheduler_that_reports_the_policy_is_accepted() -> None:
    launcher.check_handshake(handshake(KVPolicyConfig("vase-dkv", budget=256)), CONFIG)


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(None, id="nothing"),
        pytest.param({}, id="empty"),
        pytest.param(handshake(dataclasses.replace(CONFIG, budget=512)), id="other budget"),
        pytest.param(handshake(dataclasses.replace(CONFIG, policy="full")), id="other policy"),
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
