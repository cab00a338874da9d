"""TriAttention refuses to work without statistics of the model that is served, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.policies.base import ModelShape
from kvpolicy.policies.triattention import TriAttention
from tests.policies.statistics_file import random_statistics, statistics_file


@pytest.fixture
def stats(tmp_path: Path) -> str:
    return statistics_file(tmp_path, random_statistics(3, 2, 3, 16))


def test_statistics_are_required_and_must_be_readable(tmp_path: Path, stats: str) -> None:
    how = "make one with: kvpolicy calibrate --model MODEL --out FILE"
    with pytest.raises(ValueError, match=f"^triattention needs stats:FILE, statistics of the model's queries; {how}$"):
        TriAttention().check(100, 8)
    with pytest.raises(
        ValueError, match=f"^triattention needs stats:FILE, but .*/no cannot be read: No such .*; {how}$"
    ):
        TriAttention(stats=str(tmp_path / "no")).check(100, 8)
    (tmp_path / "text").write_text("a text")
    with pytest.raises(
        ValueError, match=f"^triattention needs stats:FILE, but .*/text is no safetensors file: .*; {how}$"
    ):
        TriAttention(stats=str(tmp_path / "text")).check(100, 8)
    TriAttention(stats=stats).check(1, 8)
    with pytest.raises(ValueError, match="kv_budget=8 leaves nothing to choose: triattention always keeps 8 tokens"):
        TriAttention(stats=stats, recent=None).check(8, 8)


MODEL = ModelShape(3, 6, 2, 16, 10000.0)


@pytest.mark.parametrize(
    "wrong",
    [{"layers": 4}, {"query_heads": 12}, {"kv_heads": 3}, {"head_dim": 32}, {"rope_theta": 1e6}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_statistics_of_another_model_are_refused(wrong: dict[str, float], stats: str) -> None:
    TriAttention(stats=stats).fit(MODEL)
    TriAttention(stats=stats).fit(MODEL._replace(rope_theta=10000.0001))
    with pytest.raises(
        ValueError, match=r"^stats:.* is of org/model with 3 layers of 6 query and 2 KV heads, head_dim 16, "
    ):
        TriAttention(stats=stats).fit(MODEL._replace(**wrong))  # type: ignore[arg-type]
