"""`nf4`, `fp4`, `int8-blockwise`: bitsandbytes' block-wise formats, as comparison arms."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch

from kvpolicy.quant.codec import Codec

BLOCK = 64
CODE_BITS = {"nf4": 4, "fp4": 4, "int8-blockwise": 8}


@dataclass(frozen=True)
class Blockwise(Codec):
    """Codes relative to the largest magnitude of each block of 64 channels, which is stored in fp32.

    ``nf4``: QLoRA's NormalFloat (arXiv 2305.14314); ``fp4``: a 4-bit float; ``int8-blockwise``: the map of 8-bit
    optimizers (arXiv 2110.02861). As in a paged cache no block holds numbers of two tokens: a row is padded to whole
    blocks with zeros, which change no largest magnitude and need not be stored.

    Parameters
    ----------
    kind : {"nf4", "fp4", "int8-blockwise"}
    """

    kind: Literal["nf4", "fp4", "int8-blockwise"]

    @property
    def name(self) -> str:
        return self.kind

    def check(self, head_dim: int) -> None:
        """As of every codec; raises ModuleNotFoundError where bitsandbytes is not installed."""
        if head_dim < 1:
            raise ValueError(f"a head has at least one channel, got {head_dim}")
        if find_spec("bitsandbytes") is None:
            raise ModuleNotFoundError(f"{self.name} needs bitsandbytes; run pip install 'sglang-kvpolicy[quant]'")

    def bits(self, head_dim: int, dtype: torch.dtype) -> float:
        return CODE_BITS[self.kind] + 32 * -(-head_dim // BLOCK) / head_dim

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        head_dim = rows.shape[-1]
        padded = torch.nn.functional.pad(rows.float(), (0, -head_dim % BLOCK))
        # One dimension: on some CPUs, bitsandbytes 0.50.2 mixes up blocks where the last dimension is not whole blocks.
        return self._flat(padded.flatten()).view(padded.shape)[..., :head_dim]

    def _flat(self, numbers: torch.Tensor) -> torch.Tensor:
        # Its import may ask a hub for a kernel of matrix products, which nothing here uses; HF_HUB_OFFLINE=1 stops it.
        functional = import_module("bitsandbytes.functional")
        if self.kind == "int8-blockwise":
            codes, state = functional.quantize_blockwise(numbers, blocksize=BLOCK)
            restored: torch.Tensor = functional.dequantize_blockwise(codes, state)
        else:
            codes, state = functional.quantize_4bit(numbers, blocksize=BLOCK, quant_type=self.kind)
            restored = functional.dequantize_4bit(codes, state)
        return restored
