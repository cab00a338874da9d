"""`kvpolicy epikv-bands` on a tiny random model, against loops over tokens and layers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy.cli import main
from kvpolicy.policies.epikv import EpiKV
from kvpolicy.policies.options import build, parse_options
from kvpolicy.reports.epikv import bands_command as epikv_bands_command
from kvpolicy.reports.epikv.occlusion import BandsError, decoder_layers, hidden_changes, importances, load
from tests.engine.harness import tiny_qwen3

TEXT = "A text is read twice, once as it is and once without one of its words."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 4 layers whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder / "words")
    return tiny_qwen3(folder / "model", folder / "words")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load(str(checkpoint), "float32")[0]


@pytest.fixture(scope="module")
def ids(model: Any) -> torch.Tensor:
    return torch.randint(250, (40,), generator=torch.Generator().manual_seed(0)).to(model.device)


@torch.inference_mode()
def importance_by_loops(model: Any, ids: torch.Tensor, token: int, horizon: int | None) -> float:
    """One full run with a matrix that says who sees whom, all distributions, one divergence after another."""
    length = len(ids)
    sees = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    both = []
    for hidden in (False, True):
        sees[token + 1 :, token] = not hidden
        places = torch.arange(length, device=ids.device)[None]
        output = model(input_ids=ids[None], attention_mask=sees[None, None], position_ids=places, use_cache=False)
        both.append(output.logits[0].double().softmax(-1))
    last = length - 1 if horizon is None else min(length - 1, token + horizon)
    found = [float((both[0][i] * (both[0][i] / both[1][i]).log()).sum()) for i in range(token + 1, last + 1)]
    return sum(found) / len(found)


@pytest.mark.parametrize("horizon", [1, 7, 100, None])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_importance_is_that_of_one_occlusion_after_another(
    model: Any, ids: torch.Tensor, batch: int, horizon: int | None
) -> None:
    positions, done = [1, 2, 9, 10, 20, 31, 37, 38], []
    found = importances(model, ids, positions, horizon=horizon, batch=batch, advance=done.append)
    expected = [importance_by_loops(model, ids, token, horizon) for token in positions]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=2e-3, abs=1e-6)
    assert min(expected) > 1e-4
    assert sum(done) == len(positions)


def test_positions_are_compared_in_pieces_without_a_seam(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = importances(model, ids, [3, 17, 30], horizon=9, batch=3)
    monkeypatch.setattr("kvpolicy.reports.epikv.occlusion.COMPARED", 4)
    pieces = importances(model, ids, [3, 17, 30], horizon=9, batch=3)
    assert pieces.tolist() == pytest.approx(whole.tolist(), rel=1e-5)


@torch.inference_mode()
def test_hidden_changes_are_those_between_outputs_of_the_layers(
    checkpoint: Path, ids: torch.Tensor, model: Any
) -> None:
    found = hidden_changes(model, ids)
    assert found.shape == (4, 39)
    bare = load(str(checkpoint), "float32")[0]
    bare.model.norm = torch.nn.Identity()  # else the last of `hidden_states` is behind the final norm
    outputs = bare(input_ids=ids[None], output_hidden_states=True).hidden_states[1:]
    for layer, hidden in enumerate(outputs):
        for token in range(1, 40):
            change = float(((hidden[0, token] - hidden[0, token - 1]) ** 2).sum() ** 0.5)
            assert found[layer, token - 1].item() == pytest.approx(change, rel=1e-4)
    assert not any(layer._forward_hooks for layer in decoder_layers(model))


def test_a_model_without_a_list_of_layers_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.config, "num_hidden_layers", 5)
    with pytest.raises(BandsError, match="Qwen3ForCausalLM has no list of 5 decoder layers"):
        decoder_layers(model)


def test_the_folder_holds_labels_correlations_and_the_curve(
    checkpoint: Path, tmp_path: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "deep" / "bands"
    arguments = ["--model", str(checkpoint), "--text", str(tmp_path / "text.txt"), "--out", str(out)]
    assert main(["epikv-bands", *arguments, "--tokens", "20", "--horizon", "5", "--batch", "6"]) == 0
    assert {path.name for path in out.iterdir()} == {"bands.json", "bands.png"}
    assert (out / "bands.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads((out / "bands.json").read_text())
    assert (document["n"], document["text_tokens"], document["horizon"]) == (20, len(TEXT), 5)
    places = [token["position"] for token in document["tokens"]]
    assert (places[0], places[-1], len(set(places))) == (1, len(TEXT) - 2, 20)
    assert {b - a for a, b in itertools.pairwise(places)} <= {3, 4}
    assert [token["text"] for token in document["tokens"]] == [TEXT[place] for place in places]
    ids = torch.tensor(load(str(checkpoint), "float32")[1](TEXT).input_ids, device=model.device)
    changes = hidden_changes(model, ids)
    for token in document["tokens"]:
        expected = importance_by_loops(model, ids, token["position"], 5)
        assert token["importance"] == pytest.approx(expected, rel=2e-3, abs=1e-6)
        assert token["hidden_change"] == pytest.approx(changes[:, token["position"] - 1].tolist(), rel=1e-4)
    assert [layer["layer"] for layer in document["layers"]] == [0, 1, 2, 3]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{checkpoint}: 4 layers, 20 tokens measured, rho ")
    assert printed[1] == document["options"]
    assert document["verdict"] in printed
    policy = build(EpiKV, parse_options(printed[1]))
    assert {band.layers(4)[0] for band in policy.needs(1).hidden_bands} <= {0, 1, 2}
    assert list(out.parent.iterdir()) == [out]


def test_by_default_solved_problems_are_measured_token_by_token(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(checkpoint), "--out", str(tmp_path / "bands"), "--length", "40", "--horizon", "all"]
    assert main(["epikv-bands", *arguments]) == 0
    document = json.loads((tmp_path / "bands" / "bands.json").read_text())
    assert "".join(token["text"] for token in document["tokens"]).startswith("uestion: Janet")
    assert [token["position"] for token in document["tokens"]] == list(range(1, 39))
    assert (document["horizon"], document["text"]) == ("all", "gsm8k_sample")
    assert "sample" not in capsys.readouterr().err


def refused(arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["epikv-bands", *arguments])
    message = str(caught.value.code)
    assert message.startswith("kvpolicy epikv-bands: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "3"], "--tokens must be at least 16, got 3."),
        (["--horizon", "0"], "--horizon must be at least 1, got 0."),
        (["--batch", "0"], "--batch must be at least 1, got 0."),
        (["--length", "17"], "--length must be at least 18, got 17."),
        (["--length", "8193"], "--length 8193 is more than the 8192 tokens"),
        (["--text", "nowhere.txt"], "--text nowhere.txt cannot be read: No such file or directory."),
        (["--model", "no/such-model"], "--model no/such-model cannot be loaded: "),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "long.txt").write_text("x" * 9000)
    usual = ["--model", str(checkpoint), "--text", str(tmp_path / "long.txt"), "--out", str(tmp_path / "bands")]
    assert sentence in refused([*usual, *arguments])
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"short", "has 5 tokens, too few"), (b"\xff\xfe", "not text in UTF-8")]
)
def test_a_text_that_says_too_little_is_refused(
    checkpoint: Path, tmp_path: Path, content: bytes, sentence: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    usual = ["--model", str(checkpoint), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "bands")]
    assert sentence in refused(usual)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_results_are_never_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of mine")
    for out in (tmp_path, tmp_path / "file"):
        assert "exists already; name a new folder." in refused(["--model", str(checkpoint), "--out", str(out)])
    assert "cannot be written: Not a directory." in refused(["--model", "x", "--out", str(tmp_path / "file" / "out")])
    assert (tmp_path / "file").read_text() == "of mine"


def test_an_empty_folder_is_filled(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(checkpoint), "--out", str(tmp_path), "--length", "20", "--tokens", "16"]
    assert main(["epikv-bands", *arguments]) == 0
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("moved", "sentence"), [(0.0, "does not read its attention mask"), (float("nan"), "not finite in float32")]
)
def test_importances_that_say_nothing_are_refused_and_nothing_is_left(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: float, sentence: str
) -> None:
    def say_nothing(_model: Any, _ids: torch.Tensor, positions: list[int], **_: Any) -> torch.Tensor:
        return torch.full((len(positions),), moved)

    monkeypatch.setattr(epikv_bands_command, "importances", say_nothing)
    assert sentence in refused(["--model", str(checkpoint), "--out", str(tmp_path / "bands"), "--length", "30"])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy.reports.epikv.bands_plot.draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["epikv-bands", "--model", str(checkpoint), "--out", str(tmp_path / "bands"), "--length", "20"])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = epikv_bands_command.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    message = refused(["--model", str(checkpoint), "--out", str(tmp_path / "bands")])
    assert message.endswith("needs matplotlib, which is not installed: pip install matplotlib.")
