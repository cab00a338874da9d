"""The functions that `gsm8k_sample.yaml` names."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.lmeval_tasks import answers, response

DATA = importlib.resources.files("kvpolicy") / "lmeval_tasks/gsm8k_sample/gsm8k_sample.jsonl"


def load(**_metadata: Any) -> Any:
    """The documents, built in memory: no cache folder and no hub takes part.

    lm-eval passes the model's arguments and the task's metadata; neither changes the documents.
    """
    from datasets import Dataset, DatasetDict

    lines = DATA.read_text(encoding="utf-8").splitlines()
    return DatasetDict(test=Dataset.from_list([json.loads(line) for line in lines]))


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """Metrics of one response."""
    (text,) = results
    correct = answers.is_correct(text, doc["answer"], truncated=bool(response.cut_off(text)))
    return {"exact_match": int(correct), **response.metrics_of(text)}
