"""What is reported of the tokens that decode steps read."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.sglang_plugin.reads import Reads, reads_of
from tests.sglang_plugin.reading_engine import LAYERS, QUEST, Engine


def test_what_was_read_is_reported_over_steps_without_the_one_too_many() -> None:
    reads = Reads()
    assert reads.statistics(7) == {"tokens_read_mean": 0, "tokens_read_peak": 0, "page_summary_bytes": 0}
    for length, tokens in ((11, 11.0), (12, 12.0), (13, 9.5), (14, 10.0)):
        reads.step(length, tokens)
    reads.summarised(1, torch.zeros(2, 3, 4))
    reads.forget_pages()
    assert reads.statistics(13) == {"tokens_read_mean": 32.5 / 3, "tokens_read_peak": 12, "page_summary_bytes": 96}
    assert reads.statistics(13) == reads.statistics(13)


def test_the_newest_step_counts_if_the_request_has_its_token() -> None:
    reads = Reads()
    reads.step(11, 11.0)
    reads.step(12, 7.0)
    assert reads.statistics(12)["tokens_read_mean"] == 9
    assert reads.statistics(12)["tokens_read_mean"] == 9


def test_a_run_over_its_budget_reports_dense_layers_too() -> None:
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 11, budget=12)
    lengths, expected = [], []
    for _ in range(6):
        engine.decode(req)
        length = req.keys.shape[1]
        within = 8 + (length - 1) % 4 + 1
        lengths.append(length)
        expected.append(length if length <= 12 else (length + 3 * within) / LAYERS)
    assert lengths == [12, 13, 14, 15, 16, 17]
    statistics = reads_of(req).statistics(17)
    assert statistics["tokens_read_mean"] == pytest.approx(sum(expected) / 6)
    assert statistics["tokens_read_peak"] == max(expected)
