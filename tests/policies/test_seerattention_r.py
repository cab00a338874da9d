"""SeerAttention-R against loops that start from queries and keys before RoPE."""

from __future__ import annotations

import cmath
import math
import random
from pathlib import Path

import pytest
import torch

from kvpolicy.policies.attn_gates import Gate
from kvpolicy.policies.base import ModelShape
from kvpolicy.policies.options import build
from kvpolicy.policies.reading import ReadingPolicy, Rotary, ServedModel
from kvpolicy.policies.registry import policy_type
from kvpolicy.policies.seerattention_r import GatedBlocks, SeerAttentionR
from tests.policies.gate_files import random_state, rotary_table, write_folder

LAYER = 3


def rotated(x: list[float], position: int, *, theta: float = 10000.0, scale: float = 1.0) -> list[float]:
    """A head rotated by its position, pair by pair as complex numbers, halves together."""
    half = len(x) // 2
    turned = [
        complex(x[i], x[i + half]) * scale * cmath.exp(1j * position * theta ** (-2 * i / len(x))) for i in range(half)
    ]
    return [z.real for z in turned] + [z.imag for z in turned]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / math.sqrt(float((x * x).mean()) + 1e-6) * weight.double()


class Case:
    """A random request of an ugly shape with random gates; the reference never sees rotated keys."""

    def __init__(self, seed: int, *, block: int | None = None, scale: float = 1.0) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.kv_heads, self.group, self.head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 5]), rng.choice([2, 6, 16])
        self.block, self.scale = block or rng.choice([1, 2, 3, 8, 13]), scale
        self.length = rng.choice([self.block * 4, self.block * 4 + 1, rng.randint(3 * self.block, 9 * self.block)])
        self.query = torch.randn(self.kv_heads * self.group, self.head_dim, generator=generator)
        self.keys = torch.randn(self.kv_heads, self.length, self.head_dim, generator=generator)
        state = random_state(range(LAYER, LAYER + 1), self.kv_heads, self.group, self.head_dim, seed=seed)
        name = f"model.layers.{LAYER}.self_attn.attn_gate.attngate_"
        self.gate = Gate(*(state[f"{name}{part}.weight"] for part in ("linear_q", "linear_k", "qnorm", "knorm")))
        self.table = rotary_table(self.length, self.head_dim, scale=scale)
        self.rotary = Rotary(lambda: self.table)

    def blocks(self, **options: float) -> GatedBlocks:
        return GatedBlocks(SeerAttentionR(gates="-", block=self.block, **options), {LAYER: self.gate}, self.rotary)  # type: ignore[arg-type]

    def cached(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and keys as the engine has them: after RoPE."""
        query = [rotated(head, self.length - 1, scale=self.scale) for head in self.query.tolist()]
        keys = [[rotated(key, t, scale=self.scale) for t, key in enumerate(head)] for head in self.keys.tolist()]
        return torch.tensor(query), torch.tensor(keys)

    def summaries(self, blocks: GatedBlocks) -> torch.Tensor:
        complete = self.length // self.block
        keys = self.cached()[1][:, : complete * self.block]
        return blocks.summarise(keys.unflatten(1, (complete, self.block)), 0, LAYER)

    def logits_by_loops(self) -> list[list[float]]:
        """fp64, per KV head the gate's logit of every block; 0 for an incomplete one."""
        logits = []
        for head in range(self.kv_heads):
            q = torch.zeros(self.head_dim, dtype=torch.float64)
            for g in range(self.group):
                q += self.query[head * self.group + g].double() @ self.gate.query[head, g].double()
            q = torch.tensor(
                rotated(normed(q, self.gate.query_norm).tolist(), self.length - 1, scale=self.scale),
                dtype=torch.float64,
            )
            of_head = []
            for first in range(0, self.length, self.block):
                keys = self.keys[head, first : first + self.block].double()
                if len(keys) < self.block:
                    of_head.append(0.0)
                    continue
                pooled = torch.cat([keys.max(dim=0).values, keys.min(dim=0).values, keys.sum(dim=0) / len(keys)])
                k = normed(pooled @ self.gate.key[head].double(), self.gate.key_norm)
                k = torch.tensor(rotated(k.tolist(), first, scale=self.scale), dtype=torch.float64)
                of_head.append(float(q @ k) / math.sqrt(self.head_dim))
            logits.append(of_head)
        return logits


@pytest.mark.parametrize("seed", range(200))
def test_the_logits_are_those_of_loops_over_heads_and_blocks(seed: int) -> None:
    case = Case(seed, scale=random.Random(seed).choice([1.0, 1.2]))
    blocks = case.blocks()
    logits = blocks.logits(case.cached()[0], case.summaries(blocks), case.length, LAYER)
    expected = torch.tensor(case.logits_by_loops(), dtype=torch.float64)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(100))
def test_the_best_blocks_of_the_budget_and_the_newest_are_read(seed: int) -> None:
    case = Case(seed)
    blocks, budget = case.blocks(), random.Random(seed).randint(2 * case.block, case.length)
    chosen = blocks.choose(case.cached()[0], case.summaries(blocks), case.length, budget, LAYER)
    count = -(-case.length // case.block)
    assert chosen.shape == (case.kv_heads, count)
    assert chosen.sum(dim=1).tolist() == [min(count, budget // case.block)] * case.kv_heads
    for is_read, logits in zip(chosen.tolist(), case.logits_by_loops(), strict=True):
        assert is_read[-1]
        read = [logit for logit, yes in zip(logits[:-1], is_read[:-1], strict=True) if yes]
        left = [logit for logit, yes in zip(logits, is_read, strict=True) if not yes]
        assert min(read) >= max(left, default=-math.inf) - 1e-3


@pytest.mark.parametrize("seed", range(60))
def test_with_a_threshold_the_blocks_with_a_share_above_it_and_the_newest_are_read(seed: int) -> None:
    case = Case(seed)
    expected = torch.tensor(case.logits_by_loops(), dtype=torch.float64).softmax(dim=-1)
    threshold = float(expected.median()) + 1e-4
    blocks = case.blocks(threshold=threshold)
    chosen = blocks.choose(case.cached()[0], case.summaries(blocks), case.length, 2 * case.block, LAYER)
    clear = (expected - threshold).abs() > 5e-5
    above = expected > threshold
    above[:, -1] = clear[:, -1] = True
    assert torch.equal(chosen[clear], above[clear])


def test_equal_blocks_are_read_from_the_oldest_on() -> None:
    case = Case(0, block=4)
    case.gate = Gate(torch.zeros_like(case.gate.query), case.gate.key, case.gate.query_norm, case.gate.key_norm)
    blocks = case.blocks()
    chosen = blocks.choose(case.cached()[0], case.summaries(blocks), case.length, 12, LAYER)
    assert all(row[:2] == [True, True] and row[-1] and sum(row) == 3 for row in chosen.tolist())


def test_a_block_completed_later_is_summarised_as_if_it_had_been_there_from_the_start() -> None:
    case = Case(5, block=3)
    blocks, keys = case.blocks(), case.cached()[1][:, :9].unflatten(1, (3, 3))
    whole = blocks.summarise(keys, 0, LAYER)
    parts = [blocks.summarise(keys[:, first : first + 1], first, LAYER) for first in range(3)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "rounded table"])
def test_rotating_back_undoes_the_rotation_of_the_same_table(interleaved: bool, dtype: torch.dtype) -> None:
    table = rotary_table(500, 16, scale=1.3).to(dtype)
    rotary, x = Rotary(lambda: table, interleaved), torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:40]
    there = rotary.rotate(x, positions)
    assert (there - x).abs().max() > 0.5
    torch.testing.assert_close(rotary.rotate(there, positions, back=True), x, rtol=1e-5, atol=1e-5)


def test_the_rotation_is_that_of_complex_numbers() -> None:
    rotary, x = Rotary(lambda: rotary_table(100, 6)), torch.randn(1, 6)
    for position in (0, 1, 99):
        expected = torch.tensor([rotated(x[0].tolist(), position)])
        torch.testing.assert_close(rotary.rotate(x, torch.tensor([position])), expected, rtol=1e-4, atol=1e-5)
    neighbours = Rotary(lambda: rotary_table(100, 6), interleaved=True).rotate(x, torch.tensor([7]))
    halves = rotary.rotate(x[:, [0, 2, 4, 1, 3, 5]], torch.tensor([7]))
    assert torch.equal(neighbours, halves[:, [0, 3, 1, 4, 2, 5]])


def test_a_table_that_was_replaced_is_the_one_that_is_used() -> None:
    tables = [rotary_table(4, 6)]
    rotary = Rotary(lambda: tables[-1])
    rotary.rotate(torch.ones(1, 6), torch.tensor([3]))
    tables.append(rotary_table(8, 6))
    assert rotary.rotate(torch.ones(1, 6), torch.tensor([7])).isfinite().all()


def model(kv_heads: int = 4, group: int = 3, first: int = 0, head_dim: int = 6, width: int = 6) -> ServedModel:
    rotary = Rotary(lambda: rotary_table(200, width))
    return ServedModel(2, kv_heads * group, kv_heads, first, head_dim, torch.device("cpu"), rotary)


def policy(folder: str, **options: str) -> SeerAttentionR:
    built = build(policy_type("seerattention-r"), {"gates": folder, "block": "4", **options})
    assert isinstance(built, SeerAttentionR)
    return built


def test_a_rank_with_some_of_the_heads_chooses_for_them_as_one_with_all(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_state(range(2), 4, 3, 6))
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(12, 6, generator=generator), torch.randn(4, 42, 6, generator=generator)
    whole, part = policy(folder).reader(model()), policy(folder).reader(model(kv_heads=2, first=2))
    chosen = []
    for reader, q, k in ((whole, query, keys), (part, query[6:], keys[2:])):
        summaries = reader.summarise(k[:, :40].unflatten(1, (10, 4)), 0, 1)
        chosen.append(reader.choose(q, summaries, 42, 16, 1))
    assert torch.equal(chosen[0][2:], chosen[1])
    assert (chosen[0][:2] != chosen[0][2:]).any()


def test_gates_that_do_not_fit_the_model_are_refused_before_it_loads(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_state(range(2), 4, 3, 6))
    shape = ModelShape(layers=2, query_heads=12, kv_heads=4, head_dim=6, rope_theta=1e4)
    policy(folder).fit(shape)
    with pytest.raises(ValueError, match=r"lack model.layers.2.self_attn.attn_gate.attngate_knorm.weight"):
        policy(folder).fit(shape._replace(layers=3))
    with pytest.raises(ValueError, match="2 query heads for each"):
        policy(folder).fit(shape._replace(query_heads=8))
    with pytest.raises(ValueError, match="but a model with 8 KV heads"):
        policy(folder).reader(model(kv_heads=8))


def test_dense_layers_need_no_gates(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_state(range(1, 2), 4, 3, 6))
    dense = policy(folder, dense_layers="1")
    dense.fit(ModelShape(2, 12, 4, 6, 1e4))
    reader = dense.reader(model())
    assert [reader.reads_all(layer, 100, 8) for layer in (0, 1)] == [True, False]


def test_a_model_without_one_rotary_embedding_of_whole_heads_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_state(range(2), 4, 3, 6))
    for served in (model(width=4), model()._replace(rotary=None)):
        with pytest.raises(ValueError, match="needs a model with one rotary embedding of all channels"):
            policy(folder).reader(served)


def test_everything_is_read_while_it_fits() -> None:
    budgeted, shared = Case(0, block=4).blocks(), Case(0, block=4).blocks(threshold=0.1)
    assert [budgeted.reads_all(0, length, 12) for length in (1, 12, 13)] == [True, True, False]
    assert [shared.reads_all(0, length, 12) for length in (1, 4, 5, 12)] == [True, True, False, False]


def test_what_cannot_work_is_refused() -> None:
    SeerAttentionR(gates="x").check(128, 64)
    SeerAttentionR(gates="x", threshold=0.5).check(1, 64)
    with pytest.raises(ValueError, match=r"trained gates, so kv_options must name them as gates:FOLDER"):
        SeerAttentionR().check(4096, 64)
    with pytest.raises(ValueError, match=r"newest block of 64 tokens, so kv_budget must be at least 128"):
        SeerAttentionR(gates="x").check(127, 64)
    with pytest.raises(ValueError, match=r"'threshold' of seerattention-r must be below 1"):
        SeerAttentionR(gates="x", threshold=1.0).check(4096, 64)


def test_it_evicts_nothing_and_says_what_it_does_not_save() -> None:
    made = SeerAttentionR(gates="x")
    assert isinstance(made, ReadingPolicy)
    assert not made.per_query_head
    assert not made.due(10**6, 128, 64)
    assert "saves no memory" in made.card.score
    assert "It saves no memory" in (SeerAttentionR.__doc__ or "")
