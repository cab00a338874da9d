"""benchmarks/eviction_round.py on a small shape: both versions move the same tokens, and rows say what was timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import eviction_round
from eviction_round import PERIOD, Request, in_a_loop, together

from kvpolicy.policies.base import Candidates, Noise, Policy
from kvpolicy.policies.random_eviction import RandomEviction
from kvpolicy.policies.snapkv import SnapKV
from kvpolicy.policies.vase_dkv import VaseDKV
from kvpolicy.sglang_plugin import observation


@pytest.fixture(autouse=True)
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(eviction_round.SHAPES, "small", (3, 2, 16, 4))


def request_of(kept: int) -> Request:
    return Request.random("small", kept, torch.device("cpu"))


@pytest.mark.parametrize("policy", [RandomEviction(), VaseDKV(), SnapKV()], ids=lambda policy: policy.name)
def test_both_versions_leave_the_same_pool(policy: Policy) -> None:
    pools = []
    for version in (together, in_a_loop):
        request = request_of(96)
        torch.manual_seed(1)
        for eviction in range(2):
            request.append()
            version(request, policy, eviction)
        pools.append(torch.stack([torch.stack(buffers) for buffers in request.pool]))
    assert torch.equal(*pools)


def test_layers_are_chosen_from_together_as_far_as_the_plugin_would(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    class Watched(RandomEviction):
        def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
            chosen.append((noise.layers, noise.eviction))
            return super().select(candidates, n_keep, period, noise)

    together(request_of(96), Watched(), 7)
    monkeypatch.setattr(observation, "SCRATCH_BYTES", 2 * (96 + PERIOD) * 2 * 2 * 16 * 2)  # of two layers
    together(request_of(96), Watched(), 8)
    assert chosen == [((0, 1, 2), 7), ((0, 1), 8), ((2,), 8)]


def test_new_tokens_take_the_slots_that_an_eviction_left() -> None:
    request = request_of(96)
    before = torch.stack([torch.stack(buffers) for buffers in request.pool])
    request.append()
    changed = (torch.stack([torch.stack(buffers) for buffers in request.pool]) != before).flatten(3).any(-1)
    assert len(request.row) == 96 + PERIOD
    for of_buffer in changed.flatten(0, 1):
        assert set(of_buffer.nonzero().flatten().tolist()) == set(request.row[96:].tolist())


def test_a_row_for_each_policy_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    eviction_round.main(["--shape", "small", "--tokens", "96", "--rounds", "2", "--policies", "random|vase-dkv"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["policy"], row["layers"]) for row in rows] == [
        ("random", "together"),
        ("random", "in a loop"),
        ("vase-dkv", "together"),
        ("vase-dkv", "in a loop"),
    ]
    for row in rows:
        assert (row["resident"], row["kept"]) == (160, 96)
        assert row["ms_p50"] > 0
        assert row["commit"]


def test_policies_that_read_more_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        eviction_round.main(["--shape", "small", "--policies", "h2o"])
    assert "h2o reads more than keys, values and queries" in capsys.readouterr().err
