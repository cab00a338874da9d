"""Whether a model's cache can be stored in low bits, with SGLang's views of arguments and model stood in for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.sglang_plugin import support
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

Check = Callable[..., None]


def graphs(prefill: str) -> SimpleNamespace:
    """What SGLang makes of its flags for CUDA graphs."""
    return SimpleNamespace(prefill=SimpleNamespace(backend=prefill), decode=SimpleNamespace(backend="full"))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Check:
    """`check_format` of a model and resolved arguments given by name."""
    caplog.set_level("WARNING")  # an engine that ran in this process may have raised it
    override = pytest.importorskip("sglang.srt.arg_groups.model_override_base")
    overrides = pytest.importorskip("sglang.srt.arg_groups.overrides")

    def run(architecture: str = "Qwen3ForCausalLM", bias: bool = False, head_dim: int = 128, **changed: Any) -> None:
        config = {name: changed.pop(name) for name in list(changed) if name in ("quant", "quant_group", "quant_keys")}
        resolved = {
            "attention_backend": "triton",
            "device": "cuda",
            "cuda_graph_config": graphs("disabled"),
            **changed,
        }
        text = SimpleNamespace(attention_bias=bias)
        model = SimpleNamespace(
            head_dim=head_dim, hf_text_config=text, hf_config=SimpleNamespace(architectures=[architecture])
        )
        monkeypatch.setattr(override, "model_config_of", lambda _: model)
        monkeypatch.setattr(overrides, "resolved_view", lambda _: SimpleNamespace(**resolved))
        support.check_format(object(), KVPolicyConfig("full", **{"quant": "int4", **config}))

    return run


def test_what_fits_passes_without_a_word(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    check()
    check(device="cpu", attention_backend="torch_native", cuda_graph_config=None)
    check(quant=None, attention_backend="flashinfer")
    check(quant_keys="int8")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"quant_group": 48}, "kv_quant_group=48 does not fit the model's heads of 128 channels; use 16 or 32 or 64"),
        ({"attention_backend": "fa3"}, "does not work with attention_backend='fa3'; leave it out, or use torch_native"),
        ({"cuda_graph_config": graphs("breakable")}, "set disable_prefill_cuda_graph"),
        ({"cuda_graph_config": graphs("full")}, "and no cuda_graph_backend_prefill or cuda_graph_config against it."),
    ],
)
def test_what_cannot_work_is_refused(check: Check, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KVPolicyError) as refused:
        check(**changed)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("model", "warned"),
    [({"bias": True}, True), ({"architecture": "Qwen2ForCausalLM"}, True), ({}, False)],
    ids=["a bias by its configuration", "Qwen2", "no bias"],
)
def test_low_bit_keys_of_a_model_with_a_bias_are_warned_of(
    check: Check, caplog: pytest.LogCaptureFixture, model: dict[str, Any], warned: bool
) -> None:
    check(quant_keys="int8", **model)
    assert ("adds a bias to its keys" in caplog.text) == warned
    caplog.clear()
    check(**model)
    assert caplog.text == ""
