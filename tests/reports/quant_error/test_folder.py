"""A report's folder is there whole or not at all, and takes nothing else's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.reports.quant_error.capture import QuantErrorError
from kvpolicy.reports.quant_error.folder import check_folder, whole_folder


def write(target: Path, force: bool = False, text: str = "new") -> None:
    with whole_folder(target, force) as folder:
        (folder / "index.html").write_text(text)
        (folder / "report.json").write_text(text)


def test_a_new_and_an_empty_folder_are_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "a" / "new", tmp_path / "empty"):
        check_folder(target, False)
        write(target)
        assert sorted(path.name for path in target.iterdir()) == ["index.html", "report.json"]
        assert [path.name for path in target.parent.iterdir() if path.name.startswith(".")] == []


def test_a_report_is_replaced_by_force_alone(tmp_path: Path) -> None:
    target = tmp_path / "report"
    write(target, text="old")
    with pytest.raises(QuantErrorError, match="holds a report already; --force replaces it"):
        write(target)
    assert (target / "index.html").read_text() == "old"
    write(target, force=True)
    assert (target / "report.json").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_no_report_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "notes"
    write(target)
    (target / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(QuantErrorError, match=r"holds other things, notes\.txt for one"):
            check_folder(target, force)
        with pytest.raises(QuantErrorError, match="holds other things"):
            write(target, force)
    assert (target / "notes.txt").read_text() == "mine"
    with pytest.raises(QuantErrorError, match="is a file"):
        check_folder(target / "notes.txt", True)
    with pytest.raises(QuantErrorError, match=r"cannot be written: (File exists|Not a directory)"):
        write(target / "notes.txt" / "report")
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_is_left_of_a_report_that_failed(tmp_path: Path) -> None:
    target = tmp_path / "report"
    write(target, text="old")

    def fail() -> None:
        with whole_folder(target, True) as folder:
            (folder / "index.html").write_text("half")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert (target / "index.html").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_comes_into_the_folder_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "report"

    def come_between() -> None:
        with whole_folder(target, False):
            target.mkdir()
            (target / "notes.txt").write_text("mine")

    with pytest.raises(QuantErrorError, match="holds other things"):
        come_between()
    assert [path.name for path in target.iterdir()] == ["notes.txt"]
    assert list(tmp_path.iterdir()) == [target]
