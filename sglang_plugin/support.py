"""What a policy works with: an allow-list of server options, models and kinds of request.

Eviction rewrites rows of SGLang's cache. A feature that also reads or writes them must have been
made to work with it; all others are refused by name, with the reason where there is a special one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvpolicy.policies.base import ModelShape
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError

logger = logging.getLogger(__name__)

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
REFUSED_ENVIRONMENT = {
    "SGLANG_RUST_SERVER": "the Rust server passes on no extra metadata of a response",
    "SGLANG_USE_HND_KVCACHE": "the KV heads of a token would not lie next to each other",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "the pool would grow after the policies were bound to its buffers",
}
ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
)


NO_PREFILL_GRAPH = "set disable_prefill_cuda_graph, and no cuda_graph_backend_prefill or cuda_graph_config against it"
# Of SGLang's attention backends, those that leave a pool alone which is not theirs.
PACKED_BACKENDS = ("torch_native", "triton", "kvp_cpu")
# Models with a bias in the projection of keys that their configuration does not mention.
BIASED = ("Qwen2ForCausalLM",)


def _unsupported(what: str, why: str) -> KVPolicyError:
    return KVPolicyError(f"kv_policy does not work with {what}: {why}.")


def check_options(server_args: Any) -> None:
    """Raise KVPolicyError on the first option that differs from its default and is not allowed."""
    import msgspec
    from sglang.srt.environ import envs

    for variable, reason in REFUSED_ENVIRONMENT.items():
        if getattr(envs, variable).get():
            raise _unsupported(f"{variable}=1", reason)
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


def check_policies(server_args: Any, config: KVPolicyConfig) -> None:
    """Raise KVPolicyError on a policy that cannot work with this model or this number of ranks."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.utils.hf_transformers.common import get_rope_config

    resolved, model = resolved_view(server_args), model_config_of(server_args)
    if config.reads_a_part:
        _check_no_graph(resolved)
    if config.hidden_bands and _captured(resolved, "prefill"):
        raise KVPolicyError(
            f"kv_policy={config.policy} reads hidden states between the layers of a prefill, past which a captured "
            f"graph runs; {NO_PREFILL_GRAPH}."
        )
    ranks = resolved.tp_size
    shape = ModelShape(
        layers=model.num_hidden_layers,
        query_heads=model.get_total_num_attention_heads(),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.head_dim,
        rope_theta=float(get_rope_config(model.hf_text_config)[0]),
    )
    for arm in config.arms.values():
        if ranks > 1 and arm.policy.spans_heads:
            raise KVPolicyError(
                f"kv_policy={arm.name} chooses for all KV heads together, and tp_size={ranks} spreads them over "
                "processes; use tp_size=1, or a policy that chooses per KV head."
            )
        arm.fit(shape)
    for band in config.hidden_bands:
        if band.layers(shape.layers)[-1] == shape.layers - 1:
            raise KVPolicyError(
                f"the hidden states of layer {shape.layers - 1}, the last, cannot be read; "
                f"bands of kv_policy={config.policy} must lie in layers 0 to {shape.layers - 2}."
            )


def check_format(server_args: Any, config: KVPolicyConfig) -> None:
    """Raise KVPolicyError if the cache cannot be stored as asked for, or SGLang would read it past the plugin."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolved_view

    if config.cache_format is None:
        return
    resolved, model = resolved_view(server_args), model_config_of(server_args)
    try:
        fitted = config.cache_format.fitted(model.head_dim)
    except ValueError as error:
        raise KVPolicyError(f"{error}.") from error
    backend = resolved.attention_backend
    if backend not in PACKED_BACKENDS:
        raise KVPolicyError(
            f"kv_quant does not work with attention_backend={backend!r}; leave it out, or use "
            f"{' or '.join(PACKED_BACKENDS)}."
        )
    if _captured(resolved, "prefill"):
        raise KVPolicyError(f"kv_quant attends to a prefill outside of any graph; {NO_PREFILL_GRAPH}.")
    biased = getattr(model.hf_text_config, "attention_bias", False) or model.hf_config.architectures[0] in BIASED
    if fitted.key_bits is not None and biased:
        logger.warning(
            "kvpolicy: kv_quant_keys=%s, but this model adds a bias to its keys: a few of their channels are far "
            "larger than the others, and low-bit keys have been seen to ruin such models; leave kv_quant_keys out.",
            fitted.keys,
        )


def _captured(resolved: Any, phase: str) -> bool:
    """Whether SGLang will capture this phase, "decode" or "prefill", in graphs: what all its flags for it come to."""
    return resolved.device != "cpu" and bool(getattr(resolved.cuda_graph_config, phase).backend != "disabled")


def _check_no_graph(resolved: Any) -> None:
    """Raise KVPolicyError if decode steps would be captured, or compiled."""
    if _captured(resolved, "decode") or resolved.enable_torch_compile:
        raise KVPolicyError(
            "a policy that reads a part of the cache chooses anew at every layer of every step, which no captured "
            "graph does; set disable_decode_cuda_graph, and do not set enable_torch_compile."
        )


def check_attention(backend: Any) -> None:
    """Raise KVPolicyError unless queries pass through the method of SGLang's attention backends that is hooked."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    if type(backend).forward is not AttentionBackend.forward:
        raise _unsupported(
            f"the attention backend {type(backend).__name__} for a policy that reads queries or a part of the cache",
            "it has an entry of its own, which is not hooked; name one attention_backend for prefill and decode",
        )


def check_request(obj: Any, parameters: Mapping[str, Any]) -> None:
    """Raise KVPolicyError on a single request of an unsupported kind."""
    if getattr(obj, "session_params", None):
        raise _unsupported("sessions", REFUSED["enable_streaming_session"])
    if (parameters.get("beam_width") or 1) > 1:
        raise _unsupported("beam search", "beams share the rows that would be compacted")
