"""An engine for the tests of quant_fidelity.py: logits out of a random generator, and noise that its format adds."""

from __future__ import annotations

from typing import Any

import ablation_observer
import torch
from quant_fidelity_study import Format

VOCABULARY, HEAD_DIM = 40, 64
# Noise in each format's logits. The full cache has none; "int8" never changes the likeliest token.
NOISE = {"full": 0.0, "int8": 1e-3, "range-int4": 1.0, "int2": 3.0}
CAPACITY = {"full": 1000, "int8": 1300, "range-int4": 1500, "int2": 1700}
PROTECTED = (0.5, 0.25, 0.75)  # of the prompts, by their number


def prompt_of(number: int) -> list[int]:
    return [number, 7, 7]


def stop_of(prompt: list[int], most: int) -> int:
    """The tokens of a greedy text: that of the first prompt ends at once, that of the second early."""
    return min(most, {0: 1, 1: 3}.get(prompt[0], most))


def logits_of(prompt: list[int], step: int, name: str, shift: int = 0) -> torch.Tensor:
    """fp32 ``[V]``. The prefill's step would be ruined by any format, if it were looked at."""
    generator = torch.Generator().manual_seed(1000 * (prompt[0] + shift) + step)
    rows = torch.randn(2, VOCABULARY, generator=generator)
    ruined = name != "full" and step == 0
    weights = torch.tensor([-3.0 if ruined else 3.0, NOISE[name]])
    return weights @ rows


class FakeEngine:
    """Answers like SGLang's `Engine` with a logit processor, with one step more than needed, as under overlap."""

    def __init__(self, chosen: Format, shift: int = 0) -> None:
        self.chosen, self.shift = chosen, shift
        self.batches: list[int] = []
        self.down = False

    def generate(
        self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], custom_logit_processor: str
    ) -> list[dict[str, Any]]:
        assert custom_logit_processor == "a processor"
        self.batches.append(len(input_ids))
        return [self._answer(*each) for each in zip(input_ids, sampling_params, strict=True)]

    def _answer(self, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
        most, custom, text = request["max_new_tokens"], dict(request["custom_params"]), []
        assert request["temperature"] == 0
        stop = most if request.get("ignore_eos") else stop_of(prompt, most)
        for step in range(stop + 1):
            row = logits_of(prompt, step, self.chosen.name, self.shift)[None].clone()
            said = int(ablation_observer.observe(row, [custom], [0])[0].argmax())
            if step < stop:
                text.append(said)
        return {"output_ids": text, "meta_info": {"kv_policy": self._report(prompt[0])}}

    def _report(self, number: int) -> dict[str, Any]:
        report: dict[str, Any] = {"retractions": 0, "evictions": 0, "kv_bytes_per_token": 512.0}
        stored = self.chosen.stored
        if stored is not None:
            report |= {"kv_quant": stored.name, "kv_quant_group": stored.group, "kv_quant_keys": stored.keys}
            report |= {"bits_per_element": 12.5, "kv_bytes_per_token": 400.0, "kv_bytes_per_token_full": 512.0}
            if stored.protects:
                report |= {"protected_end": PROTECTED[number], "protected_rows_denied": number}
        return report

    def get_server_info(self) -> dict[str, Any]:
        return {"internal_states": [{"memory_usage": {"token_capacity": CAPACITY[self.chosen.name]}}]}

    def shutdown(self) -> None:
        self.down = True
