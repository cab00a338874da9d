"""The logit processor of ablation_kl.py. A module of its own, because it is the one that imports SGLang.

The scheduler process imports it by name: a spawned process inherits `sys.path`.
"""

from __future__ import annotations

from typing import Any

import torch
from ablation_observer import observe
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from kvpolicy.sglang_plugin.residency import residency_of


class TeacherForcing(CustomLogitProcessor):
    """Shows each request's logits to its observer, with the number of evictions that its cache has been through."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        assert custom_param_list is not None
        evictions = [residency_of(parameters["__req__"]).evictions for parameters in custom_param_list]
        return observe(logits, custom_param_list, evictions)
