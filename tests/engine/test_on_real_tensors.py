"""Every method against its reference on keys, values, queries and hidden states of SmolLM2 reading a real text.

No engine: the model reads its text once, and policy and reference evict from what it computed. Layers 0, 7, 14, 21 and
29 of its 30 stand for a model of five.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvpolicy.policies.options import build
from kvpolicy.policies.registry import policy_type
from tests.policies.life import Text
from tests.policies.references.table import REFERENCES, Entry, Shape
from tests.policies.test_against_references import Case, Tally, compare

LAYERS = (0, 7, 14, 21, 29)
SHAPE = Shape(len(LAYERS), 3, 3, 64)
TOKENS, PROMPT, BUDGET, PERIOD = 230, 60, 96, 16
RECORDING = "real_tensors_sdpa"


def _recording(module: Any, query: torch.Tensor, *args: Any, queries: list[torch.Tensor], **kwargs: Any) -> Any:
    queries.append(query[0])
    return AttentionInterface()["sdpa"](module, query, *args, **kwargs)


AttentionInterface.register(RECORDING, _recording)


@pytest.fixture(scope="module")
def text(smollm2: Path) -> Text:
    """The first problems of the GSM8K sample, as one text."""
    sample = harness.ROOT / "lmeval_tasks" / "gsm8k_sample" / "gsm8k_sample.jsonl"
    words = " ".join(json.loads(line)["question"] for line in sample.read_text().splitlines()[:8])
    ids = AutoTokenizer.from_pretrained(smollm2)(words, return_tensors="pt").input_ids[:, :TOKENS]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation=RECORDING)
    queries: list[torch.Tensor] = []
    with torch.no_grad():
        read = model(ids, past_key_values=DynamicCache(), output_hidden_states=True, queries=queries)
    cache = read.past_key_values.layers
    return Text(
        keys=torch.cat([cache[i].keys for i in LAYERS]),
        values=torch.cat([cache[i].values for i in LAYERS]),
        queries=torch.stack([queries[i] for i in LAYERS]),
        hidden=torch.cat([read.hidden_states[i + 1] for i in LAYERS]),
        prompt_len=PROMPT,
    )


@pytest.mark.parametrize("entry", REFERENCES, ids=str)
def test_a_method_evicts_what_its_reference_evicts(entry: Entry, text: Text, tmp_path: Path) -> None:
    policy = build(policy_type(entry.policy), entry.options(SHAPE, tmp_path))
    budget = max(BUDGET, policy.forced(PERIOD) + 2 * PERIOD)
    tally = Tally()
    compare(str(entry), Case(policy, entry.method(SHAPE), text, budget, PERIOD), entry.due, tally)
    print(entry, tally)
    assert text.length == TOKENS
    assert tally.rounds >= 2
    assert tally.excused <= 0.02 * tally.heads
