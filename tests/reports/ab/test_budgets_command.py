"""`kvpolicy ab-budgets`: from a configuration and a pool to arms that can be run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.cli import main
from kvpolicy.reports.ab.arms import parse_arm
from tests.reports.ab.made import samples_of, steps_of, whole
from tests.reports.ab.runs import write

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}


def model(folder: Path, **changed: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN | changed))
    return str(folder)


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return model(tmp_path / "qwen")


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["ab-budgets", *options]) == 0
    return capsys.readouterr().out


def test_arms_of_the_pool(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--model", qwen, "--pool-gib", "8", "--requests", "16", "--length", "40000")
    assert "Target: 512.0 MiB of KV a request" in text
    arms = re.findall(r"--arm (\S+)", text)
    assert len(arms) == 13  # 16 bit, and six formats with keys in 16 and in 8
    assert len({parse_arm(arm).name for arm in arms}) == 13
    # 512 MiB are 3640.9 tokens of 144 KiB; from 256 tokens on, the row grows to the budget and a period more.
    tokens = 512 * 2**20 / (2 * 36 * 8 * 128 * 2)
    arguments = parse_arm(arms[0]).arguments
    assert arguments is not None
    budget = int(arguments["kv_budget"])
    assert tokens < budget + 65 / 2 < 1.1 * tokens


def test_the_target_of_a_format(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", qwen, "--pool-gib", "8", "--formats", "range-int4,int4", "--keys", "none", "--length", "8192")
    text = shown(capsys, *options, "--as", "range-int4")
    assert re.search(r"range-int4, 64, none, 5 % .* none .* \+0\.0 % +matched", text)
    assert re.search(r"int4, 64, none +10\.25 .* unmatched", text)
    assert "--arm kv_quant=range-int4,kv_quant_group=64,kv_protect=0.05\n" in text
    other = shown(capsys, *options, "--as", "kv_quant=range-int4,kv_quant_group=32,kv_protect=0.1,kv_quant_keys=int8")
    assert text.splitlines()[0] != other.splitlines()[0]


def test_the_lengths_of_a_run(qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", samples_of([["correct"] * 2] * 5, whole))
    steps = [steps_of(problem, repeat) for problem in range(5) for repeat in range(2)]
    mean = sum(n * (20 + (n + 1) / 2) for n in steps) / sum(steps)
    text = shown(capsys, "--model", qwen, "--request-mib", "100", "--like", str(tmp_path / "run"))
    assert f" {mean * 144 / 1024:.1f} " in text.partition("precision of the model")[2].splitlines()[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--pool-gib", "0"], "--pool-gib must be above 0, got 0."),
        (["--pool-gib", "8", "--period", "0"], "--period must be above 0"),
        (["--pool-gib", "8", "--prompt", "99", "--length", "99"], "--length 99 leaves no response"),
        (["--pool-gib", "8", "--policy", "vase"], "--policy: kv_policy 'vase' is not known"),
        (["--pool-gib", "8", "--policy", "full"], "--policy full does not cut its cache back to a budget"),
        (["--pool-gib", "8", "--policy", "quest"], "--policy quest does not cut its cache back to a budget"),
        (["--pool-gib", "8", "--formats", "int3"], "kv_quant='int3' is not a format"),
        (["--pool-gib", "8", "--keys", "int2"], "kv_quant_keys='int2' is not a format of keys"),
        (["--pool-gib", "8", "--groups", "x"], "--groups takes numbers, got 'x'"),
        (["--pool-gib", "8", "--groups", "48"], "kv_quant_group=48 does not fit"),
        (["--pool-gib", "8", "--protect", "0.9"], "kv_protect=0.9 must be above 0"),
        (["--pool-gib", "8", "--as", "kv_policy=full"], "--as kv_policy=full is no format: it names no kv_quant"),
        (["--pool-gib", "8", "--as", "kv_quant=int4,x=1"], "is no format: it has no x"),
        (["--pool-gib", "8", "--like", "nowhere"], "nowhere holds no samples"),
        (["--request-mib", "0.001"], "holds no token"),
    ],
)
def test_what_cannot_be(qwen: str, options: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["ab-budgets", "--model", qwen, *options])
    message = str(refused.value)
    assert says in message
    assert message.startswith("kvpolicy ab-budgets: ")
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"layer_types": ["sliding_attention"] * 36, "sliding_window": 8}, "has layers of sliding_attention"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "has layers of linear_attention"),
        ({"model_type": "deepseek_v3"}, "no plain attention in each layer"),
        ({"model_type": "nothing"}, "has no configuration that can be read"),
    ],
)
def test_models_with_another_cache(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["ab-budgets", "--model", model(tmp_path / "m", **changed), "--pool-gib", "8"])
    assert says in str(refused.value)


def test_a_target_that_no_budget_meets(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--model", qwen, "--request-mib", "3")
    assert text.count("too small") == 14
    assert "No arm matches." in text
