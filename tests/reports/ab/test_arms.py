"""What may be written as an arm, and what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.reports.ab.arms import KV_ARGUMENTS, AbError, ArmSpec, items, parse_arm, parse_arms
from kvpolicy.sglang_plugin.config import ARGUMENTS


def test_the_plugin_has_these_arguments() -> None:
    assert set(KV_ARGUMENTS) == set(ARGUMENTS)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("full", "full", {"kv_policy": "full"}),
        ("base=full", "base", {"kv_policy": "full"}),
        ("kv_policy=vase-dkv,kv_budget=2048", "vase-dkv-2048", {"kv_policy": "vase-dkv", "kv_budget": "2048"}),
        ("small=kv_policy=vase-dkv,kv_budget=64", "small", {"kv_policy": "vase-dkv", "kv_budget": "64"}),
        ("kv_quant=range-int4", "range-int4", {"kv_policy": "full", "kv_quant": "range-int4"}),
        (
            "kv_policy=h2o,kv_quant=int4,kv_period=32",
            "h2o-int4-period-32",
            {"kv_policy": "h2o", "kv_quant": "int4", "kv_period": "32"},
        ),
        (
            "kv_policy=vase-attnv[reserve:random;sample:false],tp_size=2",
            "vase-attnv-reserve-random-sample-false-tp_size-2",
            {"kv_policy": "vase-attnv[reserve:random;sample:false]", "tp_size": "2"},
        ),
        ("vase-attnv[reserve:random]", "vase-attnv-reserve-random", {"kv_policy": "vase-attnv[reserve:random]"}),
        (
            "kv_policy=vase-attnv,kv_options=reserve:random",
            "vase-attnv-options-reserve-random",
            {"kv_policy": "vase-attnv", "kv_options": "reserve:random"},
        ),
        (
            "kv_policy=full,kv_cache_dtype=bfloat16",
            "full-cache_dtype-bfloat16",
            {"kv_policy": "full", "kv_cache_dtype": "bfloat16"},
        ),
    ],
)
def test_arguments_of_a_run(text: str, name: str, arguments: dict[str, str]) -> None:
    assert parse_arm(text) == ArmSpec(name, arguments)


def test_results_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run 1"
    (folder / "a=b").mkdir(parents=True)
    assert parse_arm(str(folder)) == ArmSpec("run-1", folder=folder)
    assert parse_arm(f"old={folder}") == ArmSpec("old", folder=folder)
    assert parse_arm(f"old={folder / 'a=b'}") == ArmSpec("old", folder=folder / "a=b")
    assert parse_arm(str(folder / "a=b")) == ArmSpec("a-b", folder=folder / "a=b")
    (tmp_path / "full").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_arm("full") == ArmSpec("full", {"kv_policy": "full"})
    assert parse_arm("./full") == ArmSpec("full", folder=Path("full"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vase-dvk", "neither a folder nor a policy (did you mean vase-dkv?)"),
        ("old=out/nowhere", "'out/nowhere' is neither a folder nor a policy; an arm is written"),
        ("context_length=8192", "'8192' is neither a folder nor a policy"),
        ("", "'' is neither a folder nor a policy"),
        ("kv_policy=vase", "kv_policy 'vase' is not known"),
        ("kv_polcy=full", "kv_polcy is not an argument; did you mean kv_policy?"),
        ("small=kv_policy=full,kv_bugdet=4", "kv_bugdet is not an argument; did you mean kv_budget?"),
        ("kv_policy=full|h2o", "names several policies, and an arm has one"),
        ("kv_policy=h2o,kv_options=old:1", "has no option 'old'"),
        ("kv_policy=vase-attnv[old:1]", "has no option 'old'"),
        ("kv_quant=int3", "kv_quant='int3' is not a format"),
        ("kv_quant=int4,kv_quant_keys=int3", "kv_quant_keys='int3' is not a format of keys"),
        ("kv_policy=full,kv_budget", "'kv_budget' is not written name=value"),
        ("kv_policy=full,kv_policy=h2o", "gives kv_policy twice"),
        ("a b=full", "an arm's name has letters"),
        ("report.json=full", "report.json is a file of the report"),
    ],
)
def test_an_arm_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(AbError) as refused:
        parse_arm(text)
    message = str(refused.value)
    assert says in message
    assert message.startswith(f"--arm {text}")
    assert message[-1] in ".?"


def test_a_comparison_has_two_arms_of_two_names() -> None:
    assert [arm.name for arm in parse_arms(["full", "h2o"])] == ["full", "h2o"]
    with pytest.raises(AbError, match="at least two arms, got 1"):
        parse_arms(["full"])
    with pytest.raises(AbError, match="two arms are called full"):
        parse_arms(["full", "full=h2o"])


def test_items_are_divided_as_lm_eval_divides_them() -> None:
    from lm_eval._cli.utils import key_val_to_dict

    text = "a=x,b=[1, 2],c='p,q',d=k[r:1;s:2],e=f=g"
    assert items(text, "--x") == {"a": "x", "b": "[1, 2]", "c": "'p,q'", "d": "k[r:1;s:2]", "e": "f=g"}
    assert list(key_val_to_dict(text)) == list(items(text, "--x"))
    assert items("", "--x") == {}
