"""Gates of SeerAttention-R from files: what is found, and the sentence where something is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from kvpolicy.policies.attn_gates import WEIGHTS, check_shapes, load_gates
from tests.policies.gate_files import random_state, write_folder

STATE = random_state(range(3), 2, 4, 6)
PUBLISHED = {
    "seerattn_gate_block_size": 64,
    "seerattn_q_head_pooling_type": "Qproj",
    "seerattn_k_seq_pooling_type": "Kmaxminavg",
    "seerattn_use_qk_norm": True,
    "seerattn_use_rope": True,
    "model_type": "qwen3",
}


def is_state(gates: dict[int, Any], layers: range = range(3)) -> bool:
    assert list(gates) == list(layers)
    return all(
        torch.equal(getattr(gate, field), STATE[f"model.layers.{layer}.self_attn.attn_gate.attngate_{name}.weight"])
        for layer, gate in gates.items()
        for field, name in (("query", "linear_q"), ("key", "linear_k"), ("query_norm", "qnorm"), ("key_norm", "knorm"))
    )


@pytest.mark.parametrize("form", ["pth", "safetensors", "shards"])
def test_a_folder_gives_the_gates_of_each_layer(form: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, STATE, form=form, config=PUBLISHED)
    assert is_state(load_gates(folder, range(3), 64))
    assert is_state(load_gates(folder, range(1, 3), 64), range(1, 3))


@pytest.mark.parametrize("file", [WEIGHTS, "gates-0.safetensors"])
def test_so_does_a_file(file: str, tmp_path: Path) -> None:
    write_folder(tmp_path, STATE, form="pth" if file == WEIGHTS else "safetensors")
    assert is_state(load_gates(str(tmp_path / file), range(3), 64))


def test_names_without_the_model_prefix_and_other_tensors_do_not_matter(tmp_path: Path) -> None:
    state = {name.removeprefix("model."): tensor for name, tensor in STATE.items()}
    state["lm_head.weight"] = state["layers.0.mlp.up_proj.weight"] = torch.zeros(2)
    assert is_state(load_gates(write_folder(tmp_path, state), range(3), 64))


def test_gates_in_half_precision_become_fp32(tmp_path: Path) -> None:
    state = random_state(range(1), 2, 4, 6, dtype=torch.bfloat16)
    gate = load_gates(write_folder(tmp_path, state), range(1), 64)[0]
    assert {tensor.dtype for tensor in (gate.query, gate.key, gate.query_norm, gate.key_norm)} == {torch.float32}


def test_a_repository_is_downloaded_with_nothing_but_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return write_folder(tmp_path, STATE)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert is_state(load_gates("SeerAttention/Some-AttnGates", range(3), 64))
    assert asked == [("SeerAttention/Some-AttnGates", [WEIGHTS, "*.safetensors", "config.json"])]


def test_a_name_that_nobody_knows_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand many details")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ValueError, match=r"^the gates 'no/where' are neither .*\(no connection\); name a folder"
    ) as refusal:
        load_gates("no/where", range(3), 64)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "a name with spaces", "gates.safetensors"])
def test_a_path_that_is_not_there_and_no_name_of_a_repository_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="are neither a file or folder here nor a repository"):
        load_gates(name, range(3), 64)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    state = {
        name: tensor
        for name, tensor in STATE.items()
        if "layers.1" not in name and "0.self_attn.attn_gate.attngate_k" not in name
    }
    with pytest.raises(ValueError, match="name gates of this model") as refusal:
        load_gates(write_folder(tmp_path, state), range(4), 64)
    message = str(refusal.value)
    assert "lack model.layers.0.self_attn.attn_gate.attngate_knorm.weight, model.layers.1.self_attn" in message
    assert "and 3 more" in message
    assert message.count("attngate_") == 6


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"has neither {WEIGHTS} nor .safetensors files"):
        load_gates(str(tmp_path), range(3), 64)


@pytest.mark.parametrize("name", [WEIGHTS, "gates.safetensors"])
def test_a_file_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("not tensors at all")
    with pytest.raises(ValueError, match=r"holds no tensors by name that could be read"):
        load_gates(str(tmp_path), range(3), 64)


def test_a_list_of_tensors_is_refused(tmp_path: Path) -> None:
    torch.save(3, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"holds no tensors by name"):
        load_gates(str(tmp_path), range(3), 64)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"seerattn_gate_block_size": 32}, r"seerattn_gate_block_size=32, but they are to be used with 64"),
        ({"seerattn_q_head_pooling_type": "Qavgproj"}, "seerattn_q_head_pooling_type='Qavgproj'"),
        ({"seerattn_k_seq_pooling_type": "Kmaxmin"}, "seerattn_k_seq_pooling_type='Kmaxmin'"),
        ({"seerattn_use_qk_norm": False}, "seerattn_use_qk_norm=False"),
        ({"seerattn_use_rope": False}, "seerattn_use_rope=False"),
    ],
)
def test_gates_of_another_form_are_refused(said: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, STATE, config={**PUBLISHED, **said})
    with pytest.raises(ValueError, match=match):
        load_gates(folder, range(3), 64)


@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 2, 6), (2, 4, 8)])
def test_gates_of_another_model_are_refused(shape: tuple[int, int, int], tmp_path: Path) -> None:
    gates = load_gates(write_folder(tmp_path, STATE), range(3), 64)
    check_shapes(gates, 2, 4, 6)
    with pytest.raises(ValueError, match=r"attngate_linear_q.weight of layer 0 is \(2, 4, 6, 6\) in the gates, but"):
        check_shapes(gates, *shape)
