"""`kvpolicy survivors`: what its figures draw, what its page holds, and what it refuses."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvpolicy.cli import main
from kvpolicy.reports.survivors import figures
from kvpolicy.reports.survivors.page import frames_of, token_texts
from kvpolicy.reports.trace_file import load_trace
from kvpolicy.sglang_plugin.trace import Trace
from tests.reports.traces import simulate

PNG = b"\x89PNG"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return simulate(3, 2, 3, 40).write(tmp_path)


def drawn(draw: object, *arguments: object) -> np.ma.MaskedArray[tuple[int, ...], np.dtype[np.float64]]:
    """The matrix that a figure shows as an image."""
    axes = Figure().subplots()
    draw(axes, *arguments)  # type: ignore[operator]
    (image,) = axes.get_images()
    return np.ma.asarray(image.get_array())


def test_the_map_has_one_row_a_head_and_is_dark_where_it_holds_the_token(path: Path) -> None:
    trace = load_trace(path)
    for eviction in range(trace.evictions):
        shown = drawn(figures.survival_map, trace, eviction)
        assert shown.tolist() == trace.held(eviction).reshape(6, -1).astype(float).tolist()


def test_the_share_of_heads_is_drawn_over_evictions_and_nothing_before_a_token_was_computed(path: Path) -> None:
    trace = load_trace(path)
    shown = drawn(figures.survival_over_evictions, trace)
    assert np.array_equal(shown.filled(np.nan), trace.shares(), equal_nan=True)
    assert np.array_equal(np.ma.getmaskarray(shown), np.isnan(trace.shares()))


def test_value_ranges_are_means_over_heads_and_evictions(path: Path) -> None:
    trace = load_trace(path)
    axes = Figure().subplots()
    figures.value_ranges(axes, trace)
    assert trace.value_range is not None
    for which, line in enumerate(axes.get_lines()):
        middle = np.nanmean(trace.value_range[:, which, :, :, 1], axis=(0, 2))
        np.testing.assert_allclose(line.get_ydata(), middle, rtol=1e-5)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "kept: 50%, band 5% to 95%",
        "evicted: 50%, band 5% to 95%",
    ]


def test_a_trace_without_value_ranges_says_so_in_their_place(tmp_path: Path) -> None:
    axes = Figure().subplots()
    figures.value_ranges(axes, load_trace(simulate(0, 1, 2, 20, ranges=False).write(tmp_path)))
    assert [text.get_text() for text in axes.texts] == [figures.RANGES_MISSING]


@pytest.mark.parametrize("tokens", [1, 799, 800, 801, 2500])
def test_many_positions_are_averaged_into_few_columns(tokens: int) -> None:
    rows = np.random.default_rng(0).random((2, tokens))
    rows[1, tokens // 2 :] = np.nan
    found = figures.averaged(rows)
    columns = min(tokens, figures.COLUMNS)
    assert found.shape == (2, columns)
    for column in range(columns):
        stretch = rows[:, column * tokens // columns : (column + 1) * tokens // columns]
        assert found[0, column] == pytest.approx(stretch[0].mean())
        known = stretch[1][~np.isnan(stretch[1])]
        assert found[1, column] == pytest.approx(known.mean() if len(known) else np.nan, nan_ok=True)


@pytest.mark.parametrize(("evictions", "chosen"), [(1, 0), (2, 0), (12, 5), (300, 299), (300, 7)])
def test_the_slider_stops_at_a_few_evictions_and_at_the_chosen_one(evictions: int, chosen: int) -> None:
    frames = frames_of(evictions, chosen)
    assert frames == sorted(set(frames))
    assert {0, chosen, evictions - 1} <= set(frames) <= set(range(evictions))
    assert len(frames) <= 12


def words(text: str) -> list[tuple[str, str, str]]:
    """Class, title and text of every token of a page."""
    found = re.findall(r'<span class="(\w+)" title="(.*?)">(.*?)</span>', text, flags=re.DOTALL)
    return [(kind, title, html.unescape(shown)) for kind, title, shown in found]


def test_a_page_stands_alone_and_shades_the_text(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = load_trace(path)
    target = tmp_path / "new" / "page.html"
    assert main(["survivors", str(path), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: random[sinks:0], budget 24, period 8: 4 evictions over ")
    text = target.read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', text) == []
    assert "url(" not in text
    assert "http" not in text
    assert text.count("<img") == 4 + 2
    assert text.count(" hidden>") == 3, "one survival map is shown, those of the other evictions wait for the slider"
    shares, spans = trace.shares()[-1], words(text)
    assert [shown for _, _, shown in spans] == [f"{token} " for token in trace.token_ids]
    for position, (kind, title, _) in enumerate(spans):
        if position < len(shares):
            assert title == f"position {position}: held by {shares[position]:.1%} of 6 heads"
            assert (kind == "s0") == (shares[position] == 0)
            assert (kind == "s10") == (shares[position] > 0.9)
        else:
            assert (kind, title) == ("new", f"position {position}: newer than the last eviction")
    assert {kind for kind, _, _ in spans} > {"s0", "new"}
    prompt, answer = text.split('<div class="text answer">')
    assert (len(words(prompt)), len(words(answer))) == (trace.prompt_len, len(spans) - trace.prompt_len)


def test_the_chosen_eviction_is_the_one_that_is_shown(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert main(["survivors", str(path), "-o", str(target), "--eviction", "2"]) == 0
    images = re.findall(r'alt="survival map after eviction (\d)"( hidden)?>', target.read_text(encoding="utf-8"))
    assert images == [("1", " hidden"), ("2", ""), ("3", " hidden"), ("4", " hidden")]
    assert 'max="3" value="1"' in target.read_text(encoding="utf-8")


def test_a_picture_holds_the_three_figures(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "picture.png"
    assert main(["survivors", str(path), "-o", str(target)]) == 0
    assert target.read_bytes().startswith(PNG)


def test_a_text_is_escaped_and_its_line_ends_are_seen(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for transformers, whose tokenizer spells each token as a tag and a line end."""

    def decode(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(f"<b>{token}\n" for token in ids)

    loaded = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(decode=decode) if name == "words" else None)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=loaded))  # type: ignore[arg-type]
    target = tmp_path / "page.html"
    assert main(["survivors", str(path), "-o", str(target), "--tokenizer", "words"]) == 0
    text = target.read_text(encoding="utf-8")
    assert words(text)[0][2] == "<b>1000↵\n"
    assert "<b>" not in text


def test_each_token_is_the_text_that_it_adds() -> None:
    """Bytes as tokens: a character of two or three bytes is the last one's, and a text's first space is not lost."""
    text = " é €x"
    encoded = text.encode()

    def decode(ids: Sequence[int]) -> str:
        found = bytes(ids).decode(errors="replace")
        return found.removeprefix(" ")  # as SentencePiece does

    texts = token_texts(list(encoded), decode)
    assert texts == ["", "", "é", " ", "", "", "€", "x"]


def test_a_trace_without_a_text_has_a_page(tmp_path: Path) -> None:
    simulate(0, 1, 2, 20).trace.write(str(tmp_path), "bare")
    target = tmp_path / "page.html"
    assert main(["survivors", str(tmp_path / "bare.npz"), "-o", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert "The trace holds no token ids." in text
    assert "policy not recorded: 4 evictions" in text


def test_a_long_trace_of_many_evictions_is_drawn(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    path = simulate(1, 3, 2, 3000, evictions=40).write(tmp_path)
    assert main(["survivors", str(path), "-o", str(target)]) == 0
    assert target.read_text(encoding="utf-8").count("<img") == 12 - 1 + 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{path}", "-o", "x.pdf"], "-o x.pdf must end in .html or .png."),
        (["{path}", "--eviction", "0"], "--eviction must be between 1 and 4, got 0."),
        (["{path}", "--eviction", "5"], "--eviction must be between 1 and 4, got 5."),
        (["{folder}/empty.npz"], "{folder}/empty.npz holds no evictions: the request never outgrew its budget."),
        (["{folder}/not_there.npz"], "{folder}/not_there.npz does not exist."),
        (["{folder}"], "{folder} is a folder; name one of the .npz files in it."),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_sentence(
    path: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    Trace(5, 1, 1).write(str(tmp_path), "empty")
    filled = [argument.format(path=path, folder=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit) as caught:
        main(["survivors", *filled])
    assert str(caught.value) == f"kvpolicy survivors: {sentence.format(folder=tmp_path)}"


def test_a_tokenizer_that_is_not_there_is_refused_with_a_sentence(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match=r"^kvpolicy survivors: --tokenizer .*/nothing could not be loaded: .+$"):
        main(["survivors", str(path), "-o", str(tmp_path / "x.html"), "--tokenizer", str(tmp_path / "nothing")])


def test_help_says_how_a_trace_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["survivors", "--help"])
    shown = capsys.readouterr().out
    assert "--kv-trace out/trace" in shown
    assert "kvpolicy survivors out/trace/REQUEST_ID.npz -o survivors.html" in shown
