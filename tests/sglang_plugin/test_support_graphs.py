"""Policies that graphs would pass by, with SGLang's views of arguments and model stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpolicy.sglang_plugin import support
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

HIDDEN = "past which a captured graph runs; set disable_prefill_cuda_graph, and no cuda_graph_backend_prefill or"
PART = "chooses anew at every layer of every step, which no captured graph does; set disable_decode_cuda_graph"


def check(monkeypatch: pytest.MonkeyPatch, policy: str, prefill: str, decode: str, device: str = "cuda") -> None:
    """`check_policies` of a Qwen3 of 36 layers, under what SGLang made of its flags."""
    override = pytest.importorskip("sglang.srt.arg_groups.model_override_base")
    overrides = pytest.importorskip("sglang.srt.arg_groups.overrides")
    common = pytest.importorskip("sglang.srt.utils.hf_transformers.common")
    phases = {name: SimpleNamespace(backend=backend) for name, backend in (("prefill", prefill), ("decode", decode))}
    resolved = SimpleNamespace(
        device=device,
        tp_size=1,
        enable_torch_compile=False,
        cuda_graph_config=None if device == "cpu" else SimpleNamespace(**phases),
    )
    model = SimpleNamespace(
        num_hidden_layers=36,
        get_total_num_attention_heads=lambda: 32,
        get_total_num_kv_heads=lambda: 8,
        head_dim=128,
        hf_text_config=object(),
    )
    monkeypatch.setattr(override, "model_config_of", lambda _: model)
    monkeypatch.setattr(overrides, "resolved_view", lambda _: resolved)
    monkeypatch.setattr(common, "get_rope_config", lambda _: (1e6, None))
    support.check_policies(object(), KVPolicyConfig(policy, budget=512))


@pytest.mark.parametrize(
    ("policy", "prefill", "decode", "sentence"),
    [
        ("epikv", "breakable", "full", HIDDEN),
        ("vase-dkv|epikv", "full", "disabled", HIDDEN),
        ("quest", "disabled", "full", PART),
        ("full|quest", "disabled", "breakable", PART),
    ],
)
def test_a_captured_phase_is_refused(
    policy: str, prefill: str, decode: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KVPolicyError) as refused:
        check(monkeypatch, policy, prefill, decode)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "prefill", "decode"),
    [
        ("epikv", "disabled", "full"),
        ("quest", "breakable", "disabled"),
        ("vase-dkv|snapkv", "breakable", "full"),
    ],
)
def test_what_no_graph_passes_by_is_accepted(
    policy: str, prefill: str, decode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, policy, prefill, decode)


@pytest.mark.parametrize("policy", ["epikv", "quest"])
def test_a_cpu_captures_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, policy, "breakable", "full", device="cpu")
