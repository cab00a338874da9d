"""The layout that the package rests on: links, no stray `__init__.py`, a complete wheel, who imports whom."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each component with the components that it may import; `kvpolicy` itself is open to all.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "policies": {"kernels"},
    "quant": {"kernels"},
    "sglang_plugin": {"kernels", "policies", "quant"},
    "lmeval_tasks": set(),
    "reports": {"kernels", "policies", "quant", "lmeval_tasks"},
}
# Heavy packages with the components that may import them.
RESERVED = {"sglang": {"sglang_plugin"}, "lm_eval": {"lmeval_tasks", "reports"}}
LINE_LIMIT = 300
components = pytest.mark.parametrize("component", MAY_IMPORT)


def python_files(*folders: str) -> list[Path]:
    """Python files below folders of the repository, generated output and links left out."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path.resolve() == path and "__pycache__" not in path.parts)


def imported_modules(path: Path, package: str) -> Iterator[str]:
    """Dotted names that a file imports, and those of ours that it names in a string, as lazy imports do."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.match(r"kvpolicy\.\w+(\.|:|$)", str(node.value)):
            yield re.split(r"[^\w.]", node.value)[0]


def imports_of(component: str) -> list[tuple[Path, str]]:
    """Every (file, imported module) of a component."""
    found = []
    for path in python_files(component):
        package = ".".join(["kvpolicy", *path.relative_to(ROOT).parent.parts])
        found += [(path.relative_to(ROOT), module) for module in imported_modules(path, package)]
    return found


@components
def test_the_namespace_links_to_the_component_at_the_root(component: str) -> None:
    link = ROOT / "src" / "kvpolicy" / component
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", component)
    assert link.resolve() == ROOT / component
    assert (ROOT / component).is_dir()


@components
def test_a_component_is_no_package_of_its_own(component: str) -> None:
    assert not (ROOT / component / "__init__.py").exists()


def test_no_folder_of_tests_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@components
def test_a_component_does_not_shadow_an_installed_package_of_its_name(component: str, tmp_path: Path) -> None:
    """SGLang does `from kernels import get_kernel`, in the PyPI package of that name, and may run from this folder.

    A stand-in at the very end of the path answers when no such package is installed, so that the check is the same
    with and without it. A component with an `__init__.py` would come first and fail it.
    """
    (tmp_path / component).mkdir()
    (tmp_path / component / "__init__.py").write_text("get_kernel = 'stand-in'\n")
    code = (
        f"import sys; sys.path.insert(0, ''); sys.path.append({str(tmp_path)!r});"
        f"import {component}; {component}.get_kernel; print({component}.__file__)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not Path(found.stdout.strip()).is_relative_to(ROOT / component)


def test_a_wheel_holds_all_code_and_data(tmp_path: Path) -> None:
    tree, wheels = tmp_path / "tree", tmp_path / "wheels"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    for name in ("src", *MAY_IMPORT):  # built in a copy: setuptools leaves folders behind, and reads old ones
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    built = subprocess.run([*pip, "-q", "-w", str(wheels), str(tree)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("sglang_kvpolicy-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = {".py", ".yaml", ".json", ".jsonl"}
    files = [path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    expected = {f"kvpolicy/{path.relative_to(ROOT)}" for path in files}
    expected |= {"kvpolicy/__init__.py", "kvpolicy/cli.py", "kvpolicy/py.typed", "kvpolicy/policies/vase_dkv.py"}
    assert expected - names == set()
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"kvpolicy"}


@components
def test_a_component_imports_only_the_components_it_may(component: str) -> None:
    allowed = MAY_IMPORT[component] | {component}
    wrong = [
        (str(path), module)
        for path, module in imports_of(component)
        for ours, _, name in [module.partition(".")]
        if ours == "kvpolicy" and name.partition(".")[0] in MAY_IMPORT.keys() - allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("package", RESERVED)
def test_a_heavy_package_is_imported_only_where_it_belongs(package: str) -> None:
    others = MAY_IMPORT.keys() - RESERVED[package]
    found = [(str(p), module) for folder in others for p, module in imports_of(folder)]
    assert [pair for pair in found if pair[1].partition(".")[0] == package] == []
    assert any(module.partition(".")[0] == "sglang" for _, module in imports_of("sglang_plugin"))


def test_only_the_command_line_names_the_plugin() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in python_files("src")
        for module in imported_modules(path, "kvpolicy")
        if module.startswith("kvpolicy.sglang_plugin")
    }
    assert found == {"src/kvpolicy/cli.py"}


@pytest.mark.parametrize("module", ["kvpolicy", "kvpolicy.cli"])
def test_importing_the_package_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) & {"torch", "sglang", "lm_eval", "transformers", "numpy"} == set()


def test_no_code_file_is_too_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in python_files(*MAY_IMPORT, "src", "tests", "examples", "benchmarks")
    }
    assert "policies/vase_dkv.py" in lengths
    assert {path: lines for path, lines in lengths.items() if lines > LINE_LIMIT} == {}
