"""Partial attention where it meets SGLang: the loaded model, the function it stands around, the plain backend."""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpolicy.policies.seerattention_r import SeerAttentionR
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.partial_attention import PartialAttention, rotary_of
from tests.policies.gate_files import random_state, write_folder
from tests.sglang_plugin.reading_engine import (
    FULL,
    GROUP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    QUEST,
    Engine,
    check_quest,
    full_attention,
    layer,
)

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def rotary_module(width: int = HEAD_DIM) -> torch.nn.Module:
    module: Any = torch.nn.Module()
    module.register_buffer("cos_sin_cache", torch.zeros(5, width))
    module.is_neox_style = True
    return module


def test_the_rotary_embedding_is_the_one_that_all_layers_share() -> None:
    shared = rotary_module()
    model = torch.nn.Sequential(torch.nn.Sequential(shared), torch.nn.Sequential(torch.nn.Linear(2, 2), shared))
    rotary = rotary_of(model)
    assert rotary is not None
    assert not rotary.interleaved
    shared.cos_sin_cache = torch.ones(9, HEAD_DIM)  # SGLang replaces it, in another precision or longer
    assert rotary.table().shape == (9, HEAD_DIM)
    assert rotary_of(torch.nn.Sequential(rotary_module(), rotary_module())) is None
    assert rotary_of(torch.nn.Linear(2, 2)) is None


def loaded_model() -> torch.nn.Module:
    """What is read of a model: its attention layers and their rotary embedding."""
    attention = pytest.importorskip("sglang.srt.layers.radix_attention").RadixAttention
    layers = [attention(HEADS, HEAD_DIM, 0.4, KV_HEADS, number) for number in range(LAYERS)]
    return torch.nn.Sequential(rotary_module(), *layers)


def test_a_loaded_model_gives_the_policies_what_they_need(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_state(range(LAYERS), 2 * KV_HEADS, GROUP, HEAD_DIM))
    gated = SeerAttentionR(gates=folder, block=4)
    pools: Any = Engine(QUEST).pools
    partial = PartialAttention.of_model([QUEST, gated, FULL], lambda req: req.settings, pools, loaded_model(), KV_HEADS)
    assert partial._readers.keys() == {QUEST, gated}
    gates = partial._readers[gated].gates  # type: ignore[attr-defined]
    state = random_state(range(LAYERS), 2 * KV_HEADS, GROUP, HEAD_DIM)
    whole = state["model.layers.3.self_attn.attn_gate.attngate_linear_q.weight"]
    assert torch.equal(gates[3].query, whole[KV_HEADS:]), "those of this rank's KV heads"


def test_a_model_that_gates_do_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    gated = SeerAttentionR(gates=write_folder(tmp_path, random_state(range(2), KV_HEADS, GROUP, HEAD_DIM)), block=4)
    pools: Any = Engine(QUEST).pools
    with pytest.raises(KVPolicyError, match=r"lack model.layers.2.self_attn.*name gates of this model\.$"):
        PartialAttention.of_model([gated], lambda req: req.settings, pools, loaded_model(), 0)


def test_the_hook_takes_what_sglang_calls_attention_with() -> None:
    backend = pytest.importorskip("sglang.srt.layers.attention.base_attn_backend").AttentionBackend
    own = inspect.signature(inspect.unwrap(backend.forward)).parameters
    ours = list(inspect.signature(PartialAttention.around).parameters)
    assert ours[3:] == [name for name in own if name != "self"]


@pytest.mark.parametrize(
    "path",
    [
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        "kvpolicy.sglang_plugin.cpu_attention.CPUAttentionBackend",
    ],
    ids=["torch_native", "kvp_cpu"],
)
def test_a_backend_of_the_cpu_works_on_a_part_of_its_batch(path: str) -> None:
    """The real backend in place of the stand-in, on the same pools."""
    pytest.importorskip("sglang")
    kind = pkgutil.resolve_name(path)
    base = pytest.importorskip("sglang.srt.layers.attention.base_attn_backend").AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine = Engine(QUEST)
    pool = SimpleNamespace(
        get_key_buffer=lambda number: engine.pools.keys[number],
        get_value_buffer=lambda number: engine.pools.values[number],
        set_kv_buffer=lambda layer, where, k, v: engine.pools.set_kv_buffer(layer, where.loc, k, v),
    )
    rows = SimpleNamespace(req_to_token=engine.pools.table)
    backend = kind(SimpleNamespace(device="cpu", req_to_token_pool=rows, token_to_kv_pool=pool))
    reqs = [engine.request(1, QUEST, 30), engine.request(2, FULL, 9), engine.request(3, QUEST, 8)]
    batch = engine.batch(reqs)
    batch.forward_mode, batch.encoder_lens, batch.encoder_out_cache_loc = ForwardMode.DECODE, None, None
    engine.partial.plan(batch, reqs)
    new = engine.draw(2, LAYERS, 3, KV_HEADS, HEAD_DIM)
    for i, req in enumerate(reqs):
        req.keys, req.values = (torch.cat([t, new[n, :, i, None]], 1) for n, t in enumerate((req.keys, req.values)))
    for number in range(LAYERS):
        attention = layer(number)
        attention.is_cross_attention, attention.sliding_window_size, attention.attn_type = False, -1, "decoder"
        attention.tp_k_head_num = KV_HEADS
        q = engine.draw(3, HEADS, HEAD_DIM)
        output = engine.partial.around(
            base.forward, backend, q.flatten(1), new[0, number], new[1, number], attention, batch
        )
        for i, req in enumerate(reqs):
            of_request = output[i].view(HEADS, HEAD_DIM)
            if req.settings.arm.policy is QUEST:
                check_quest(req, number, q[i], of_request)
            else:
                torch.testing.assert_close(of_request, full_attention(q[i], req.keys[number], req.values[number]))
