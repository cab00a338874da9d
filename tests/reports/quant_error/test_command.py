"""`kvpolicy quant-error` as a user calls it: from a checkpoint and a text to a page and its numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvpolicy.cli import main
from kvpolicy.quant.codecs import codec
from kvpolicy.quant.mixed import MixedPrecision
from kvpolicy.reports.quant_error import command as quant_error_command
from kvpolicy.reports.quant_error.text import SAMPLE_SOURCE, read_text
from tests.reports.tiny_checkpoints import checkpoint

TEXT = "WHAT IS 17 + 25? 7 + 5 = 12, WRITE 2, CARRY 1; 1 + 2 + 1 = 4: 42.\n" * 10
TOKENS = 150
OPTIONS = ("--codecs", "int2-g16", "--keys-codecs", "int4-gD,int8-g16", "--share", 0.1, "--tokens", TOKENS)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six query and two KV heads of 16 in a hidden size of 48."""
    return checkpoint(tmp_path_factory.mktemp("models") / "tiny-qwen3", "Qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "sums.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def quant_error(*arguments: object) -> int:
    return main(["quant-error", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """What the command says instead, in one sentence, with the exit status of a failure."""
    with pytest.raises(SystemExit) as caught:
        quant_error(*arguments)
    sentence = caught.value.code
    assert isinstance(sentence, str)  # printed to stderr, with status 1
    assert sentence.startswith("kvpolicy quant-error: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence.removeprefix("kvpolicy quant-error: ").removesuffix(".")


class RestoringCache(DynamicCache):
    """Hands attention what a 16-bit cache, or a store of fewer bits, would: no code of the report's is on this way."""

    def __init__(self, keys: MixedPrecision, values: MixedPrecision) -> None:
        super().__init__()
        self.stores = keys, values

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        rows = [
            store.round_trip(x.bfloat16()).float()
            for store, x in zip(self.stores, (key_states, value_states), strict=True)
        ]
        return super().update(*rows, layer_idx, *args, **kwargs)


def log_probabilities(model: Path, keys: MixedPrecision, values: MixedPrecision) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 ``[T - 1, V]`` of the next token, and the next tokens."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"][:TOKENS])
    with torch.inference_mode():
        logits = loaded(input_ids=ids[None], past_key_values=RestoringCache(keys, values), use_cache=True).logits[0]
    return logits[:-1].double().log_softmax(dim=-1), ids[1:]


@pytest.fixture(scope="module")
def written(qwen3: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reports") / "new" / "report"
    assert quant_error("--model", qwen3, "--text", text, "-o", out, *OPTIONS) == 0
    return out


@pytest.fixture(scope="module")
def numbers(written: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((written / "report.json").read_text(encoding="utf-8"))
    return loaded


def test_the_folder_holds_a_page_and_its_numbers_and_nothing_lies_beside_it(
    written: Path, numbers: dict[str, Any]
) -> None:
    assert sorted(path.name for path in written.iterdir()) == ["index.html", "report.json"]
    assert list(written.parent.iterdir()) == [written]
    assert (numbers["model"], numbers["text"], numbers["tokens"]) == ("tiny-qwen3", "sums.txt", TOKENS)
    assert (numbers["layers"], numbers["kv_heads"], numbers["head_dim"]) == (3, 2, 16)
    assert (numbers["dtype"], numbers["cache_dtype"]) == ("float32", "bfloat16")
    shown = (written / "index.html").read_text(encoding="utf-8")
    assert all(name in shown for name in ("tiny-qwen3", "sums.txt", "int2-g16 oracle 10%", "keys int4-gD"))


@pytest.mark.parametrize(
    ("arm", "keys", "values", "selector"),
    [
        ("int2-g16", "none", "int2-g16", "none"),
        ("int2-g16 l2 10%", "none", "int2-g16", "l2"),
        ("int2-g16 range 10%", "none", "int2-g16", "range"),
        ("int2-g16 oracle 10%", "none", "int2-g16", "oracle"),
        ("int4-g16", "none", "int4-g16", "none"),  # the control
        ("keys int4-gD", "int4-gD", "none", "none"),
        ("int2-g16 range 10%, keys int8-g16", "int8-g16", "int2-g16", "range"),
    ],
)
def test_the_output_is_that_of_a_model_with_such_a_cache(
    arm: str, keys: str, values: str, selector: str, qwen3: Path, numbers: dict[str, Any]
) -> None:
    share = 0.0 if selector == "none" else 0.1
    kept = MixedPrecision(codec("none"), 0, "none")
    p, targets = log_probabilities(qwen3, kept, kept)
    store = MixedPrecision(codec(values), share, selector)
    q, _ = log_probabilities(qwen3, MixedPrecision(codec(keys), 0, "none"), store)
    kl = (p.exp() * (p - q)).sum(dim=-1)
    found = numbers["arms"][arm]["output"]
    assert found["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found["kl_p99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-3)
    assert found["top1_flips"] == pytest.approx(float((p.argmax(dim=-1) != q.argmax(dim=-1)).double().mean()), rel=1e-5)
    delta = (p - q).gather(-1, targets[:, None]).mean()
    assert found["nll_delta"] == pytest.approx(float(delta), rel=1e-3, abs=1e-6)
    assert found["kl_mean"] > 1e-6


def test_the_summary_and_the_advice_are_printed(
    qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with no more than the defaults but a short text: what fits heads of 16."""
    monkeypatch.setattr("kvpolicy.reports.quant_error.page.page", lambda report: "the page")
    assert quant_error("--model", qwen3, "-o", tmp_path / "report", "--tokens", 128) == 0
    shown = capsys.readouterr()
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert found["text"] == SAMPLE_SOURCE
    lines = shown.out.splitlines()
    assert "tiny-qwen3, 128 tokens" in lines[0]
    for name in ("int4-g16", "int2-g16 range 5%"):
        (line,) = [line for line in lines if line.strip().startswith(f"{name}  ")]
        output = found["arms"][name]["output"]
        kl, flips = line.split()[-2:]
        assert float(kl) == pytest.approx(output["kl_mean"], abs=1e-5)
        assert flips == f"{output['top1_flips']:.2%}"
    assert any(line.startswith("int4-g16: ") for line in lines)
    assert any(line.strip().startswith("≤ bits: int4-g16") for line in lines)
    assert lines[-1] == f"{tmp_path / 'report'} holds index.html and report.json"
    assert all(len(line) <= 80 for line in lines[:-1])
    assert "output" not in found["arms"]["keys int4-g16"]


def test_two_runs_write_the_same_numbers(
    written: Path, qwen3: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.reports.quant_error.page.page", lambda report: "the page")
    assert quant_error("--model", qwen3, "--text", text, "-o", tmp_path / "report", *OPTIONS) == 0
    assert (tmp_path / "report" / "report.json").read_bytes() == (written / "report.json").read_bytes()


def test_what_cannot_work_is_refused_before_weights_are_loaded(
    qwen3: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were loaded"))
    out, short, binary, held = (tmp_path / name for name in ("report", "short", "binary", "held"))
    short.write_text("TWO WORDS")
    binary.write_bytes(b"\xff\xfe\x00")
    held.mkdir()
    (held / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    model, into = ("--model", qwen3), ("-o", out)
    assert refused(*model, *into, "--text", tmp_path / "no") == (
        f"--text {tmp_path / 'no'} cannot be read: No such file or directory"
    )
    assert refused(*model, *into, "--text", binary) == f"--text {binary} is not text in UTF-8"
    assert refused(*model, *into, "--text", short) == (
        "the text (short) has 9 tokens, too few to say anything of the largest 1%: give at least 128"
    )
    assert "there is no codec 'int3'; use one of none, int2" in refused(*model, *into, "--codecs", "int4,int3")
    assert refused(*model, *into, "--keys-codecs", "int9").startswith("--keys-codecs: there is no codec 'int9'")
    assert refused(*model, *into, "--codecs", "none").startswith("--codecs: the codec none changes nothing")
    assert "a head of 16 channels" in refused(*model, *into, "--codecs", "int4-g32")
    assert refused(*model, *into, "--keys-codecs", "int8").startswith("--keys-codecs int8-g64: ")
    assert refused(*model, "-o", held) == f"--out {held} holds other things, notes.txt for one; name a new folder"
    assert refused(*model, "-o", held, "--force").startswith(f"--out {held} holds other things")
    assert refused(*model, "-o", short) == f"--out {short} is a file; it must name a folder"
    assert refused(*model, *into, "--share", 0) == "--share must be above 0 and at most 0.5, got 0"
    assert refused(*model, *into, "--share", 0.51) == "--share must be above 0 and at most 0.5, got 0.51"
    assert refused(*model, *into, "--share", "nan") == "--share must be above 0 and at most 0.5, got nan"
    assert refused(*model, *into, "--share", 0.007, "--tokens", 128) == "--share 0.007 of 128 tokens protects none"
    assert refused(*model, *into, "--tokens", 127) == "--tokens must be at least 128, got 127"
    assert sorted(tmp_path.rglob("*")) == before


def test_codecs_of_a_package_that_is_missing_are_refused_before_weights_are_loaded(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were loaded"))
    assert "needs bitsandbytes" in refused("--model", qwen3, "-o", tmp_path / "report", "--codecs", "int4-g16,nf4")
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_measured_are_refused_and_leave_nothing(text: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    headless = checkpoint(tmp_path / "headless", "Qwen3")
    before = sorted(tmp_path.iterdir())
    into = ("-o", tmp_path / "report", "--text", text)
    for model in (tmp_path / "folder", tmp_path / "no" / "such" / "folder"):
        assert refused("--model", model, *into).startswith(f"--model {model} cannot be loaded: ")
    # Weights that transformers draws at random would be measured as if they were the model's.
    assert refused("--model", headless, *into) == (
        f"--model {headless} lacks weights of a Qwen3ForCausalLM: lm_head.weight"
    )
    assert refused("--model", headless, *into, "--device", "nowhere")
    assert sorted(tmp_path.iterdir()) == before


def test_a_sliding_window_is_refused_and_leaves_nothing(text: Path, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "mistral", "Mistral", tie_word_embeddings=True, sliding_window=140)
    into = ("-o", tmp_path / "out" / "report", "--text", text, "--codecs", "int4-g16")
    assert "lower --tokens to its window" in refused("--model", model, *into, "--tokens", 150)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_report_is_replaced_by_force(written: Path, qwen3: Path, text: Path) -> None:
    before = (written / "report.json").read_bytes()
    sentence = refused("--model", qwen3, "--text", text, "-o", written)
    assert sentence == f"--out {written} holds a report already; --force replaces it"
    assert (written / "report.json").read_bytes() == before


def test_the_sample_is_mathematics_without_marks_of_a_calculator() -> None:
    found, source = read_text(None)
    assert "MIT" in source
    assert "<<" not in found
    assert len(found.split()) > 1500


def test_help_says_where_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.util.find_spec("kvpolicy.reports.quant_error.command") is not None
    with pytest.raises(SystemExit) as caught:
        quant_error("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"tokens of the text to read, at most ({quant_error_command.TOKENS})" in shown
    assert "index.html" in shown
