"""Statistics of queries against the same taken otherwise: from what attention is given, and from the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.policies.query_statistics import QueryStatistics
from kvpolicy.reports.query_capture import CaptureError, capture
from tests.reports.tiny_checkpoints import SIZES, VOCABULARY, decoder

HEADS, HEAD_DIM, LAYERS = 6, 16, 3
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
MODELS = {
    "Qwen3 with q_norm": ("Qwen3", {}),
    "Qwen3 with YaRN": ("Qwen3", {"rope_parameters": YARN}),
    "Llama": ("Llama", {}),
    "Llama 3 frequencies": ("Llama", {"rope_parameters": LLAMA3}),
    "Qwen2 with biases": ("Qwen2", {"head_dim": 8}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "one KV head": ("Qwen3", {"num_key_value_heads": 1}),
    "a KV head for each query head": ("Llama", {"num_key_value_heads": 6}),
}
models = pytest.mark.parametrize("name", MODELS)


def tokens(count: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def means(queries: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of one ``[T, H_q, D]`` per layer, before RoPE."""
    real, imag = torch.stack([layer.double() for layer in queries]).chunk(2, dim=-1)
    return {
        "mean_real": real.mean(dim=1),
        "mean_imag": imag.mean(dim=1),
        "mean_abs": (real.square() + imag.square()).sqrt().mean(dim=1),
    }


def assert_same(found: QueryStatistics, expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(getattr(found, name), x, rtol=tolerance, atol=tolerance)


def as_attention_sees_them(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """Queries that enter attention, turned back by the model's own cosines and sines: ``[T, H_q, D]`` per layer."""
    from transformers import AttentionInterface

    seen: dict[int, torch.Tensor] = {}

    def recording(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[module.layer_idx] = query[0].transpose(0, 1).double()
        return AttentionInterface()["sdpa"](module, query, *args, **kwargs)

    AttentionInterface.register("recording_in_tests", recording)
    model.set_attn_implementation("recording_in_tests")
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), use_cache=False)
        angles = torch.arange(len(ids))[:, None].double() * model.rotary_emb.inv_freq.double()
    model.set_attn_implementation("sdpa")
    back = torch.polar(torch.full_like(angles, 1 / model.rotary_emb.attention_scaling), -angles)[:, None]
    found = []
    for layer in sorted(seen):
        pairs = torch.complex(*seen[layer].chunk(2, dim=-1)) * back
        found.append(torch.cat([pairs.real, pairs.imag], dim=-1))
    return found


def from_the_weights(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """Queries from the hidden states of each layer: ``[T, H_q, D]``."""
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        found = []
        for state, layer in zip(hidden, model.layers, strict=False):
            attention = layer.self_attn
            normed = layer.input_layernorm(state[0])
            query = torch.nn.functional.linear(normed, attention.q_proj.weight, attention.q_proj.bias)
            query = query.view(len(ids), -1, attention.head_dim)
            if hasattr(attention, "q_norm"):
                scale = (query.square().mean(dim=-1, keepdim=True) + attention.q_norm.variance_epsilon).rsqrt()
                query = query * scale * attention.q_norm.weight
            found.append(query)
    return found


@models
def test_statistics_are_those_of_the_queries_that_attention_is_given(name: str) -> None:
    kind, options = MODELS[name]
    model, ids = decoder(kind, **options), tokens(150)
    found = capture(model, ids, window=150, name="tiny")
    assert_same(found, means(as_attention_sees_them(model, ids)), 2e-4)  # the model's own angles are in fp32
    assert_same(found, means(from_the_weights(model, ids)))
    assert found.tokens == 150
    config = model.config
    assert found.shape == (3, 6, config.num_key_value_heads, config.head_dim, config.rope_parameters["rope_theta"])
    assert torch.equal(found.inv_freq, model.rotary_emb.inv_freq)
    assert found.attention_scaling == model.rotary_emb.attention_scaling
    assert (found.attention_scaling != 1) == (name == "Qwen3 with YaRN")
    found.check()


@models
@pytest.mark.parametrize("window", [1, 7, 50, 1000])
def test_the_window_changes_nothing(name: str, window: int) -> None:
    kind, options = MODELS[name]
    model, ids = decoder(kind, **options), tokens(60)
    advanced: list[int] = []
    whole = capture(model, ids, window=60, name="tiny")
    parts = capture(model, ids, window=window, name="tiny", advance=advanced.append)
    for part in ("mean_real", "mean_imag", "mean_abs"):
        torch.testing.assert_close(getattr(parts, part), getattr(whole, part), rtol=1e-4, atol=1e-4)
    assert sum(advanced) == 60
    assert max(advanced) <= window


def test_one_token_is_its_own_mean() -> None:
    found = capture(decoder("Qwen3"), tokens(1), window=8, name="tiny")
    torch.testing.assert_close(found.mean_real.hypot(found.mean_imag), found.mean_abs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_a_half_precision_model_is_not_taken_for_another_model(dtype: torch.dtype) -> None:
    model, ids = decoder("Qwen3").to(dtype), tokens(100)
    found = capture(model, ids, window=100, name="tiny")
    assert_same(found, means(as_attention_sees_them(model, ids)), 0.05)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = decoder("Llama"), tokens(20)
    capture(model, ids, window=8, name="tiny")
    assert model.config._attn_implementation == "sdpa"
    assert [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks] == []


def test_a_query_that_changes_on_its_way_to_attention_is_noticed() -> None:
    """Two layers pair other channels than the first does."""
    model = decoder("Qwen3")
    for layer in model.layers[1:]:
        attention = layer.self_attn

        def forward(*args: Any, original: Any = attention.forward, **kwargs: Any) -> Any:
            angles = tuple(x.roll(1, dims=-1) for x in kwargs.pop("position_embeddings"))
            return original(*args, position_embeddings=angles, **kwargs)

        attention.forward = forward
    with pytest.raises(CaptureError, match="layer 1 is the first of 2 that differ"):
        capture(model, tokens(20), window=8, name="tiny")
    assert model.config._attn_implementation == "sdpa"


def test_models_whose_angles_depend_on_the_length_are_refused() -> None:
    model = decoder("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(
        CaptureError, match="the first 'dynamic'; there must be one, and one of default, linear, yarn, llama3"
    ):
        capture(model, tokens(20), window=8, name="tiny")


def test_models_without_a_q_proj_are_refused() -> None:
    config = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    import transformers

    model = transformers.AutoModel.from_config(transformers.GPTNeoXConfig(**config, intermediate_size=48)).eval()
    with pytest.raises(CaptureError, match="GPTNeoXModel has no attention layers with a q_proj each"):
        capture(model, tokens(20), window=8, name="tiny")
