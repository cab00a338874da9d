"""What a run may choose of a task, through `lm_eval --metadata`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from kvpolicy.lmeval_tasks.errors import TaskError

SPLITS = ("all", "dev", "confirm")
# How alike another name must be to count as misspelt. lm-eval adds the model's arguments to the metadata, and one
# of SGLang's 546 is called enable_strict_thinking; so unknown names cannot be refused, only likely mistakes.
_ALIKE = {"split": 0.75, "subset": 0.75, "repeats": 0.75, "enable_thinking": 0.9}


@dataclass(frozen=True)
class Options:
    """The choices of a run, the same for all its tasks.

    split : which documents, as `lmeval_tasks.split.part_of` divides them.
    subset : how many documents of the split, chosen by their ids; None for all.
    repeats : samples per document; None for the task's own number.
    enable_thinking : what the chat template is told; None tells it nothing.
    """

    split: str = "all"
    subset: int | None = None
    repeats: int | None = None
    enable_thinking: bool | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Options:
        """The options among a task's metadata, which holds the model's arguments too.

        Raises
        ------
        TaskError
            On a bad value, a name that is almost an option's, or a model argument that would spoil the grading.
        """
        for name in metadata.keys() - _ALIKE.keys():
            for option, least in _ALIKE.items():
                if SequenceMatcher(None, name, option).ratio() >= least:
                    raise TaskError(f"--metadata has no {name}; did you mean {option}?")
        if metadata.get("think_end_token") is not None:
            raise TaskError(
                f"think_end_token={metadata['think_end_token']} makes lm-eval cut the thinking off, and with it the "
                "difference between an answer and thoughts that never ended; leave it out: the kvp_ tasks do it."
            )
        split = metadata.get("split") or "all"
        if split not in SPLITS:
            raise TaskError(f"split must be {', '.join(SPLITS[:-1])} or {SPLITS[-1]}, got {split!r}.")
        thinking = metadata.get("enable_thinking")
        if not isinstance(thinking, bool | None):
            raise TaskError(f"enable_thinking must be True or False, got {thinking!r}.")
        return cls(split, _count(metadata, "subset"), _count(metadata, "repeats"), thinking)


def _count(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise TaskError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return value
