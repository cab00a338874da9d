"""Each method lives through random texts beside an independent reference, and evicts the same tokens all along.

A method is added with one entry in `references/table.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kvpolicy.policies.base import Policy
from kvpolicy.policies.options import build
from kvpolicy.policies.registry import policy_type
from tests.policies.life import Due, Text, method_rounds, policy_rounds, random_text
from tests.policies.oracle import Method
from tests.policies.references.table import REFERENCES, Entry, Shape

# A head may differ from its reference where rounding decides, and in no more than this share of all heads.
MARGIN, SHARE = 1e-5, 0.005


class Case(NamedTuple):
    """One request to one model."""

    policy: Policy
    method: Method
    text: Text
    budget: int
    period: int


def least_budget(policy: Policy, period: int) -> int:
    """The smallest that the policy accepts."""
    for budget in range(policy.forced(period) + 1, policy.forced(period) + 200):
        try:
            policy.check(budget, period)
        except ValueError:
            continue
        return budget
    raise AssertionError(f"{policy.name} refuses every small budget")


def draw_case(entry: Entry, seed: int, folder: Path) -> tuple[str, Case]:
    """A case and what to call it."""
    rng = random.Random(seed)
    shape = Shape(rng.randint(*entry.layers), rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 7]), 1)
    shape = shape._replace(head_dim=rng.choice([64, 80, 96, 128]))
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    policy = build(policy_type(entry.policy), entry.options(shape, folder))
    period = rng.choice(entry.periods)
    budget = least_budget(policy, period) + rng.randint(0, entry.spare)
    prompt_len = {
        "short": rng.randint(1, max(1, budget // 4)),
        "near": rng.randint(max(1, budget - 5), budget + period - 1),
        "long": budget + period + rng.randint(0, 30),
    }[rng.choice(["short", "near", "near", "long"])]
    rounds = rng.randint(2, 5)
    decoded = max(1, budget + period - prompt_len) + (rounds - 1) * period + entry.extra
    text = random_text(*shape, prompt_len=prompt_len, length=prompt_len + decoded, dtype=dtype, seed=seed)
    label = f"{entry}, {seed = }: {shape}, {dtype}, {prompt_len = }, {decoded = }, {budget = }, {period = }"
    return label, Case(policy, entry.method(shape), text, budget, period)


@dataclass
class Tally:
    """Of compared heads, one per eviction, layer and KV head; `excused` are those that rounding made differ."""

    rounds: int = 0
    heads: int = 0
    excused: int = 0


def compare(label: str, case: Case, due: Due, tally: Tally) -> None:
    """Assert that policy and reference hold the same tokens after each eviction, up to the first near tie."""
    lives = (
        policy_rounds(case.policy, case.text, case.budget, case.period),
        method_rounds(case.method, case.text, case.budget, case.period, due),
    )
    for ours, reference in zip(*lives, strict=True):
        where = f"{label}, after {ours.true_len} tokens"
        assert ours.true_len == reference.true_len, f"{where}: the reference evicts after {reference.true_len}"
        assert ours.positions.shape == reference.positions.shape, f"{where}: {reference.positions.shape = }"
        assert reference.kept is not None
        differs = (ours.positions != reference.positions).any(dim=-1)
        wrong = differs & (reference.kept.margin >= MARGIN)
        assert not wrong.any(), "\n".join([where, *explained(wrong, ours.positions, reference.positions)])
        tally.rounds += 1
        tally.heads += differs.numel()
        tally.excused += int(differs.sum())
        if differs.any():
            return


def explained(wrong: torch.Tensor, ours: torch.Tensor, reference: torch.Tensor) -> list[str]:
    """A line for each head that differs for more than rounding."""
    lines = []
    for layer, head in wrong.nonzero().tolist():
        mine, theirs = set(ours[layer, head].tolist()), set(reference[layer, head].tolist())
        lines.append(f"{layer = }, {head = }: only it keeps {sorted(mine - theirs)}, the other {sorted(theirs - mine)}")
    return lines


@pytest.mark.parametrize("entry", REFERENCES, ids=str)
def test_a_method_evicts_what_its_reference_evicts(entry: Entry, tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(entry.cases):
        label, case = draw_case(entry, seed, tmp_path)
        compare(label, case, entry.due, tally)
    print(f"{entry}: {entry.cases} cases, {tally.rounds} evictions, {tally.heads} heads, {tally.excused} near ties")
    assert tally.rounds >= 2 * entry.cases, "too few evictions were compared"
    assert tally.excused <= SHARE * tally.heads
