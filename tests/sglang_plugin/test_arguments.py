"""The way of a configuration into SGLang's own `ServerArgs` record, through keywords and through flags."""

from __future__ import annotations

import argparse
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpolicy.sglang_plugin import arguments, launcher
from kvpolicy.sglang_plugin.config import ARGUMENTS, KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

ARMS = "full|snapkv[window:8;recent:16]"


@pytest.fixture(scope="module")
def server_args() -> ModuleType:
    return pytest.importorskip("sglang.srt.server_args")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, KVPolicyConfig]]:
    """What would be checked and hooked; nothing is."""
    found: list[tuple[Any, KVPolicyConfig]] = []
    monkeypatch.setattr(launcher, "prepare", lambda record, config: found.append((record, config)))
    monkeypatch.setattr(launcher, "has_accelerator", lambda: True)
    return found


def test_a_configuration_of_several_policies_survives_on_a_pickled_record(server_args: ModuleType) -> None:
    record, config = server_args.ServerArgs(model_path="x"), KVPolicyConfig(ARMS, budget=512)
    assert arguments.config_of(record) is None
    arguments.attach(record, config)
    assert arguments.config_of(record) is config
    arrived = arguments.config_of(pickle.loads(pickle.dumps(record)))
    assert arrived == config
    assert arrived is not None
    assert arrived.arms == config.arms


def test_keywords_become_a_configuration_and_leave(server_args: ModuleType) -> None:
    keywords = {"model_path": "x", "kv_policy": ARMS, "kv_budget": 512, "kv_cache_dtype": "bf16"}
    assert arguments.take_arguments(keywords) == KVPolicyConfig(ARMS, 512)
    assert keywords == {"model_path": "x", "kv_cache_dtype": "bf16"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("kv_polcy", "; did you mean kv_policy?"), ("kv_xxxxxxx", "kv_quant_keys.")],
    ids=["near", "far"],
)
def test_a_keyword_that_nobody_knows_is_refused(server_args: ModuleType, name: str, hint: str) -> None:
    with pytest.raises(KVPolicyError, match=f"^{name} is not an argument") as caught:
        arguments.take_arguments({name: 1})
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize(
    ("policy", "given", "expected"),
    [
        pytest.param(ARMS, None, launcher.TAPPED_REQUESTS, id="queries are read"),
        pytest.param(ARMS, 7, 7, id="queries are read, but a number is given"),
        pytest.param("full|vase-dkv", None, None, id="no queries"),
        pytest.param(None, None, None, id="no policy"),
    ],
)
def test_keywords_and_flags_bound_the_requests_at_once_alike(
    server_args: ModuleType,
    prepared: list[tuple[Any, KVPolicyConfig]],
    policy: str | None,
    given: int | None,
    expected: int | None,
) -> None:
    record = launcher.server_args_from_keywords(model_path="x", max_running_requests=given, kv_policy=policy)
    assert record.max_running_requests == expected
    flags = argparse.Namespace(**{**dict.fromkeys(ARGUMENTS), "max_running_requests": given, "kv_policy": policy})
    built = arguments.around_from_cli_args(lambda _cls, args: SimpleNamespace(**vars(args)), object, flags)
    assert built.max_running_requests == expected
    config = None if policy is None else KVPolicyConfig(policy)
    assert prepared == ([] if config is None else [(record, config), (built, config)])
