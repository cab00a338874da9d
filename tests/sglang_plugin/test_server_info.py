"""What `/server_info` says of the launch."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from kvpolicy import __version__
from kvpolicy.sglang_plugin import arguments, launcher
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.runtime import handshake
from kvpolicy.sglang_plugin.server_info import launch_report


def test_it_names_policies_and_numbers() -> None:
    assert launch_report(KVPolicyConfig("vase-dkv[rank:8]|full", budget=64, period=16, seed=3, trace="out")) == {
        "version": __version__,
        "policies": [
            {"name": "vase-dkv[rank:8]", "policy": "vase-dkv", "options": "rank:8"},
            {"name": "full", "policy": "full", "options": ""},
        ],
        "budget": 64,
        "period": 16,
        "seed": 3,
        "trace": "out",
        "quant": None,
    }


def test_options_given_apart_belong_to_the_one_policy() -> None:
    (policy,) = launch_report(KVPolicyConfig("vase-dkv", options="rank:8"))["policies"]
    assert policy == {"name": "vase-dkv", "policy": "vase-dkv", "options": "rank:8"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            {"quant": "range-int4"},
            {"name": "range-int4", "group": None, "keys": "none", "protect": 0.05},
            id="defaults",
        ),
        pytest.param(
            {"quant": "int8", "quant_group": 32, "quant_keys": "int4"},
            {"name": "int8", "group": 32, "keys": "int4", "protect": None},
            id="without protection",
        ),
    ],
)
def test_a_cache_in_low_bits_is_told_with_what_is_in_effect(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert launch_report(KVPolicyConfig("full", **given))["quant"] == expected


def test_the_info_of_an_accepted_scheduler_survives_json() -> None:
    """The handshake is a Python object and must not get there."""
    config = KVPolicyConfig("vase-dkv|full", budget=256)

    class Init:
        scheduler_infos: ClassVar[list[dict[str, Any]]] = [{"status": "ready", "kv_policy": handshake(config)}]

        def wait_for_ready(self) -> None:
            pass

    class ServerArgs:
        pass

    server_args, init = ServerArgs(), Init()
    arguments.attach(server_args, config)
    launcher.after_launch((init, []), type, server_args)
    init.wait_for_ready()
    (info,) = init.scheduler_infos
    assert json.loads(json.dumps(info)) == {"status": "ready", "kv_policy": launch_report(config)}
