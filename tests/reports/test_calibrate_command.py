"""`kvpolicy calibrate` as a user calls it: from a checkpoint and a text to a file that `triattention` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy.cli import main
from kvpolicy.policies.query_statistics import load
from kvpolicy.policies.triattention import TriAttention
from kvpolicy.reports.query_capture import capture
from tests.reports.tiny_checkpoints import checkpoint, decoder

TEXT = "WHAT IS 2 + 2? 2 + 2 = 4.\n" * 20


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "tiny-qwen3", "Qwen3")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def calibrate(*arguments: object) -> int:
    return main(["calibrate", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """What the command says instead, in one sentence, with the exit status of a failure."""
    with pytest.raises(SystemExit) as caught:
        calibrate(*arguments)
    sentence = caught.value.code
    assert isinstance(sentence, str)  # printed to stderr, with status 1
    assert sentence.startswith("kvpolicy calibrate: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence.removeprefix("kvpolicy calibrate: ")


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_the_file_fits_the_model_and_holds_its_queries(
    kind: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    folder, out = checkpoint(tmp_path / "org" / "tiny", kind), tmp_path / "new" / "stats.safetensors"
    assert calibrate("--model", folder, "--text", text, "--out", out, "--tokens", 100, "--window", 30) == 0
    shown = capsys.readouterr().out
    assert f"{out}: 3 layers of 6 query heads, 100 tokens." in shown
    assert f"--kv-policy triattention --kv-options stats:{out}" in shown
    found = load(str(out))
    assert (found.model, found.tokens) == ("tiny", 100)
    policy = TriAttention(stats=str(out))
    policy.check(100, 8)
    policy.fit(found.shape)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"][:100]
    expected = capture(decoder(kind), ids, window=100, name="tiny")
    for name in ("mean_real", "mean_imag", "mean_abs"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_text_is_bundled(qwen3: Path, tmp_path: Path) -> None:
    assert calibrate("--model", qwen3, "--out", tmp_path / "stats", "--window", 100) == 0
    assert load(str(tmp_path / "stats")).tokens == 512  # as many as the model has positions for


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.05)])
def test_the_model_is_run_in_the_precision_asked_for(
    dtype: str, tolerance: float, qwen3: Path, text: Path, tmp_path: Path
) -> None:
    for name, options in (("auto", ()), (dtype, ("--dtype", dtype))):
        calibrate("--model", qwen3, "--text", text, "--out", tmp_path / name, *options)
    ours, theirs = (load(str(tmp_path / name)).mean_abs for name in (dtype, "auto"))
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= tolerance
    assert (error > 1e-5) == (dtype == "bfloat16")


def test_a_file_is_only_replaced_by_force(qwen3: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "stats"
    out.write_text("before")
    assert (
        refused("--model", qwen3, "--text", text, "--out", out) == f"--out {out} is there already; --force replaces it."
    )
    assert out.read_text() == "before"
    assert calibrate("--model", qwen3, "--text", text, "--out", out, "--force") == 0
    assert load(str(out)).tokens > 100


def test_what_cannot_work_is_refused_in_one_sentence(qwen3: Path, text: Path, tmp_path: Path) -> None:
    out, empty, binary = tmp_path / "stats", tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    before = sorted(tmp_path.iterdir())
    model, into = ("--model", qwen3), ("--out", out)
    assert refused(*model, *into, "--text", empty) == f"--text {empty} is empty."
    assert refused(*model, *into, "--text", binary) == f"--text {binary} is not text in UTF-8."
    assert refused(*model, *into, "--text", tmp_path / "no") == (
        f"--text {tmp_path / 'no'} cannot be read: No such file or directory."
    )
    assert refused(*model, "--out", tmp_path) == f"--out {tmp_path} is a folder; it must name a file."
    assert refused(*model, "--out", text / "stats") == f"--out {text / 'stats'} cannot be written: File exists."
    assert refused(*model, *into, "--tokens", 0) == "--tokens must be at least 1, got 0."
    assert refused(*model, *into, "--window", -1) == "--window must be at least 1, got -1."
    assert refused(*model, *into, "--device", "nowhere").startswith("--device nowhere cannot hold the model: ")
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_that_cannot_be_loaded_is_refused_in_one_sentence(text: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    before = sorted(tmp_path.iterdir())
    for model in (tmp_path / "folder", tmp_path / "broken", tmp_path / "no" / "such" / "folder"):
        sentence = refused("--model", model, "--text", text, "--out", tmp_path / "stats")
        assert sentence.startswith(f"--model {model} cannot be loaded: ")
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_with_other_attention_is_refused_and_leaves_no_file(text: Path, tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = checkpoint(tmp_path / "tiny", "Llama", rope_parameters=dynamic)
    sentence = refused("--model", folder, "--text", text, "--out", tmp_path / "stats")
    assert "the first 'dynamic'; there must be one" in sentence
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tiny"]
