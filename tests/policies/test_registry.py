"""Names and import paths of policies, and what an unknown one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicy.policies.base import Policy
from kvpolicy.policies.registry import POLICIES, policy_type

OWN_POLICY = """
from dataclasses import dataclass
from typing import ClassVar
from kvpolicy.policies.base import Policy

@dataclass(frozen=True)
class Newest(Policy):
    name: ClassVar[str] = "newest"

    def select(self, candidates, n_keep, period, noise):
        raise NotImplementedError

not_a_class = 4
"""
LISTED = (
    "full, random, streaming-llm, vase-attnv, vase-dkv, evict-large-range, evict-small-range, snapkv, curdkv, rkv, "
    "h2o, tova, keydiff, lagkv, lagkv-ratio, raas, thinkv, triattention, alpha, epikv, epikv-seg, epikv-lag, quest, "
    "seerattention-r"
)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module outside kvpolicy that holds a policy of its own."""
    name = "kvpolicy_test_own_policy"
    (tmp_path / f"{name}.py").write_text(OWN_POLICY)
    (tmp_path / "kvpolicy_test_broken.py").write_text("import kvpolicy_test_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize("name", POLICIES)
def test_a_registered_name_is_its_class_own_name(name: str) -> None:
    policy = policy_type(name)
    assert issubclass(policy, Policy)
    assert policy.name == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("vase", "vase-dkv"),
        ("vase_dkv", "vase-dkv"),
        ("vase-attn", "vase-attnv"),
        ("streaming_llm", "streaming-llm"),
        ("Random", "random"),
        ("snap-kv", "snapkv"),
        ("evict_large_range", "evict-large-range"),
    ],
)
def test_an_unknown_name_suggests_the_nearest_and_lists_all(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"^kv_policy '{name}' is not known; did you mean '{nearest}'\\?") as caught:
        policy_type(name)
    assert str(caught.value).endswith(f"known: {LISTED}")


def test_a_name_like_no_other_only_lists_all() -> None:
    with pytest.raises(ValueError, match=f"^kv_policy 'zzz' is not known; known: {LISTED}$"):
        policy_type("zzz")


def test_listing_the_names_imports_no_method() -> None:
    code = (
        "import sys; from kvpolicy.policies.registry import POLICIES; list(POLICIES);"
        "print(*sorted(m for m in sys.modules if m.startswith('kvpolicy.policies.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kvpolicy.policies.base", "kvpolicy.policies.registry"]


def test_an_import_path_finds_a_policy_outside_the_package(own_module: str) -> None:
    policy = policy_type(f"{own_module}:Newest")
    assert policy.__module__ == own_module
    assert policy.name == "newest"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        pytest.param("kvpolicy_test_not_there:Newest", "could not be imported: No module named", id="no module"),
        pytest.param("{own}:Oldest", "could not be imported: module .* has no attribute 'Oldest'", id="no attribute"),
        pytest.param("{own}:", "could not be imported: ", id="no class name"),
        pytest.param(":Newest", "could not be imported: Empty module name", id="no module name"),
        pytest.param("kvpolicy_test_broken:Newest", "could not be imported: No module named", id="a failing import"),
        pytest.param("{own}:not_a_class", "is not a subclass of kvpolicy.policies.base.Policy", id="no class"),
        pytest.param("pathlib:Path", "is not a subclass of kvpolicy.policies.base.Policy", id="another class"),
    ],
)
def test_a_wrong_import_path_says_what_is_wrong(own_module: str, path: str, sentence: str) -> None:
    path = path.format(own=own_module)
    with pytest.raises(ValueError, match=f"^kv_policy '{path}' {sentence}"):
        policy_type(path)
