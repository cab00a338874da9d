"""Random gates of SeerAttention-R, and files of them as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def random_state(
    layers: range, kv_heads: int, group: int, head_dim: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by their published names, with norms that are not all one."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer in layers:
        name = f"model.layers.{layer}.self_attn.attn_gate.attngate_"
        scale = (group * head_dim) ** -0.5
        state[f"{name}linear_q.weight"] = torch.randn(kv_heads, group, head_dim, head_dim, generator=generator) * scale
        state[f"{name}linear_k.weight"] = torch.randn(kv_heads, 3 * head_dim, head_dim, generator=generator) * scale
        for norm in ("qnorm", "knorm"):
            state[f"{name}{norm}.weight"] = 0.5 + torch.rand(head_dim, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def write_folder(
    folder: Path, state: dict[str, torch.Tensor], *, form: str = "pth", config: dict[str, Any] | None = None
) -> str:
    """A checkpoint folder: `form` is ``pth``, ``safetensors`` or ``shards``, two of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "pth":
        torch.save(state, folder / "attn_gate_weights.pth")
    else:
        names = sorted(state)
        parts = [names] if form == "safetensors" else [names[::2], names[1::2]]
        for number, part in enumerate(parts):
            save_file({name: state[name].contiguous() for name in part}, folder / f"gates-{number}.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def rotary_table(positions: int, head_dim: int, *, theta: float = 10000.0, scale: float = 1.0) -> torch.Tensor:
    """``[positions, head_dim]`` fp32, cosines and then sines, as SGLang keeps it; `scale` as YaRN scales it."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(positions).double()[:, None] * frequencies
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scale).float()
