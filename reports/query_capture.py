"""Means of a model's queries over a text, taken in transformers before RoPE is applied to them.

A query is what leaves the layer's q_norm or, where it has none, its q_proj. Whether that is all that happens before
RoPE is not taken for granted: for the first tokens of the text, these queries after RoPE are held against those that
attention is given, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvpolicy.policies.query_statistics import QueryStatistics

CHECKED_TOKENS = 64
# Of the length of a query. Rounding in bf16 stays well below; a missing norm or another pairing of channels is above.
TOLERANCE = 0.03
RECORDING = "kvpolicy_recording_sdpa"
# Kinds of RoPE whose frequencies do not depend on the length of the text.
FIXED_FREQUENCIES = ("default", "linear", "yarn", "llama3")


class CaptureError(Exception):
    """The model is none whose queries can be taken; the message is a sentence without its full stop."""


@torch.inference_mode()
def capture(
    model: Any, ids: list[int], *, window: int, name: str, advance: Callable[[int], object] = lambda tokens: None
) -> QueryStatistics:
    """Statistics of the queries of a text, read in one go: token ``t`` stands at position ``t`` and sees all before it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder without its language-modelling head (`AutoModel`), in evaluation mode.
    ids : list of int
        Tokens of the text, at least one.
    window : int
        Tokens of one forward pass. It bounds memory; sums are kept in fp64, so it changes the result by rounding only.
    name : str
        What the statistics are to call the model.
    advance : callable
        Told after each pass how many tokens it had.

    Raises
    ------
    CaptureError
    """
    from transformers import DynamicCache

    layers, rotary = _attention_layers(model), _rotary(model)
    _compare_with_attention(model, layers, rotary, ids[:CHECKED_TOKENS])
    sums: dict[int, torch.Tensor] = {}

    def add(layer: int, queries: torch.Tensor) -> None:
        real, imag = queries.double().chunk(2, dim=-1)
        new = torch.stack([x.sum(dim=0) for x in (real, imag, real.hypot(imag))])
        sums[layer] = sums[layer] + new if layer in sums else new

    with _queries_of(model, layers, add):
        cache = DynamicCache(config=model.config)
        for first in range(0, len(ids), window):
            part = ids[first : first + window]
            model(input_ids=torch.tensor([part], device=model.device), past_key_values=cache, use_cache=True)
            advance(len(part))
    means = torch.stack([sums[layer] for layer in range(len(layers))], dim=1).cpu() / len(ids)
    return QueryStatistics(
        mean_real=means[0],
        mean_imag=means[1],
        mean_abs=means[2],
        inv_freq=rotary.inv_freq.cpu(),
        attention_scaling=float(rotary.attention_scaling),
        kv_heads=model.config.num_key_value_heads,
        rope_theta=float(model.config.rope_parameters["rope_theta"]),
        model=name,
        tokens=len(ids),
    )


def _attention_layers(model: Any) -> list[Any]:
    """The attention modules, by layer."""
    found = {m.layer_idx: m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "layer_idx")}
    expected = getattr(model.config, "num_hidden_layers", None)
    if expected is None or sorted(found) != list(range(expected)):
        raise CaptureError(f"{type(model).__name__} has no attention layers with a q_proj each, which this needs")
    return [found[layer] for layer in range(expected)]


def _rotary(model: Any) -> Any:
    """The one module that has the angles of RoPE."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    kind = getattr(found[0], "rope_type", None) if len(found) == 1 else None
    if kind not in FIXED_FREQUENCIES:
        raise CaptureError(
            f"{type(model).__name__} has {len(found)} kinds of RoPE, the first {kind!r}; "
            f"there must be one, and one of {', '.join(FIXED_FREQUENCIES)}"
        )
    return found[0]


@contextmanager
def _queries_of(model: Any, layers: list[Any], take: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Give `take` each layer's queries before RoPE, ``[T, H_q, D]``, as they are computed."""
    heads = model.config.num_attention_heads

    def hook_of(layer: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            take(layer, output.reshape(-1, heads, layers[layer].head_dim))

        return hook

    sources = [getattr(attention, "q_norm", attention.q_proj) for attention in layers]
    handles = [source.register_forward_hook(hook_of(layer)) for layer, source in enumerate(sources)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare_with_attention(model: Any, layers: list[Any], rotary: Any, ids: list[int]) -> None:
    """Raise CaptureError unless the queries taken are, after RoPE, those that attention is given."""
    from transformers import AttentionInterface

    taken: dict[int, torch.Tensor] = {}
    wrong: list[int] = []

    def compare(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ours = taken.pop(module.layer_idx)  # [T, H_q, D]
        cos, sin = rotary(ours, torch.arange(len(ours), device=ours.device)[None])
        if cos.shape[-1] == ours.shape[-1]:
            turned = ours * cos[0, :, None] + _quarter_turned(ours) * sin[0, :, None]
            error = (turned - query[0].transpose(0, 1)).float().norm() / query.float().norm()
            if error < TOLERANCE:
                return AttentionInterface()["sdpa"](module, query, *args, **kwargs)
        wrong.append(module.layer_idx)
        return AttentionInterface()["sdpa"](module, query, *args, **kwargs)

    AttentionInterface.register(RECORDING, compare)
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDING)
    try:
        with _queries_of(model, layers, taken.__setitem__):
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    if wrong:
        raise CaptureError(
            f"queries of {type(model).__name__} are not what q_proj and q_norm say, turned by RoPE in pairs of "
            f"channels half a head apart: layer {wrong[0]} is the first of {len(wrong)} that differ"
        )


def _quarter_turned(x: torch.Tensor) -> torch.Tensor:
    real, imag = x.chunk(2, dim=-1)
    return torch.cat([-imag, real], dim=-1)
