"""The overview of all methods: a row for each, from its card and from what it declares; and one method in full."""

from __future__ import annotations

import dataclasses
import inspect
import io
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rich.console import Console

from kvpolicy.cli import main
from kvpolicy.policies.base import Band, Candidates, Card, Granularity, Needs, Noise, Policy
from kvpolicy.policies.registry import POLICIES
from kvpolicy.sglang_plugin.policies_command import markdown, overview, reads, table

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"
CONTROLS = {"full"}  # has no source


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_card(name: str) -> None:
    policy = POLICIES[name]()
    assert "card" in vars(policy), "a card of its own, not one that it inherits"
    assert policy.card.score
    assert not policy.card.score.endswith("."), "a clause, not a sentence"
    assert bool(policy.card.source) == bool(policy.card.code) == (name not in CONTROLS)


def test_no_two_policies_have_the_same_score() -> None:
    assert len({load().card.score for load in POLICIES.values()}) == len(POLICIES)


def test_the_documentation_holds_the_table_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == len(POLICIES) + 2
    assert printed in DOCS.read_text(encoding="utf-8"), "kvpolicy policies --markdown prints the table as it must be"


@pytest.mark.parametrize("width", [80, 119, 120, 200])
def test_the_table_has_every_policy_and_every_source_at_any_width(width: int) -> None:
    rows = [overview(load()) for load in POLICIES.values()]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(rows, console.width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "something was cut off"
    words = text.split()
    assert [row.policy for row in rows if row.policy not in words] == []
    assert [row.source for row in rows if row.source.split()[-1:] and row.source.split()[-1] not in words] == []


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in POLICIES)
    assert "one set per layer and KV head" in printed


@pytest.mark.parametrize("name", POLICIES)
def test_one_policy_is_documented_with_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", name]) == 0
    printed = capsys.readouterr().out
    policy = POLICIES[name]()
    options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(policy))  # type: ignore[arg-type]
    last = f"kv_options: {options}" if options else "no options"
    assert printed == f"{inspect.getdoc(policy)}\n\n{last}\n"


@dataclass(frozen=True)
class Everything(Policy):
    """Reads all there is."""

    name: ClassVar[str] = "everything"
    card: ClassVar[Card] = Card("all | of it", "Nobody, arXiv 0000.00000", "none found", flash_attention=False)

    last: float = 0.3

    @property
    def shares(self) -> Granularity:
        return Granularity.PER_KV_HEAD_INDEX

    def needs(self, period: int) -> Needs:
        bands = (Band(0.3, self.last), Band(0.6, 0.6))
        return Needs(keys=True, values=True, queries=period, positions=True, hidden_bands=bands)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Adding(Everything):
    """Adds up what the decode queries say."""

    accumulates: ClassVar[bool] = True


def test_a_row_says_what_the_policy_declares() -> None:
    row = overview(Everything)
    assert row.reads == "keys, values, last 64 queries, positions, hidden states of 2 layers"
    assert (row.policy, row.one_set_per, row.flash_attention) == ("everything", "KV head index", "no")
    assert markdown([row]).splitlines()[-1] == (
        f"| `everything` | all \\| of it | {row.reads} | KV head index | no | Nobody, arXiv 0000.00000 | none found |"
    )
    assert "hidden states of 2 bands of layers" in reads(Everything(last=0.4))
    assert "values, every decode query, in a number carried per token, positions" in reads(Adding())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", "nothing"),
        ("streaming-llm", "nothing"),
        ("vase-attnv", "keys, values, last 64 queries"),
        ("vase-dkv", "keys, values"),
        ("evict-large-range", "values"),
        ("tova", "keys, last query"),
        ("rkv", "keys, last 8 queries"),
        ("epikv", "positions, hidden states of 2 layers"),
        ("quest", "query of each step, summaries of pages of keys"),
        ("seerattention-r", "query of each step, summaries of pages of keys, a file (option gates)"),
        ("triattention", "keys, positions, a file (option stats)"),
        ("alpha", "keys, values, positions, a file (option stats)"),
    ],
)
def test_what_a_method_reads(name: str, expected: str) -> None:
    assert reads(POLICIES[name]()()) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vase-dkv", "layer and KV head"),
        ("tova", "layer"),
        ("triattention", "KV head index"),
        ("epikv", "request"),
        ("quest", "layer and query head"),
    ],
)
def test_who_shares_one_set(name: str, expected: str) -> None:
    assert overview(POLICIES[name]()).one_set_per == expected
