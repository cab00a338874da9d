"""What a policy works with: an allow-list of server options, models and kinds of request.

Eviction rewrites rows of SGLang's cache. A feature that also reads or writes them must have been
made to work with it; all others are refused by name, with the reason where there is a special one.
"""

from __future__ import annotations

from typing import Any

from kvpolicy.sglang_plugin.errors import KVPolicyError

# Groups of ServerArgs fields in which every field is allowed, but for those of REFUSED.
ALLOWED_GROUPS = frozenset(
    {
        "model",
        "serving",
        "observability",
        "device",
        "schedule",
        "mm",
        "exec.kernel",
        "exec.graph",
        "exec.comm",
        "exec.moe",
        "exec.deterministic",
    }
)
# Fields that are allowed in the other groups.
ALLOWED_FIELDS = frozenset(
    {
        "disable_radix_cache",
        "radix_eviction_policy",
        "radix_eviction_policy_config",
        "_radix_eviction_policy_explicitly_set",
        "tp_size",
        "nccl_port",
        "dist_timeout",
        "dist_init_addr",
        "enable_p2p_check",
        "load_balance_method",
        "enable_fp32_lm_head",
        "enable_tf32_matmul",
        "enable_custom_logit_processor",
        "disable_outlines_disk_cache",
    }
)
# Fields with a reason of their own; a field of ALLOWED_GROUPS that is not safe must be here.
REFUSED = {
    "speculative_algorithm": "speculative decoding writes rows that are later rolled back",
    "disaggregation_mode": "prefill and decode must share one KV pool",
    "enable_hierarchical_cache": "a compacted row has no copy on the host",
    "enable_lmcache": "a compacted row is the prefix of no text that LMCache could store",
    "enable_flexkv": "a compacted row is the prefix of no text that FlexKV could store",
    "enable_streaming_session": "a session reuses a row by its text, and a compacted row holds other tokens",
    "enable_mixed_chunk": "a decode step that rides in a prefill batch is rotated by its place in the row",
    "page_size": "tokens are evicted one by one, so a page must be one token",
    "pp_size": "each pipeline stage would see its own layers only",
    "dp_size": "the data-parallel controller does not pass on which policy its schedulers run",
    "attn_dp_size": "data-parallel attention pads and splits the batches that are compacted",
    "enable_dp_attention": "data-parallel attention pads and splits the batches that are compacted",
    "dcp_size": "decode context parallelism spreads one row over ranks",
    "nnodes": "only the first node's schedulers report which policy they run",
    "kv_cache_dtype": "policies score keys and values in the model's own precision",
    "is_embedding": "an embedding model does not decode",
    "kv_canary": "it checks that a slot holds the token of its position, which compaction ends",
    "strip_thinking_cache": "it frees rows by the length of the text",
    "prefill_only_disable_kv_cache": "there would be no cache",
    "tokenizer_worker_num": "the extra tokenizer processes do not attach the report to responses",
    "grpc_mode": "the gRPC server does not wait for the schedulers' report",
    "smg_grpc_mode": "the gRPC server does not wait for the schedulers' report",
    "use_ray": "the Ray launcher does not wait for the schedulers' report",
    "enable_multimodal": "only text models with one position per token are supported",
    "disable_hybrid_swa_memory": "sliding-window layers are not supported",
}
# Values of REFUSED fields that are fine all the same.
HARMLESS: dict[str, tuple[object, ...]] = {
    "page_size": (1,),
    "kv_cache_dtype": ("bf16", "bfloat16"),
    "enable_multimodal": (False,),
    "disaggregation_mode": ("null",),
}
ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
)


def _unsupported(what: str, why: str) -> KVPolicyError:
    return KVPolicyError(f"kv_policy does not work with {what}: {why}.")


def check_options(server_args: Any) -> None:
    """Raise KVPolicyError on the first option that differs from its default and is not allowed."""
    import msgspec
    from sglang.srt.environ import envs

    if envs.SGLANG_RUST_SERVER.get():
        raise _unsupported("SGLANG_RUST_SERVER=1", "the Rust server passes on no extra metadata of a response")
    groups: dict[str, str] = type(server_args)._NS_BY_FIELD
    for field in msgspec.structs.fields(type(server_args)):
        name, value = field.name, getattr(server_args, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value == default or value is None or value in HARMLESS.get(name, ()):
            continue
        if name in REFUSED:
            raise _unsupported(f"{name}={value!r}", REFUSED[name])
        if groups.get(name) not in ALLOWED_GROUPS and name not in ALLOWED_FIELDS:
            raise _unsupported(
                f"{name}={value!r}", f"eviction was not made to work with that option; leave it at {default!r}"
            )


def check_model(server_args: Any) -> None:
    """Raise KVPolicyError unless the model, with all options resolved, has a cache that can be compacted."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.model_config import AttentionArch

    resolved, model = resolved_view(server_args), model_config_of(server_args)
    architecture = model.hf_config.architectures[0]
    if architecture not in ARCHITECTURES:
        raise _unsupported(f"the architecture {architecture}", f"supported are {', '.join(ARCHITECTURES)}")
    if model.attention_arch != AttentionArch.MHA:
        raise _unsupported(f"{model.attention_arch.name} attention", "keys and values must be cached per KV head")
    if model.is_hybrid_swa or model.sliding_window_size is not None:
        raise _unsupported("sliding-window attention", "a layer with a window frees slots by position")
    if resolved.page_size != 1:
        raise _unsupported(
            f"the page size {resolved.page_size} of attention backend {resolved.attention_backend!r}",
            f"{REFUSED['page_size']}; name an attention_backend that allows page_size=1",
        )


def before_validate_request(_manager: Any, obj: Any, input_ids: Any) -> None:
    """Refuse single requests of an unsupported kind; SGLang answers the client with the sentence."""
    if getattr(obj, "session_params", None):
        raise _unsupported("sessions", REFUSED["enable_streaming_session"])
    parameters = getattr(obj, "sampling_params", None)
    if isinstance(parameters, dict) and (parameters.get("beam_width") or 1) > 1:
        raise _unsupported("beam search", "beams share the rows that would be compacted")
