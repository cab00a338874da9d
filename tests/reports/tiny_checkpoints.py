"""Random decoders of a few thousand weights, with a tokenizer, as checkpoints for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def configuration(kind: str, **changed: Any) -> Any:
    """Of a model of transformers: "Qwen3", "Llama", …; grouped queries, head_dim * heads unlike the hidden size."""
    import transformers

    return getattr(transformers, f"{kind}Config")(**{**SIZES, **changed})


def decoder(kind: str, **changed: Any) -> Any:
    """The model without its head, fp32, random, with weights of norms and biases that are not 1 and 0."""
    import transformers

    torch.manual_seed(0)
    model = (
        transformers.AutoModel.from_config(configuration(kind, **changed), attn_implementation="sdpa").float().eval()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
    return model


def checkpoint(folder: Path, kind: str, **changed: Any) -> Path:
    """`decoder` on disk, with a tokenizer of one token per letter."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(VOCABULARY - 1)} | {"?": 63}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    decoder(kind, **changed).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?").save_pretrained(folder)
    return folder
