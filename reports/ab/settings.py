"""What all arms of a comparison share, and the command of lm-eval that runs one of them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Split = Literal["dev", "confirm", "all"]
LM_EVAL = (sys.executable, "-m", "lm_eval", "run")
DATA = "KVPOLICY_DATA"  # the folder that the kvp_ tasks read, in place of the hub
_PACKAGES = ("sglang-kvpolicy", "sglang", "lm-eval", "torch", "transformers", "math-verify")


@dataclass(frozen=True)
class Settings:
    """Of all runs; texts are handed to lm-eval as they are.

    metadata : beside split, subset and repeats.
    """

    model: str
    tasks: tuple[str, ...]
    split: Split
    subset: int | None
    repeats: int | None
    model_args: Mapping[str, str]
    gen_kwargs: Mapping[str, str]
    metadata: Mapping[str, str]
    chat_template: bool
    batch_size: str

    def model_arguments(self, arm: Mapping[str, str]) -> dict[str, str]:
        """Those of one arm, its own last: they override what all share."""
        return {"pretrained": self.model, **self.model_args, **arm}

    @property
    def all_metadata(self) -> dict[str, str]:
        """As `--metadata` takes it."""
        chosen = {"split": self.split, "subset": self.subset, "repeats": self.repeats}
        return {name: str(value) for name, value in chosen.items() if value is not None} | dict(self.metadata)

    @property
    def shared(self) -> dict[str, Any]:
        """All that decides the results but for the arm, as JSON can hold it."""
        return {
            "model": self.model,
            "tasks": list(self.tasks),
            "model_args": dict(self.model_args),
            "generation": dict(self.gen_kwargs),
            "metadata": self.all_metadata,
            "chat_template": self.chat_template,
            "batch_size": self.batch_size,
            "data": os.environ.get(DATA) or "hub",
        }

    def command(self, arm: Mapping[str, str], folder: Path, samples: Mapping[str, range] | None = None) -> list[str]:
        """The run of an arm with stock lm-eval, its results below `folder`.

        samples : per task the numbers of its documents; None for all of all tasks.
        """
        tasks = self.tasks if samples is None else tuple(samples)
        command = [*LM_EVAL, "--model", "sglang", "--model_args", _joined(self.model_arguments(arm))]
        command += ["--tasks", ",".join(tasks), "--include_path", tasks_folder(), "--metadata"]
        command += [_joined(self.all_metadata), "--batch_size", self.batch_size, "--log_samples"]
        if self.chat_template:
            command += ["--apply_chat_template"]
        if self.gen_kwargs:
            command += ["--gen_kwargs", _joined(self.gen_kwargs)]
        if samples is not None:
            command += ["--samples", json.dumps({task: list(numbers) for task, numbers in samples.items()})]
        return [*command, "--output_path", str(folder)]


def digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of settings as JSON can hold them, independent of the order of names."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def tasks_folder() -> str:
    """What `kvpolicy tasks` prints."""
    return str(importlib.resources.files("kvpolicy") / "lmeval_tasks")


def versions() -> dict[str, str]:
    """Of Python and the packages that a result depends on, so far as they are installed."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _joined(arguments: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in arguments.items())
