"""Rows as attention gets them, and a model that reads others: against the cache of transformers itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvpolicy.reports.quant_error.capture import LayerRows, QuantErrorError, check_model, run_reading
from tests.reports.tiny_checkpoints import configuration

IDS = torch.randint(64, (90,), generator=torch.Generator().manual_seed(1)).tolist()
KINDS = ["Qwen3", "Llama", "Qwen2"]  # of heads with a norm, without, and with a bias


def language_model(kind: str, **changed: Any) -> Any:
    """A random causal language model in fp32, with norms and biases that are not 1 and 0."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(kind, **changed)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
    return model


class ChangingCache(DynamicCache):
    """Gives attention other rows than it was given: another way to the same place as `run_reading`."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(*self.change(layer_idx, key_states, value_states), layer_idx, *args, **kwargs)


def with_cache(model: Any, cache: DynamicCache) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([IDS]), past_key_values=cache, use_cache=True).logits[0]
    return logits


def taken(model: Any, cache_dtype: torch.dtype = torch.float32) -> tuple[list[LayerRows], torch.Tensor]:
    rows: list[LayerRows] = []

    def read(layer: LayerRows) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(layer)
        return layer.keys, layer.values

    return rows, run_reading(model, IDS, read, cache_dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_cache_and_logits_those_of_the_model(kind: str) -> None:
    model, cache = language_model(kind), DynamicCache()
    logits = with_cache(model, cache)
    rows, ours = taken(model)
    assert [layer.layer for layer in rows] == [0, 1, 2]
    for layer, cached in zip(rows, cache.layers, strict=True):
        assert torch.equal(layer.keys, cached.keys[0])
        assert torch.equal(layer.values, cached.values[0])
    torch.testing.assert_close(ours, logits)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_scaling_give_what_the_layer_projects(kind: str) -> None:
    """softmax(scaling q k) v, written out, is the input of o_proj."""
    model = language_model(kind)
    inputs: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
        for name, module in model.named_modules()
        if name.endswith("o_proj")
    ]
    rows, _ = taken(model)
    for hook in hooks:
        hook.remove()
    for layer, projected in zip(rows, inputs, strict=True):
        assert layer.queries.shape == (6, len(IDS), 16)
        outputs = []
        for head, queries in enumerate(layer.queries):
            scores = layer.scaling * queries @ layer.keys[head // 3].T
            scores += torch.full_like(scores, -torch.inf).triu(1)
            outputs.append(scores.softmax(dim=-1) @ layer.values[head // 3])
        torch.testing.assert_close(torch.cat(outputs, dim=-1), projected, rtol=1e-4, atol=1e-4)


def test_a_model_reads_what_it_is_given_in_each_layer() -> None:
    model = language_model("Qwen3")

    def change(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys * (0.5 + layer), values.flip(-1) + layer

    expected = with_cache(model, ChangingCache(change))
    ours = run_reading(model, IDS, lambda rows: change(rows.layer, rows.keys, rows.values), torch.float32)
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(ours, taken(model)[1])


def test_rows_are_rounded_as_the_cache_would() -> None:
    model = language_model("Llama")
    expected = with_cache(model, ChangingCache(lambda _, *rows: [x.bfloat16().float() for x in rows]))
    rows, ours = taken(model, torch.bfloat16)
    assert {rows[0].keys.dtype, rows[0].values.dtype} == {torch.bfloat16}
    assert rows[0].queries.dtype == torch.float32
    torch.testing.assert_close(ours, expected)
    assert not torch.equal(ours, taken(model)[1])


def test_the_model_is_left_as_it_was() -> None:
    model = language_model("Qwen3")
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="enough"):
        run_reading(model, IDS, lambda rows: (_ for _ in ()).throw(RuntimeError("enough")), torch.float32)
    assert model.config._attn_implementation == before
    check_model(model, IDS)
    assert model.config._attn_implementation == before


def test_a_sliding_window_is_refused_only_where_it_hides_something() -> None:
    wide, narrow = (language_model("Mistral", sliding_window=window) for window in (len(IDS) + 1, len(IDS) - 10))
    assert len(taken(wide)[0]) == 3
    with pytest.raises(QuantErrorError, match="lower --tokens to its window"):
        taken(narrow)


def test_attention_with_more_than_a_softmax_is_refused() -> None:
    capped = language_model("Gemma2", attn_logit_softcapping=0.5, sliding_window=512)
    capped.set_attn_implementation("eager")  # sdpa has no cap, and transformers does not say so
    with pytest.raises(QuantErrorError, match="is not softmax"):
        check_model(capped, IDS)


def test_a_model_without_attention_in_every_layer_is_refused() -> None:
    mixed = language_model(
        "Qwen3Next", layer_types=["linear_attention", "full_attention", "full_attention"], num_experts=0
    )
    with pytest.raises(QuantErrorError, match="3 layers, but attention ran in 2 of them"):
        taken(mixed)


def test_output_that_is_not_finite_is_refused() -> None:
    model = language_model("Llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    with pytest.raises(QuantErrorError, match="not finite in float32"):
        check_model(model, IDS)
