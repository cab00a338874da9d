"""Trained gates of SeerAttention-R: from a file, a folder or a repository of the hub to one `Gate` per layer."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

# The file of the published gate checkpoints.
WEIGHTS = "attn_gate_weights.pth"
# What a gate's config.json, where there is one, must say: the form of gate that is implemented.
FORM: dict[str, Any] = {
    "seerattn_q_head_pooling_type": "Qproj",
    "seerattn_k_seq_pooling_type": "Kmaxminavg",
    "seerattn_use_qk_norm": True,
    "seerattn_use_rope": True,
}
TENSORS = {
    "query": "attngate_linear_q.weight",
    "key": "attngate_linear_k.weight",
    "query_norm": "attngate_qnorm.weight",
    "key_norm": "attngate_knorm.weight",
}
_NAME = re.compile(r"layers\.(\d+)\.(?:.+\.)?attn_gate\.(attngate_.+)$")


@dataclass(frozen=True)
class Gate:
    """The gate of one layer, fp32.

    query : ``[H_kv, G, D, E]``, from the `G` query heads of a KV head, concatenated, to the gate's width `E`.
    key : ``[H_kv, 3·D, E]``, from a block's largest, smallest and mean key.
    query_norm, key_norm : ``[E]``, weights of the RMS norms.
    """

    query: torch.Tensor
    key: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor

    def of_heads(self, first: int, count: int, device: torch.device) -> Gate:
        """The part of `count` KV heads from `first` on, on `device`."""
        query, key = (whole[first : first + count].to(device) for whole in (self.query, self.key))
        return Gate(query, key, self.query_norm.to(device), self.key_norm.to(device))


def load_gates(source: str, layers: Iterable[int], block: int) -> dict[int, Gate]:
    """The gates of `layers`, for blocks of `block` tokens.

    Parameters
    ----------
    source : str
        A ``.safetensors`` file or a file of `torch.save`; a folder with `attn_gate_weights.pth` or with
        ``.safetensors`` files; else the name of a repository of the Hugging Face hub, which is downloaded.

    Raises
    ------
    ValueError
        One sentence: what is not there, or not of the form that is implemented.
    """
    path = _find(source)
    _check_form(source, path if path.is_dir() else path.parent, block)
    found: dict[tuple[int, str], torch.Tensor] = {}
    for name, tensor in _tensors(source, path).items():
        if match := _NAME.search(name):
            found[int(match[1]), match[2]] = tensor.float()
    wanted = {(layer, name) for layer in layers for name in TENSORS.values()}
    if missing := sorted(wanted - found.keys()):
        names = [f"model.layers.{layer}.self_attn.attn_gate.{name}" for layer, name in missing]
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        raise ValueError(f"the gates in {source!r} lack {', '.join(names[:6])}{more}; name gates of this model")
    return {
        layer: Gate(**{field: found[layer, name] for field, name in TENSORS.items()})
        for layer in sorted({layer for layer, _ in wanted})
    }


def check_shapes(gates: Mapping[int, Gate], kv_heads: int, group: int, head_dim: int) -> None:
    """Raise ValueError unless the gates are of a model with `kv_heads` KV heads and `group` query heads for each.

    Their width must be the size of a head, as in all published gates: they are rotated with the model's own RoPE.
    """
    for layer, gate in gates.items():
        wanted: dict[str, tuple[int, ...]] = {
            "query": (kv_heads, group, head_dim, head_dim),
            "key": (kv_heads, 3 * head_dim, head_dim),
            "query_norm": (head_dim,),
            "key_norm": (head_dim,),
        }
        for field, shape in wanted.items():
            if (found := tuple(getattr(gate, field).shape)) != shape:
                raise ValueError(
                    f"{TENSORS[field]} of layer {layer} is {found} in the gates, but a model with {kv_heads} KV heads, "
                    f"{group} query heads for each and head_dim {head_dim} needs {shape}; name gates of this model"
                )


def _find(source: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=[WEIGHTS, "*.safetensors", "config.json"]))
    except (OSError, ValueError) as error:  # no such repository, no such name, no connection
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the gates {source!r} are neither a file or folder here nor a repository that the Hugging Face hub would "
            f"give ({reason}); name a folder with {WEIGHTS} or a .safetensors file"
        ) from error


def _check_form(source: str, folder: Path, block: int) -> None:
    config = folder / "config.json"
    said = json.loads(config.read_text()) if config.is_file() else {}
    for name, wanted in {**FORM, "seerattn_gate_block_size": block}.items():
        if name in said and said[name] != wanted:
            raise ValueError(
                f"the gates in {source!r} were trained with {name}={said[name]!r}, but they are to be used with "
                f"{wanted!r}; name other gates, or set the block option where it is the block size"
            )


def _tensors(source: str, path: Path) -> dict[str, torch.Tensor]:
    if path.is_file():
        files = [path]
    else:
        files = [path / WEIGHTS] if (path / WEIGHTS).is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"the folder {source!r} has neither {WEIGHTS} nor .safetensors files; name one that has")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, TypeError) as error:
            raise ValueError(
                f"{file} holds no tensors by name that could be read ({type(error).__name__}); "
                "name a .safetensors file, or one that torch.save wrote of a state dict"
            ) from error
    return tensors
