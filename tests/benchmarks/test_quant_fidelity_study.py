"""The formats, prompts and refusals of benchmarks/quant_fidelity.py, before an engine is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import quant_fidelity
from ablation_study import Problem, Refused
from quant_fidelity_study import check_disk, fitted, parse_format, prepare, read


def test_formats_by_name() -> None:
    given = parse_format("range-int4[ group:32; keys:int8;protect:0.1 ]", 64)
    assert given.name == "range-int4[group:32;keys:int8;protect:0.1]"
    assert given.stored is not None
    assert (given.stored.group, given.stored.keys, given.stored.protect) == (32, "int8", 0.1)
    quant = {"kv_quant": "range-int4", "kv_quant_group": "32", "kv_quant_keys": "int8", "kv_protect": "0.1"}
    assert given.arguments == quant
    assert parse_format("full", 64) == ("full", {}, None)
    stored = fitted(parse_format("int4", 64), 48).stored
    assert stored is not None
    assert stored.group == 16
    assert fitted(parse_format("full", 64), 48).stored is None


def test_defaults() -> None:
    args = quant_fidelity.arguments([])
    formats = [parse_format(text, args.period) for text in args.formats]
    assert len({each.name for each in formats}) == 9
    assert (formats[0].stored, args.tokens, args.period, args.prompts, args.memory) == (None, 64, 64, None, 0.1)
    quick = quant_fidelity.arguments(["--quick", "--tokens", "5"])
    assert (quick.formats, quick.prompts, quick.tokens) == (["full", "int8"], 2, 5)
    with pytest.raises(SystemExit, match="0"):
        quant_fidelity.arguments(["--help"])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--prompts", "1"], "--prompts must be at least 2, got 1"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--period", "0"], "--period must be at least 1, got 0"),
        (["--memory", "1"], "--memory must lie between 0 and 1, got 1.0"),
        (["--formats", "int3"], "--formats 'int3': kv_quant='int3' is not a format; use int8"),
        (["--formats", "int4[group:32"], "must end with ']'"),
        (["--formats", "int4[group]"], "options are written"),
        (["--formats", "int4[grup:32]"], "has no option grup; there are group, protect, keys"),
        (["--formats", "int4[group:many]"], "kv_quant_group must be a whole number, got 'many'"),
        (["--formats", "int4[protect:0.1]"], "kv_protect would have no effect"),
        (["--formats", "full[keys:int8]"], "would have no effect without kv_quant"),
        (["--formats", "int4", " int4"], "--formats names one of them twice: int4 int4"),
        (["--prompts", "25"], "--prompts 25 is too many, there are 24 problems"),
        (["--model", "no-model"], "is neither a checkpoint folder nor a model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_run_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], sentence: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("KVPOLICY_DATA", raising=False)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a model was built first"))
    out = tmp_path / "rows.jsonl"
    with pytest.raises(Refused) as refused:
        prepare(quant_fidelity.arguments([*argv, "--out", str(out)]))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not out.exists()


def test_a_group_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(Refused, match=r"^--formats 'int4\[group:64\]': kv_quant_group=64 does not fit .* of 48 chan"):
        fitted(parse_format("int4[group:64]", 64), 48)


@pytest.mark.parametrize("text", ["no JSON\n", "[]\n", '{"arm": "stock"}\n'])
def test_rows_are_not_added_to_another_file(tmp_path: Path, text: str) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text(text)
    with pytest.raises(SystemExit, match=r"quant_fidelity: --out .* name another file\."):
        quant_fidelity.main(["--out", str(out)])
    assert out.read_text() == text


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there", 1)
    with pytest.raises(Refused, match=r"take 1048576\.0 GiB beside --out"):
        check_disk(tmp_path / "not" / "there", 2**50)


def test_problems_of_the_sample_come_first_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    with pytest.raises(Refused, match=r"holds no file gsm8k\.jsonl; put it there, or unset KVPOLICY_DATA"):
        read(2)
    monkeypatch.delenv("KVPOLICY_DATA")
    sample = read(None)
    assert [problem.id for problem in sample] == [f"gsm8k-test-{number}" for number in range(24)]
    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    rows = [{"question": f" {sample[3].question}\n", "answer": "#### 1"}]
    rows += [{"question": f"{number} + 1?", "answer": f"so #### {number + 1}"} for number in range(60)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(None) == [*sample, *(Problem(f"gsm8k-test-{n + 1}", f"{n} + 1?", str(n + 1)) for n in range(40))]
    assert len(read(84)) == 84
    with pytest.raises(Refused, match="--prompts 85 is too many, there are 84 problems"):
        read(85)
    (tmp_path / "gsm8k.jsonl").write_text("{}\n")
    with pytest.raises(Refused, match="has no problem or question"):
        read(2)
