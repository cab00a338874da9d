"""The command of a run, as lm-eval itself reads it, and what decides whether two runs are of the same settings."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from kvpolicy.reports.ab.settings import Settings, digest, tasks_folder, versions

SETTINGS = Settings(
    model="org/model",
    tasks=("kvp_math500", "kvp_aime25"),
    split="dev",
    subset=8,
    repeats=2,
    model_args={"tp_size": "2", "kv_seed": "1"},
    gen_kwargs={"max_gen_toks": "512", "temperature": "0.6"},
    metadata={"enable_thinking": "True"},
    chat_template=True,
    batch_size="auto",
)
ARM = {"kv_policy": "vase-attnv[reserve:random;sample:false]", "kv_budget": "256", "kv_seed": "7"}


def test_stock_lm_eval_understands_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval._cli.harness import HarnessCLI

    command = SETTINGS.command(ARM, Path("out/small"), {"kvp_math500": range(4, 7)})
    assert command[:4] == [sys.executable, "-m", "lm_eval", "run"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *command[3:]])
    read = vars(HarnessCLI().parse_args())
    assert read["model"] == "sglang"
    assert read["model_args"] == {
        "pretrained": "org/model",
        "tp_size": 2,
        "kv_seed": 7,
        "kv_policy": ARM["kv_policy"],
        "kv_budget": 256,
    }
    assert read["tasks"] == ["kvp_math500"]
    assert read["metadata"] == {"split": "dev", "subset": 8, "repeats": 2, "enable_thinking": True}
    assert read["gen_kwargs"] == {"max_gen_toks": 512, "temperature": 0.6}
    assert read["samples"] == {"kvp_math500": [4, 5, 6]}
    assert read["apply_chat_template"] is True
    assert (read["log_samples"], read["batch_size"]) == (True, "auto")
    assert (read["include_path"], read["output_path"]) == (tasks_folder(), "out/small")
    assert Path(tasks_folder()).joinpath("math500", "math500.yaml").is_file()


def test_a_command_without_what_was_not_asked_for() -> None:
    plain = dataclasses.replace(SETTINGS, gen_kwargs={}, subset=None, repeats=None, metadata={}, chat_template=False)
    command = plain.command({"kv_policy": "full"}, Path("out"))
    assert not {"--gen_kwargs", "--samples", "--apply_chat_template"} & set(command)
    assert command[command.index("--metadata") + 1] == "split=dev"
    assert command[command.index("--tasks") + 1] == "kvp_math500,kvp_aime25"


def test_every_setting_is_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOLICY_DATA", raising=False)
    changes = {
        "model": "other",
        "tasks": ("kvp_math500",),
        "split": "confirm",
        "subset": 9,
        "repeats": 3,
        "model_args": {"tp_size": "1"},
        "gen_kwargs": {"max_gen_toks": "513"},
        "metadata": {},
        "chat_template": False,
        "batch_size": "1",
    }
    assert changes.keys() == {field.name for field in dataclasses.fields(SETTINGS)}
    digests = {digest(dataclasses.replace(SETTINGS, **{name: value}).shared) for name, value in changes.items()}
    digests.add(digest(SETTINGS.shared))
    monkeypatch.setenv("KVPOLICY_DATA", "/data")
    digests.add(digest(SETTINGS.shared))
    assert len(digests) == len(changes) + 2
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_versions_name_what_is_installed() -> None:
    import lm_eval

    found = versions()
    assert found["lm-eval"] == lm_eval.__version__
    assert found["python"].startswith("3.")
