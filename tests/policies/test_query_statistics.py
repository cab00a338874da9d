"""The file of query statistics: what is written is read, and what is not such a file is refused with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvpolicy import __version__
from kvpolicy.policies import query_statistics
from kvpolicy.policies.base import ModelShape
from kvpolicy.policies.query_statistics import FORMAT, QueryStatistics, load, replacing, serialized, write
from tests.policies.statistics_file import random_statistics, statistics_file

TENSORS = ("mean_real", "mean_imag", "mean_abs", "inv_freq")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = random_statistics(3, 2, 4, 60, theta=1e6, scaling=1.25)
    read = load(statistics_file(tmp_path, written))
    for name in TENSORS:
        assert getattr(read, name).dtype == torch.float64
        assert torch.equal(getattr(read, name), getattr(written, name).double())
    assert read.shape == written.shape == ModelShape(3, 8, 2, 60, 1e6)
    assert (read.attention_scaling, read.model, read.tokens) == (1.25, "org/model", 123)


def test_the_file_says_in_words_what_it_is(tmp_path: Path) -> None:
    with safe_open(statistics_file(tmp_path, random_statistics(3, 2, 4, 60)), framework="pt") as file:
        assert file.metadata() == {
            "format": FORMAT,
            "kvpolicy": __version__,
            "model": "org/model",
            "tokens": "123",
            "layers": "3",
            "query_heads": "8",
            "kv_heads": "2",
            "head_dim": "60",
            "rope_theta": "10000.0",
        }


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def counting(*args: object, **kwargs: object) -> object:
        opened.append(args)
        return safe_open(*args, **kwargs)

    monkeypatch.setattr(query_statistics, "safe_open", counting)
    path = statistics_file(tmp_path, random_statistics(1, 1, 1, 4, seed=0))
    first = load(path)
    assert load(path) is first
    assert len(opened) == 1
    write(random_statistics(1, 1, 1, 4, seed=1), Path(path))
    os.utime(path, ns=(1, 1))
    assert not torch.equal(load(path).mean_abs, first.mean_abs)
    assert len(opened) == 2


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.safetensors cannot be read: No such file or directory$"):
        load(str(tmp_path / "nothing.safetensors"))
    with pytest.raises(ValueError, match="is no safetensors file"):
        load(str(tmp_path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    text, weights, empty = tmp_path / "text", tmp_path / "weights", tmp_path / "empty"
    text.write_text("version https://git-lfs.github.com/spec/v1\n")
    empty.touch()
    save_file({"weight": torch.zeros(2)}, weights, {"format": "pt"})
    for path in (text, empty):
        with pytest.raises(ValueError, match=f"{path} is no safetensors file"):
            load(str(path))
    with pytest.raises(
        ValueError, match=f"{weights} holds no query statistics of kvpolicy: format 'pt', not '{FORMAT}'"
    ):
        load(str(weights))


def without(statistics: QueryStatistics) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors = {name: getattr(statistics, name) for name in TENSORS}
    tensors["attention_scaling"] = torch.tensor(1.0, dtype=torch.float64)
    told = {"format": FORMAT, "kv_heads": "1", "rope_theta": "10000.0", "model": "m", "tokens": "1"}
    return {name: x.float().contiguous() for name, x in tensors.items()}, told


Change = Callable[[dict[str, torch.Tensor], dict[str, str]], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(lambda x, told: x.pop("mean_abs"), "holds no query statistics", id="a tensor is missing"),
        pytest.param(lambda x, told: told.pop("kv_heads"), "is damaged: 'kv_heads'", id="the number of KV heads"),
        pytest.param(lambda x, told: told.update(tokens="many"), "is damaged: invalid literal", id="no number"),
        pytest.param(lambda x, told: told.update(format="another"), "format 'another', not", id="another format"),
        pytest.param(
            lambda x, told: x.update(attention_scaling=torch.ones(2)), "is damaged: .* Scalar", id="two scalings"
        ),
    ],
)
def test_a_file_that_lacks_something_is_refused(change: Change, reason: str, tmp_path: Path) -> None:
    tensors, told = without(random_statistics(2, 1, 1, 8))
    save_file(tensors, tmp_path / "sound", told)
    assert load(str(tmp_path / "sound")).shape.layers == 2
    change(tensors, told)
    save_file(tensors, tmp_path / "file", told)
    with pytest.raises(ValueError, match=f"file .*{reason}"):
        load(str(tmp_path / "file"))


SOUND = random_statistics(2, 2, 3, 8)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        pytest.param({"mean_real": SOUND.mean_real[:1]}, "the shapes of its tensors", id="layers"),
        pytest.param({"inv_freq": SOUND.inv_freq[:3]}, "the shapes of its tensors", id="frequencies"),
        pytest.param({"kv_heads": 4}, "6 query heads do not share 4 KV heads evenly", id="KV heads"),
        pytest.param({"kv_heads": 0}, "6 query heads do not share 0 KV heads evenly", id="no KV heads"),
        pytest.param({"mean_imag": SOUND.mean_imag * torch.nan}, "infinities or NaN", id="NaN"),
        pytest.param({"mean_abs": SOUND.mean_abs / 10}, "longer than the mean length", id="triangle inequality"),
        pytest.param({"attention_scaling": 0.0}, "attention_scaling is 0.0", id="no scaling"),
    ],
)
def test_statistics_that_no_model_can_have_are_not_written(
    wrong: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        write(replace(SOUND, **wrong), tmp_path / "stats")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert serialized(SOUND)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "stats"
    path.write_text("before")
    with pytest.raises(KeyError), replacing(path) as file:  # noqa: PT012
        file.write(b"half")
        assert path.read_text() == "before"
        raise KeyError
    assert path.read_text() == "before"
    with replacing(path) as file:
        file.write(b"after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to_is_noticed_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"), replacing(tmp_path / "file" / "stats"):
        raise AssertionError("the body must not run")
