"""The functions that `gsm8k_sample.yaml` names, beside those of the reasoning tasks."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from kvpolicy.lmeval_tasks.reasoning.scoring import check_grading

DATA = importlib.resources.files("kvpolicy") / "lmeval_tasks/gsm8k_sample/gsm8k_sample.jsonl"


def load(**_metadata: Any) -> Any:
    """The documents, built in memory: no cache folder and no hub takes part.

    lm-eval passes the model's arguments and the task's metadata; neither changes the documents.
    """
    from datasets import Dataset, DatasetDict

    check_grading()
    lines = DATA.read_text(encoding="utf-8").splitlines()
    return DatasetDict(test=Dataset.from_list([json.loads(line) for line in lines]))
