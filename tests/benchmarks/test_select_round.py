"""benchmarks/select_round.py on a small shape: what is measured, and what the rows and the table say of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import select_round
from select_request import Request
from select_round import MOST, QUICK, SLOW, YARDSTICK, methods, summary, table

from kvpolicy.policies.registry import POLICIES

# Methods that never evict, and one that waits for two partitions of 1024 tokens.
NOT_EVICTING, NOT_YET = {"full", "quest", "seerattention-r"}, {"lagkv-ratio"}


@pytest.fixture
def request_of_quick() -> Request:
    return Request(QUICK, 320 + 64, 64, torch.device("cpu"))


def test_every_evicting_method_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "rows.jsonl"
    try:
        select_round.main(["--quick", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["policy"] for row in rows} == set(POLICIES) - NOT_EVICTING - NOT_YET
    assert len(rows) == len(POLICIES) - 4
    shown = capsys.readouterr().out
    for row in rows:
        assert (row["resident"], row["period"], row["rounds"]) == (384, 64, 2)
        assert row["keys"] == "alike"
        assert 0 < row["kept"] <= 384
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["commit"]
        assert row["device"].endswith("1 threads")
        assert row["policy"] in shown
    assert [row["of_yardstick"] for row in rows if row["policy"] == YARDSTICK] == [1.0]


def test_a_slow_method_is_marked_with_its_reason(request_of_quick: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLOW, "rkv", "because")
    times = {"rkv": 12.0, "tova": 12.0, "h2o": 10.0}
    rows = [summary(name, [ms], 320, 2.0, request_of_quick) for name, ms in times.items()]
    assert [row.note for row in rows] == ["over 5 times: because", "over 5 times: NO REASON KNOWN", ""]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table(rows))
    assert "* rkv: over 5 times: because" in shown.get()
    assert "* tova: over 5 times: NO REASON KNOWN" in shown.get()
    assert "* h2o" not in shown.get()


def test_only_known_methods_are_excused() -> None:
    assert set(SLOW) <= set(POLICIES) - NOT_EVICTING
    assert MOST == 5


def test_a_request_is_what_the_contract_says(request_of_quick: Request, tmp_path: Path) -> None:
    for name, policy in methods(request_of_quick, 320, tuple(POLICIES), tmp_path).items():
        needs, layers = policy.needs(64), 0
        statistic = request_of_quick.statistic(policy)
        assert (statistic is not None) == policy.accumulates, name
        for candidates, noise in request_of_quick.chunks(policy, 0, statistic):
            assert len(noise.layers) == candidates.shape[0]
            layers += candidates.shape[0]
            for tensor, needed in [(candidates.keys, needs.keys), (candidates.values, needs.values)]:
                assert (tensor is not None) == needed
                if tensor is not None:
                    assert tensor.shape == (*candidates.shape, QUICK.head_dim)
            if needs.queries:
                queries = candidates.require("queries")
                query_heads = QUICK.kv_heads * QUICK.group
                assert queries.shape == (candidates.shape[0], query_heads, needs.queries, QUICK.head_dim)
            if needs.positions:
                positions = candidates.require("positions")
                assert positions.shape == candidates.shape
                assert (positions.diff(dim=-1) > 0).all()
                assert int(positions[..., -64:].amin()) == candidates.previous_len
                assert (positions[..., : candidates.prompt_len] < candidates.prompt_len).all()
                assert (positions[..., candidates.prompt_len :] >= candidates.prompt_len).all()
            if needs.hidden_bands:
                change = candidates.require("hidden_change")
                assert change.shape == (len(needs.hidden_bands), candidates.true_len - candidates.prompt_len)
            if candidates.statistic is not None:
                assert candidates.statistic[..., -64:].isnan().all()
                assert not candidates.statistic[..., :-64].isnan().any()
        assert layers == QUICK.layers, name
