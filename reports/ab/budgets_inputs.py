"""What budgets are computed from: the shape of a model's cache, and the lengths of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.reports.ab.arms import AbError
from kvpolicy.reports.ab.budgets import Shape, Text
from kvpolicy.reports.lmeval_output import newest_runs


def lengths_of(folder: Path) -> list[Text]:
    """The lengths of all responses in an output folder of lm-eval that carry a record.

    Raises
    ------
    OutputError
        If there are no samples.
    AbError
        If no response carries a record.
    """
    found: list[Text] = []
    for run in newest_runs(folder):
        for sample in run.samples:
            records = sample.get("kv_policy") or []
            for record in records if isinstance(records, list) else [records]:
                if record["decode_steps"]:
                    prompt = max(1, record["full_end"] - record["decode_steps"])
                    found.append(Text(prompt, record["decode_steps"]))
    if not found:
        raise AbError(f"--like {folder}: no response there carries a record of its cache.")
    return found


def shape_of(model: str, item_bytes: int) -> Shape:
    """The cache of a model, a folder or a hub id, by its configuration.

    Raises
    ------
    AbError
        If it cannot be read, or the model's cache is not one of keys and values of all tokens in each layer.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise AbError(f"--model {model} has no configuration that can be read: {str(error).splitlines()[0]}") from None
    query_heads = getattr(config, "num_attention_heads", None)
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if not query_heads or windows or getattr(config, "kv_lora_rank", None):
        what = f"layers of {', '.join(sorted(windows))}" if windows else "no plain attention in each layer"
        raise AbError(
            f"--model {model}, a {config.model_type}, has {what}; its cache is not one of keys and values alone."
        )
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return Shape(config.num_hidden_layers, heads, head_dim, item_bytes)
