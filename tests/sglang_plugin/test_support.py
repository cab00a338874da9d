"""The allow-list of server options, against SGLang's own record of them (imported once: it takes 10 s)."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpolicy.sglang_plugin import support
from kvpolicy.sglang_plugin.errors import KVPolicyError

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def server_args() -> ModuleType:
    return pytest.importorskip("sglang.srt.server_args")


@pytest.mark.parametrize("variable", support.REFUSED_ENVIRONMENT)
def test_variables_that_change_the_server_or_the_pool_are_refused(
    server_args: ModuleType, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    arguments = server_args.ServerArgs(model_path="none", device="cpu")
    support.check_options(arguments)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(KVPolicyError, match=f"{variable}=1: {support.REFUSED_ENVIRONMENT[variable]}"):
        support.check_options(arguments)


GENERIC = "eviction was not made to work with that option; leave it at"


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        pytest.param(*case, id=case[0])
        for case in (
            ("speculative_algorithm", "EAGLE", "speculative decoding writes rows"),
            ("disaggregation_mode", "prefill", "prefill and decode must share one KV pool"),
            ("enable_hierarchical_cache", True, "no copy on the host"),
            ("enable_lmcache", True, "no text that LMCache could store"),
            ("enable_flexkv", True, "no text that FlexKV could store"),
            ("enable_streaming_session", True, "a session reuses a row by its text"),
            ("enable_mixed_chunk", True, "rides in a prefill batch"),
            ("page_size", 16, "a page must be one token"),
            ("pp_size", 2, "each pipeline stage would see its own layers only"),
            ("dp_size", 2, "the data-parallel controller"),
            ("enable_dp_attention", True, "data-parallel attention pads"),
            ("dcp_size", 2, "spreads one row over ranks"),
            ("nnodes", 2, "only the first node's schedulers"),
            ("kv_cache_dtype", "fp8_e5m2", "the model's own precision"),
            ("is_embedding", True, "does not decode"),
            ("strip_thinking_cache", True, "frees rows by the length of the text"),
            ("prefill_only_disable_kv_cache", True, "there would be no cache"),
            ("tokenizer_worker_num", 2, "do not attach the report"),
            ("grpc_mode", True, "the gRPC server does not wait"),
            ("use_ray", True, "the Ray launcher does not wait"),
            ("enable_multimodal", True, "only text models"),
            ("enable_lora", True, GENERIC),
            ("cpu_offload_gb", 4, GENERIC),
            ("enable_two_batch_overlap", True, GENERIC),
            ("enable_hisparse", True, GENERIC),
            ("enable_unified_memory", True, GENERIC),
            ("enable_session_radix_cache", True, GENERIC),
            ("enable_pdmux", True, GENERIC),
            ("attn_cp_size", 2, GENERIC),
            ("dllm_algorithm", "LowConfidence", GENERIC),
        )
    ],
)
def test_an_unsupported_option_is_refused_by_name(
    server_args: ModuleType, option: str, value: Any, reason: str
) -> None:
    with pytest.raises(KVPolicyError) as caught:
        support.check_options(server_args.ServerArgs(model_path="x", **{option: value}))
    assert str(caught.value).startswith(f"kv_policy does not work with {option}={value!r}: ")
    assert reason in str(caught.value)


def test_the_kv_canary_is_refused(server_args: ModuleType) -> None:
    with pytest.raises(KVPolicyError):
        support.check_options(server_args.ServerArgs(model_path="x", kv_canary="log"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param(option, value, id=f"{option}={value}")
        for option, value in {
            "log_level": "error",
            "tp_size": 2,
            "mem_fraction_static": 0.5,
            "chunked_prefill_size": 512,
            "port": 30123,
            "attention_backend": "triton",
            "disable_radix_cache": True,
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "max_total_tokens": 4096,
            "max_running_requests": 128,
            "context_length": 8192,
            "dtype": "bfloat16",
            "random_seed": 7,
            "enable_metrics": True,
            "page_size": 1,
            "kv_cache_dtype": "bf16",
            "enable_multimodal": False,
            "nnodes": 1,
        }.items()
    ],
)
def test_a_harmless_option_passes(server_args: ModuleType, option: str, value: Any) -> None:
    support.check_options(server_args.ServerArgs(model_path="x", **{option: value}))


def test_defaults_pass(server_args: ModuleType) -> None:
    support.check_options(server_args.ServerArgs(model_path="x"))


@pytest.mark.parametrize("names", ["ALLOWED_FIELDS", "REFUSED", "HARMLESS"])
def test_every_field_that_is_named_exists(server_args: ModuleType, names: str) -> None:
    fields = set(server_args.ServerArgs.__struct_fields__)
    assert set(getattr(support, names)) - fields == set()


def test_every_group_that_is_named_exists(server_args: ModuleType) -> None:
    assert set(server_args.ServerArgs._NS_BY_FIELD.values()) >= support.ALLOWED_GROUPS


def test_no_field_is_both_allowed_and_refused(server_args: ModuleType) -> None:
    groups = server_args.ServerArgs._NS_BY_FIELD
    assert support.ALLOWED_FIELDS.isdisjoint(support.REFUSED)
    assert {name for name in support.ALLOWED_FIELDS if groups[name] in support.ALLOWED_GROUPS} == set()
    assert set(support.HARMLESS) <= set(support.REFUSED)


@pytest.mark.parametrize(
    ("request_", "parameters", "reason"),
    [
        pytest.param({"session_params": {"id": "s"}}, {}, "sessions: a session reuses a row", id="session parameters"),
        pytest.param({}, {"beam_width": 2}, "beam search: beams share the rows", id="beams"),
    ],
)
def test_an_unsupported_request_is_refused(request_: dict[str, Any], parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(KVPolicyError, match=f"^kv_policy does not work with {reason}"):
        support.check_request(SimpleNamespace(**request_), parameters)


@pytest.mark.parametrize("width", [{}, {"beam_width": None}, {"beam_width": 1}], ids=["not given", "null", "one"])
def test_a_request_for_one_beam_outside_of_sessions_passes(width: dict[str, Any]) -> None:
    support.check_request(SimpleNamespace(), width)
    support.check_request(SimpleNamespace(session_params=None), {"temperature": 0, **width})


def test_an_attention_backend_with_an_entry_of_its_own_is_refused_for_queries() -> None:
    native = pytest.importorskip("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend
    hybrid = pytest.importorskip("sglang.srt.layers.attention.hybrid_attn_backend").HybridAttnBackend
    support.check_attention(object.__new__(native))
    with pytest.raises(KVPolicyError, match="the attention backend HybridAttnBackend for a policy that reads queries"):
        support.check_attention(object.__new__(hybrid))
