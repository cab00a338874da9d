"""What `kvpolicy doctor` says of one launch: the refusals that the launch would meet, and nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.sglang_plugin import doctor_launch
from kvpolicy.sglang_plugin.doctor_findings import LAUNCH, Finding, Status

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a small Qwen3, without weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def launch(model: str | None, *flags: str, **arguments: Any) -> list[Finding]:
    return doctor_launch.findings(arguments, model, flags, sglang=True)


def sentences(findings: list[Finding]) -> list[str]:
    return [finding.advice for finding in findings if finding.status is Status.PROBLEM]


def test_a_launch_that_works_has_no_problem_and_says_what_serves_it(model: str) -> None:
    pytest.importorskip("sglang")
    findings = launch(model, kv_policy="vase-attnv", kv_budget=128)
    assert sentences(findings) == []
    found = by_name(findings)
    assert found["model"].found == "Qwen3ForCausalLM: 4 layers, 8 query and 2 KV heads"
    assert "page size 1" in found["SGLang"].found
    assert {"options", "architecture", "policies", "attention"} <= set(found)
    # What the launch would log is among the findings.
    assert ["max_running_requests=128" in finding.advice for finding in findings if finding.status is Status.NOTE] == [
        True
    ]


def test_all_that_a_launch_is_refused_for_is_told_at_once_in_the_words_of_the_refusals(model: str) -> None:
    pytest.importorskip("sglang")
    found = sentences(launch(model, "--tp-size", "2", "--page-size", "16", kv_policy="tova", kv_budget=128))
    options, page, ranks = found
    assert options.startswith("kv_policy does not work with page_size=16: ")
    assert page.startswith("kv_policy does not work with the page size 16 of attention backend ")
    assert ranks.startswith("kv_policy=tova chooses for all KV heads together, and tp_size=2 spreads them")


def test_two_attention_backends_are_refused_for_queries_alone(model: str) -> None:
    pytest.importorskip("sglang")
    flags = ("--prefill-attention-backend", "torch_native", "--decode-attention-backend", "triton")
    assert "attention backend HybridAttnBackend" in " ".join(sentences(launch(model, *flags, kv_policy="vase-attnv")))
    assert sentences(launch(model, *flags, kv_policy="vase-dkv")) == []


def test_a_format_that_does_not_fit_is_refused(model: str) -> None:
    pytest.importorskip("sglang")
    (sentence,) = sentences(launch(model, kv_quant="int4", kv_quant_group=64))
    assert "kv_quant_group=64 does not fit the model's heads of 32 channels" in sentence


@pytest.mark.parametrize(
    ("arguments", "status", "found"),
    [
        ({"kv_policy": "vase-dkv", "kv_budget": "64"}, Status.PROBLEM, "refused"),
        ({"kv_policy": "vase"}, Status.PROBLEM, "refused"),
        ({"kv_policy": None}, Status.OK, "none, so SGLang would run as if kvpolicy were not installed"),
        (
            {"kv_policy": "vase-dkv", "kv_quant": "int4"},
            Status.OK,
            "policy vase-dkv, budget 4096, period 64, kv_quant int4",
        ),
    ],
    ids=["no room", "unknown", "none", "both"],
)
def test_the_arguments_are_looked_at_without_a_model(arguments: dict[str, Any], status: Status, found: str) -> None:
    (finding,) = launch(None, **arguments)
    assert (finding.section, finding.status, finding.found) == (LAUNCH, status, found)
    assert bool(finding.advice) == (status is Status.PROBLEM)


def test_flags_without_a_model_are_not_looked_at() -> None:
    assert sentences(launch(None, "--tp-size", "2")) == ["SGLang's flags are looked at together with --model."]


def test_a_model_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (sentence,) = sentences(launch(str(tmp_path), kv_policy="full"))
    assert sentence.startswith(f"The configuration of {str(tmp_path)!r} cannot be read (")
    assert sentence.endswith("name a folder with a config.json, or a model of the hub while the hub can be reached.")


def test_without_a_sound_sglang_the_model_is_read_and_no_more(model: str) -> None:
    findings = doctor_launch.findings({"kv_policy": "full"}, model, (), sglang=False)
    assert [finding.name for finding in findings] == ["arguments", "model", "support"]
    assert sentences(findings) == []


def test_without_torch_no_argument_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_launch, "version_of", lambda _: None)
    assert launch(None, kv_policy="no such") == []
