"""What each token of a text matters to the tokens after it, and how it changes the output of each decoder layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Positions whose distributions are compared at a time: bounds the fp32 copies, not the result.
COMPARED = 64


class BandsError(Exception):
    """Bands cannot be measured; the message is one sentence for the user."""


def load(name: str, dtype: str) -> tuple[Any, Any]:
    """A causal language model of transformers, ready to run, and its tokenizer; `name` is a folder or a hub id.

    Raises
    ------
    BandsError
        If there is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    except (OSError, ValueError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise BandsError(f"--model {name} cannot be loaded: {reason}.") from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers of a model, first to last.

    Raises
    ------
    BandsError
        If the model has no list of as many modules as its configuration says.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return list(module)
    raise BandsError(f"{type(model).__name__} has no list of {depth} decoder layers, whose outputs could be compared.")


@torch.inference_mode()
def hidden_changes(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """fp32 ``[L, N - 1]`` on the CPU: Euclidean distance of each layer's output at a token to that at the one before.

    The output of a decoder layer, residual included, before any final norm. Column ``j`` is of token ``j + 1`` of
    ``ids [N]``.
    """
    changes: list[torch.Tensor] = []

    def record(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        hidden = (output[0] if isinstance(output, tuple) else output)[0].float()
        changes.append(torch.linalg.vector_norm(hidden[1:] - hidden[:-1], dim=-1).cpu())

    layers = decoder_layers(model)
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        _logits(model, ids[None], 1)
    finally:
        for handle in handles:
            handle.remove()
    assert len(changes) == len(layers), f"{len(changes)} outputs of {len(layers)} layers"
    return torch.stack(changes)


@torch.inference_mode()
def importances(
    model: Any,
    ids: torch.Tensor,
    positions: Sequence[int],
    *,
    horizon: int | None,
    batch: int,
    advance: Callable[[int], None] = lambda _: None,
) -> torch.Tensor:
    """How far the predictions after a token move when no later token can attend to it.

    For each position ``t`` the model runs again with key ``t`` hidden from all later queries, in all layers and heads,
    and every token at its true position. The importance is the Kullback-Leibler divergence of the distribution of the
    next token without from that with token ``t``, ``KL(with || without)`` in nats, mean over the queries at ``t + 1``
    to ``t + horizon`` or to the end of the text.

    Parameters
    ----------
    ids : int64 ``[N]``
    positions : ascending, each at least 1 and at most ``N - 2``
    horizon : None: all later tokens
    batch : positions in one forward pass, beside the text as it is
    advance : is told of each batch how many positions it had

    Returns
    -------
    fp64 ``[n]`` on the CPU.
    """
    found: list[float] = []
    for start in range(0, len(positions), batch):
        hidden = list(positions[start : start + batch])
        end = len(ids) if horizon is None else min(len(ids), hidden[-1] + 1 + horizon)
        mask = torch.ones(len(hidden) + 1, end, dtype=torch.int64, device=ids.device)
        mask[range(1, len(hidden) + 1), hidden] = 0
        origin = hidden[0] + 1  # first position whose distribution is compared
        logits = _logits(model, ids[:end].expand(len(mask), -1), end - origin, mask)
        spans = [(t + 1 - origin, end - origin if horizon is None else t + 1 + horizon - origin) for t in hidden]
        found += _mean_divergences(logits, spans)
        advance(len(hidden))
    return torch.tensor(found, dtype=torch.float64)


def _logits(model: Any, ids: torch.Tensor, newest: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """``[rows, newest, V]`` for ``ids [rows, N]``; the mask hides keys, and positions are counted as if it did not."""
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": places, "use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = newest
    logits: torch.Tensor = model(**arguments).logits
    return logits[:, -newest:]


def _mean_divergences(logits: torch.Tensor, spans: Sequence[tuple[int, int]]) -> list[float]:
    """Of each row but the first, ``[rows, S, V]``, the mean KL from the first over its span of positions."""
    totals = [0.0] * len(spans)
    spans = [(first, min(last, logits.shape[1])) for first, last in spans]
    for start in range(0, logits.shape[1], COMPARED):
        full = logits[0, start : start + COMPARED].float().log_softmax(dim=-1)
        for row, (first, last) in enumerate(spans):
            inside = slice(max(first, start), min(last, start + COMPARED))
            if inside.start < inside.stop:
                log_p = full[inside.start - start : inside.stop - start]
                log_q = logits[row + 1, inside].float().log_softmax(dim=-1)
                totals[row] += float((log_p.exp() * (log_p - log_q)).sum())
    return [total / (last - first) for total, (first, last) in zip(totals, spans, strict=True)]
