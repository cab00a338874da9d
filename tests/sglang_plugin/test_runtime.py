"""The hooks of a scheduler, called by hand: which there are, and what each does to what SGLang hands it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpolicy.sglang_plugin import launcher, plugin, runtime, targets
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.request_settings import request_settings
from kvpolicy.sglang_plugin.runtime import Runtime, handshake

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

PLAIN = KVPolicyConfig("vase-dkv|full", budget=256)
READING = KVPolicyConfig("full|snapkv[window:20]|vase-attnv", budget=256, period=32)
DECODE = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False)
EXTEND = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)
HOOKS = [
    pytest.param(target, hook, id=target.path.rpartition("srt.")[2])
    for hooks in (plugin.LOAD_HOOKS, launcher.HOOKS, Runtime(READING).hooks())
    for target, hook in hooks.items()
]


def request(custom: dict[str, Any] | None = None, seed: int | None = None) -> Any:
    """What is read of SGLang's `Req`."""
    parameters = SimpleNamespace(custom_params=custom, sampling_seed=seed)
    return SimpleNamespace(sampling_params=parameters, origin_input_ids=[0] * 70)


class Taps:
    """Remembers what it was asked to record."""

    bytes_per_request = 1000

    def __init__(self) -> None:
        self.planned: list[Any] = []
        self.recorded: list[tuple[Any, ...]] = []

    def plan_prefill(self, forward_batch: Any) -> None:
        self.planned.append(forward_batch)

    def record(self, *arguments: Any) -> None:
        self.recorded.append(arguments)


def running(config: KVPolicyConfig, taps: Any = None) -> Runtime:
    """Hooks that are bound to pools of 5 rows."""
    bound = Runtime(config)
    pools: Any = SimpleNamespace(offsets=torch.zeros(5, dtype=torch.int64), rows=object())
    pools.bytes_per_token = pools.full_bytes_per_token = 8.0
    bound.pools = pools
    bound.queries = taps
    return bound


def test_every_target_has_its_hook() -> None:
    assert set(plugin.LOAD_HOOKS) == set(targets.LOAD)
    assert set(launcher.HOOKS) == set(targets.LAUNCHER)
    assert set(Runtime(READING).hooks()) == {*targets.SCHEDULER, *targets.ADMISSION, *targets.TAPS}


@pytest.mark.parametrize("config", [PLAIN, READING], ids=["no queries", "queries"])
def test_queries_are_recorded_only_for_a_policy_that_reads_them(config: KVPolicyConfig) -> None:
    hooked = Runtime(config).hooks().keys()
    always = {*targets.SCHEDULER, *targets.ADMISSION}
    assert hooked >= always
    assert hooked - always == (set(targets.TAPS) if config is READING else set())


def test_admission_is_sglangs_own_where_no_policy_bounds_a_request() -> None:
    assert not Runtime(KVPolicyConfig("full|quest", budget=256)).hooks().keys() & set(targets.ADMISSION)


@pytest.mark.parametrize("config", [PLAIN, READING], ids=["no queries", "queries"])
def test_the_handshake_names_the_configuration_and_exactly_its_hooks(config: KVPolicyConfig) -> None:
    report = handshake(config)
    assert report["config"] == config
    assert sorted(report["hooks"]) == sorted(target.path for target in Runtime(config).hooks())


def test_a_scheduler_whose_hooks_are_not_in_place_reports_nothing() -> None:
    with pytest.raises(KVPolicyError, match="could not be hooked"):
        running(PLAIN).add_handshake({}, None)


@pytest.mark.parametrize(("target", "hook"), HOOKS)
def test_a_hook_takes_what_sglang_calls_its_target_with(target: targets.Target, hook: Any) -> None:
    """All that has no default by position, the rest by name or not at all."""
    function = targets.resolve(target)
    function = getattr(function, "__func__", function)  # a method of a class is hooked as a function of the class
    prefix = [None] * (target.kind != "before")
    own = inspect.signature(inspect.unwrap(function)).parameters.values()
    by_position = [None for each in own if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name for each in own if each.default is each.empty and each.kind is each.KEYWORD_ONLY}
    optional = {each.name for each in own if each.default is not each.empty}
    for names in (by_name, by_name | optional):
        inspect.signature(hook).bind(*prefix, *by_position, **dict.fromkeys(names))


def test_attention_is_recorded_and_goes_on_as_it_was_called() -> None:
    taps, batch, layer, called = Taps(), object(), SimpleNamespace(layer_id=3), []

    def attention(*arguments: Any, **names: Any) -> str:
        called.append((arguments, names))
        return "output"

    names = {"q": "queries", "k": "keys", "v": "values", "layer": layer, "forward_batch": batch}
    bound = running(READING, taps)
    assert bound.around_attention(attention, "backend", **names, save_kv_cache=False, sinks=1) == "output"
    assert taps.recorded == [("queries", 3, batch)]
    assert called == [(("backend", "queries", "keys", "values", layer, batch), {"save_kv_cache": False, "sinks": 1})]


def test_attention_before_the_rings_exist_is_left_alone() -> None:
    layer = SimpleNamespace(layer_id=0)
    assert Runtime(READING).around_attention(lambda *given: given, None, 1, 2, 3, layer, None) == (
        None,
        1,
        2,
        3,
        layer,
        None,
    )


@pytest.mark.parametrize(
    ("custom", "length", "tokens", "expected"),
    [
        pytest.param(None, 99, 100, 99, id="no queries read"),
        pytest.param(None, 0, 1, 0, id="no queries read, one token"),
        pytest.param({"kv_policy": "snapkv[window:20]"}, 99, 100, 80, id="window"),
        pytest.param({"kv_policy": "snapkv[window:20]"}, 50, 100, 50, id="capped before that by SGLang"),
        pytest.param({"kv_policy": "snapkv[window:20]"}, 80, 100, 80, id="at the window"),
        pytest.param({"kv_policy": "snapkv[window:20]"}, 20, 21, 1, id="one token more than the window"),
        pytest.param({"kv_policy": "snapkv[window:20]"}, 19, 20, 0, id="as long as the window"),
        pytest.param({"kv_policy": "snapkv[window:20]"}, 4, 5, 0, id="shorter than the window"),
        pytest.param({"kv_policy": "vase-attnv"}, 99, 100, 68, id="period as a window"),
        pytest.param({"kv_policy": "vase-attnv", "kv_period": 10}, 99, 100, 90, id="period of the request"),
    ],
)
def test_the_window_of_a_request_is_computed_even_if_the_prompt_is_cached(
    custom: dict[str, Any] | None, length: int, tokens: int, expected: int
) -> None:
    assert Runtime(READING).after_max_prefix_len(length, request(custom), tokens) == expected


def test_the_settings_of_a_request_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return request_settings(*arguments)

    monkeypatch.setattr(runtime, "request_settings", counted)
    bound, req, other = Runtime(READING), request({"kv_policy": "vase-attnv", "kv_seed": 4}, seed=9), request()
    settings = bound.settings_of(req)
    assert settings == request_settings(READING, {"kv_policy": "vase-attnv", "kv_seed": 4}, 9)
    assert bound.settings_of(req) is settings
    assert bound.settings_of(other) == request_settings(READING, None)
    assert len(calls) == 2


def test_the_token_seed_of_a_request_reaches_the_sampler() -> None:
    bound, info = Runtime(PLAIN), SimpleNamespace(device="cpu", sampling_seed=None)
    seeded = request({"kv_seed": 4})
    bound.hooks()[targets.SAMPLING_INFO](info, object, SimpleNamespace(reqs=[request(), seeded]), 10)
    assert info.sampling_seed.tolist() == [-1, request_settings(PLAIN, {"kv_seed": 4}).sampling_seed]


def test_a_prefill_is_planned_and_a_decode_step_is_rotated_by_true_positions() -> None:
    taps = Taps()
    bound = running(READING, taps)
    assert bound.pools is not None
    bound.pools.offsets[:] = torch.tensor([0, 10, 20, 30, 40])
    prefill = SimpleNamespace(forward_mode=EXTEND, positions=torch.arange(3))
    bound.after_init_forward(prefill, object, None, None)
    assert taps.planned == [prefill]
    assert prefill.positions.tolist() == [0, 1, 2]
    rows = torch.tensor([3, 1, 0])
    step = SimpleNamespace(forward_mode=DECODE, positions=torch.tensor([5, 6, 0]), req_pool_indices=rows)
    bound.after_init_forward(step, object, None, None)
    assert taps.planned == [prefill]
    assert step.positions.tolist() == [35, 16, 0]


def test_a_row_that_is_given_out_again_starts_at_its_true_positions() -> None:
    bound = running(PLAIN)
    assert bound.pools is not None
    bound.pools.offsets[:] = 9
    bound.after_alloc_rows([2, 4], object(), 2)
    bound.after_alloc_rows(None, bound.pools.rows, 2)
    assert bound.pools.offsets.tolist() == [9] * 5
    bound.after_alloc_rows([2, 4], bound.pools.rows, 2)
    assert bound.pools.offsets.tolist() == [9, 9, 0, 9, 0]


@pytest.mark.parametrize(
    ("taps", "beside"), [(None, {}), (Taps(), {"query_window_bytes": 2000})], ids=["no queries", "queries"]
)
def test_only_finished_requests_are_reported_and_for_all_ranks(taps: Any, beside: dict[str, int]) -> None:
    bound = running(READING, taps)
    bound._ranks = 2
    done, going = request({"kv_policy": "vase-attnv"}), request()
    for req, finished in ((done, True), (going, False)):
        req.retraction_count, req.finished = 3, lambda finished=finished: finished
    info = {"other": [1, 2]}
    assert bound.after_output_info(info, None, [going, going]) is info
    reported = bound.after_output_info(info, None, [going, done])
    assert reported["other"] == [1, 2]
    nothing, report = reported["kv_policy"]
    assert nothing is None
    assert (report["policy"], report["retractions"]) == ("vase-attnv", 3)
    assert report["kv_bytes_per_token"] == 16.0
    taps = ("query_window_bytes", "hidden_change_bytes")
    assert {name: value for name, value in report.items() if name in taps} == beside
