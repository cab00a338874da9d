"""Reports of random rows: small, and ugly where asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpolicy.quant.codecs import codec
from kvpolicy.reports.quant_error.arms import both_arms, comparison, key_arms
from kvpolicy.reports.quant_error.capture import LayerRows
from kvpolicy.reports.quant_error.measure import measure_layer
from kvpolicy.reports.quant_error.output import OutputErrors
from kvpolicy.reports.quant_error.report import Report, arms_of

HEAD_DIM, TOKENS = 64, 140


def random_report(
    codecs: Sequence[str] = ("int4-g64",),
    keys: Sequence[str] = ("int4-g64",),
    *,
    layers: int = 3,
    kv_heads: int = 2,
    run_keys: bool = False,
    flat: bool = False,
    model: str = "tiny",
) -> Report:
    """Of random rows, the later the layer the larger; flat: of rows that every codec stores exactly."""
    comparisons = [comparison(codec(name), 0.05, HEAD_DIM, torch.bfloat16, TOKENS) for name in codecs]
    of_keys = key_arms([codec(name) for name in keys])
    both = both_arms(of_keys, comparisons) if run_keys else []
    arms = arms_of(comparisons, of_keys, both)
    measured = []
    for layer in range(layers):
        random = torch.Generator().manual_seed(layer)
        queries = torch.randn(2 * kv_heads, TOKENS, HEAD_DIM, generator=random)
        rows = torch.randn(2, kv_heads, TOKENS, HEAD_DIM, generator=random) * (1 + layer)
        keys_, values = (torch.ones_like(rows) if flat else rows).bfloat16()
        measured.append(measure_layer(LayerRows(layer, queries, keys_, values, HEAD_DIM**-0.5), arms))
    outputs = {}
    for number, arm in enumerate(arms):
        if run_keys or arm not in of_keys:
            draws = np.zeros((3, TOKENS - 1)) if flat else np.random.default_rng(number).random((3, TOKENS - 1))
            outputs[arm.name] = OutputErrors(draws[0] / 50, np.round(draws[1]), draws[2] - 0.5)
    return Report(
        model=model,
        source="random numbers",
        tokens=TOKENS,
        dtype=torch.float32,
        cache_dtype=torch.bfloat16,
        head_dim=HEAD_DIM,
        share=0.05,
        comparisons=comparisons,
        keys=of_keys,
        both=both,
        layers=measured,
        outputs=outputs,
    )
