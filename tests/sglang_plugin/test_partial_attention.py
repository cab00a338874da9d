"""Decode steps of reading requests, alone and among others, against attention over their texts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvpolicy.policies.quest import Quest
from kvpolicy.policies.seerattention_r import SeerAttentionR
from kvpolicy.sglang_plugin import partial_attention
from kvpolicy.sglang_plugin.reads import reads_of
from tests.policies.gate_files import random_state, write_folder
from tests.sglang_plugin.reading_engine import (
    EXTEND,
    FULL,
    GROUP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    QUEST,
    Engine,
    check_quest,
    full_attention,
    layer,
    quest_tokens,
)


def test_below_its_budget_a_reading_request_is_stock_attention_bit_for_bit_and_untouched() -> None:
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 5, budget=12)
    for step in range(7):
        outputs = engine.decode(req)
        for number, (q, output) in enumerate(outputs):
            assert torch.equal(output[0], full_attention(q[0], req.keys[number], req.values[number]))
        calls, engine.backend.calls = engine.backend.calls, []
        assert [(number, saved) for number, _, saved in calls] == [(number, True) for number in range(LAYERS)]
        assert all(batch is calls[0][1] for _, batch, _ in calls), "SGLang's own batch, in every layer"
        assert reads_of(req).newest == (6 + step, 6 + step)
    assert engine.backend.planned == []
    assert reads_of(req).summary_bytes == 0


def random_action(engine: Engine, running: dict[int, Any], seen: Counter[str]) -> None:
    """A request starts, finishes, or some of those that run decode a token, compared with their texts."""
    action = engine.random.choice(["start", "start", "decode", "decode", "decode", "decode", "finish"])
    free = [row for row in range(1, 6) if row not in running]
    if action == "start" and free:
        policy, budget = engine.random.choice([QUEST, QUEST, FULL]), engine.random.choice([12, 13, 19, 24])
        row = engine.random.choice(free)
        running[row] = engine.request(row, policy, engine.random.randint(1, 40), budget)
    elif action == "finish" and running:
        engine.release(running.pop(engine.random.choice(list(running))))
    elif action == "decode" and running:
        reqs = engine.random.sample(list(running.values()), engine.random.randint(1, len(running)))
        read = [0.0] * len(reqs)
        for number, (q, output) in enumerate(engine.decode(*reqs)):
            for i, req in enumerate(reqs):
                if req.settings.arm.policy is FULL:
                    assert torch.equal(output[i], full_attention(q[i], req.keys[number], req.values[number]))
                else:
                    read[i] += check_quest(req, number, q[i], output[i]) / LAYERS
        for req, tokens in zip(reqs, read, strict=True):
            length = req.keys.shape[1]
            slots = engine.pools.row(req, length)
            for pool, text in ((engine.pools.keys, req.keys), (engine.pools.values, req.values)):
                assert torch.equal(torch.stack(pool)[:, slots], text)
            if req.settings.arm.policy is QUEST:
                assert reads_of(req).newest == pytest.approx((length, tokens))
                seen["a part" if tokens < length else "all"] += 1
        kinds = {req.settings.arm.policy.name for req in reqs}
        seen["mixed" if len(kinds) > 1 else kinds.pop()] += 1


def test_requests_come_and_go_and_each_reads_what_a_loop_over_its_text_chooses() -> None:
    """Reading requests of different budgets among others, rows and slots reused, in batches of any make-up."""
    seen = Counter[str]()
    for seed in range(12):
        engine, running = Engine(QUEST, seed=seed), dict[int, Any]()
        for _ in range(60):
            random_action(engine, running, seen)
    assert all(seen[kind] >= 20 for kind in ("mixed", "quest", "full", "a part", "all")), seen


def test_of_a_mixed_batch_the_backend_is_given_the_others_only_and_saves_nothing_twice() -> None:
    engine = Engine(QUEST)
    reading, other = engine.request(1, QUEST, 30), engine.request(4, FULL, 7)
    engine.decode(other, reading)
    assert [(number, batch.req_pool_indices.tolist(), saved) for number, batch, saved in engine.backend.calls] == [
        (0, [4, 1], True),  # a dense layer
        *((number, [4], False) for number in range(1, LAYERS)),
    ]
    part = engine.backend.calls[-1][1]
    assert (part.batch_size, part.seq_lens_sum) == (1, 8)
    assert part.positions.tolist() == [7]
    assert engine.backend.planned == [[4]]


def test_where_all_read_a_part_the_backend_is_not_called() -> None:
    engine = Engine(QUEST)
    engine.decode(engine.request(1, QUEST, 30), engine.request(2, QUEST, 20))
    assert [number for number, _, _ in engine.backend.calls] == [0]
    assert engine.backend.planned == []


def test_the_backend_is_prepared_anew_whenever_it_is_given_other_requests() -> None:
    """Also back to all of them: layers that are dense need not come first."""

    @dataclass(frozen=True)
    class Odd(Quest):
        name: ClassVar[str] = "odd"

        def reads_all(self, layer: int, length: int, budget: int) -> bool:
            return layer % 2 == 0

    engine, odd = Engine(Odd(page=4)), Odd(page=4)
    engine.decode(engine.request(1, odd, 30), engine.request(2, FULL, 7))
    assert engine.backend.planned == [[2], [1, 2], [2]]
    assert [batch.req_pool_indices.tolist() for _, batch, _ in engine.backend.calls] == [[1, 2], [2], [1, 2], [2]]


def test_nothing_but_the_chosen_tokens_is_read_from_the_pool() -> None:
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 33)
    engine.decode(req)  # the complete pages, 32 tokens, are summarised
    queries = engine.draw(LAYERS, 1, HEADS, HEAD_DIM)
    slots = engine.pools.row(req, 34)
    for number in range(1, LAYERS):
        with_newest = torch.cat([req.keys[number], torch.zeros(1, KV_HEADS, HEAD_DIM)])
        read = quest_tokens(queries[number, 0], with_newest, 4, 12)
        for head in range(KV_HEADS):
            of_group = {token for tokens in read[head * GROUP : (head + 1) * GROUP] for token in tokens}
            unread = slots[[token for token in range(34) if token not in of_group]]
            assert len(unread) > 0
            for pool in (engine.pools.keys, engine.pools.values):
                pool[number][unread, head] = torch.nan
    for number, (q, output) in enumerate(engine.decode(req, queries=queries)):
        check_quest(req, number, q[0], output[0])


def test_a_new_request_in_an_old_row_with_the_same_slots_starts_without_pages() -> None:
    engine = Engine(QUEST)
    engine.free = list(range(40, 0, -1))
    first = engine.request(1, QUEST, 24)
    engine.decode(first)
    slots = engine.pools.row(first, 25)
    engine.release(first)
    engine.free = [*slots.tolist()[::-1]]
    second = engine.request(1, QUEST, 24)
    assert engine.pools.row(second, 24).tolist() == slots[:24].tolist()
    for number, (q, output) in enumerate(engine.decode(second)):
        check_quest(second, number, q[0], output[0])


def test_a_retracted_request_has_its_pages_summarised_anew() -> None:
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 24)
    engine.decode(req)
    engine.release(req)
    assert reads_of(req).summaries == {}
    req.kv.req_pool_idx = 3
    engine.prefill(req, 26)
    for number, (q, output) in enumerate(engine.decode(req)):
        check_quest(req, number, q[0], output[0])
    assert reads_of(req).summaries.keys() == {1, 2, 3}


@pytest.mark.parametrize("chunk", [1, 4, 8, 4096])
def test_pages_of_a_prompt_are_summarised_in_chunks_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "CHUNK", chunk)
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 30)
    for _ in range(5):
        for number, (q, output) in enumerate(engine.decode(req)):
            check_quest(req, number, q[0], output[0])
    summaries = reads_of(req).summaries[1]
    assert summaries.shape == (KV_HEADS, 35 // 4, 2 * HEAD_DIM)
    assert reads_of(req).summary_bytes == 3 * summaries.nbytes


@pytest.mark.parametrize("options", [{}, {"threshold": 0.12}, {"dense_layers": 2}], ids=str)
def test_gates_choose_per_kv_head_from_keys_in_the_pool(options: dict[str, Any], tmp_path: Path) -> None:
    """Against the same reader on the whole text, and attention by each KV head over what it chose."""
    folder = write_folder(tmp_path, random_state(range(LAYERS), KV_HEADS, GROUP, HEAD_DIM))
    policy = SeerAttentionR(gates=folder, block=4, **options)
    engine = Engine(policy)
    req, reader = engine.request(2, policy, 21, budget=12), engine.partial._readers[policy]
    counts = set()
    for _ in range(9):
        read = 0.0
        for number, (q, output) in enumerate(engine.decode(req)):
            keys, values = req.keys[number], req.values[number]
            if number < policy.dense_layers:
                assert torch.equal(output[0], full_attention(q[0], keys, values))
                read += len(keys) / LAYERS
                continue
            complete = keys[: len(keys) // 4 * 4].transpose(0, 1).unflatten(1, (-1, 4))
            chosen = reader.choose(q[0], reader.summarise(complete, 0, number), len(keys), 12, number)
            for head, pages in enumerate(chosen.tolist()):
                tokens = [t for t in range(len(keys)) if pages[t // 4]]
                group = slice(head * GROUP, (head + 1) * GROUP)
                own = slice(head, head + 1)
                expected = full_attention(q[0, group], keys[tokens, own], values[tokens, own])
                torch.testing.assert_close(output[0, group], expected, rtol=1e-5, atol=1e-6)
                read += len(tokens) / KV_HEADS / LAYERS
                counts.add(len(tokens))
        assert reads_of(req).newest == pytest.approx((req.keys.shape[1], read))
    assert counts == {9, 10, 11, 12} if "threshold" not in options else len(counts) > 4


def test_a_step_that_bypassed_the_hook_is_noticed_at_the_next() -> None:
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 30)
    engine.partial.plan(engine.batch([req]), [req])
    with pytest.raises(RuntimeError, match=r"without passing through the attention hook.* --disable-cuda-graph"):
        engine.partial.plan(engine.batch([req]), [req])


@pytest.mark.parametrize(
    ("before", "wrong"), [([], 1), ([0], 2), ([0], 0)], ids=["not from the first", "a gap", "one twice"]
)
def test_layers_that_do_not_come_in_order_are_noticed(before: list[int], wrong: int) -> None:
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 30)
    batch, new = engine.batch([req]), engine.draw(1, KV_HEADS, HEAD_DIM)
    query = engine.draw(1, HEADS * HEAD_DIM)
    engine.partial.plan(batch, [req])
    for number in before:
        engine.partial.around(engine.backend.attention, engine.backend, query, new, new, layer(number), batch)
    with pytest.raises(AssertionError, match=f"layer {wrong} came after {len(before)} layers"):
        engine.partial.around(engine.backend.attention, engine.backend, query, new, new, layer(wrong), batch)


def test_a_padded_step_is_noticed() -> None:
    engine = Engine(QUEST)
    req = engine.request(1, QUEST, 30)
    batch, new = engine.batch([req]), engine.draw(2, KV_HEADS, HEAD_DIM)
    query = engine.draw(2, HEADS * HEAD_DIM)
    engine.partial.plan(batch, [req])
    with pytest.raises(AssertionError, match="2 tokens came for 1 requests"):
        engine.partial.around(engine.backend.attention, engine.backend, query, new, new, layer(0), batch)


def test_prefills_and_steps_without_a_reading_request_are_sglang_s_own() -> None:
    engine, calls = Engine(QUEST), []

    def attention(*arguments: Any, **keywords: Any) -> str:
        calls.append((arguments, keywords))
        return "output"

    batch: Any = SimpleNamespace(forward_mode=EXTEND)
    full = engine.request(1, FULL, 30)
    engine.partial.plan(engine.batch([full]), [full])
    for given in (batch, engine.batch([full])):
        arguments = ("backend", "q", "k", "v", layer(2), given)
        assert engine.partial.around(attention, *arguments, False, sinks=1) == "output"  # type: ignore[arg-type]
        assert calls.pop() == ((*arguments, False), {"sinks": 1})
        assert engine.partial.around(attention, *arguments) == "output"  # type: ignore[arg-type]
        assert calls.pop() == ((*arguments, True), {})


def test_keys_that_are_in_the_pool_already_are_not_written_again() -> None:
    """An attention layer that wrote them itself passes none, and says so."""
    engine = Engine(QUEST)
    req, other = engine.request(1, QUEST, 30), engine.request(2, FULL, 9)
    batch = engine.batch([req, other])
    new = engine.draw(2, LAYERS, 2, KV_HEADS, HEAD_DIM)
    for number in range(LAYERS):
        engine.pools.set_kv_buffer(layer(number), batch.out_cache_loc, new[0, number], new[1, number])
    engine.pools.set_kv_buffer = None  # type: ignore[assignment,method-assign]
    engine.partial.plan(batch, [req, other])
    for number in range(LAYERS):
        q = engine.draw(2, HEADS, HEAD_DIM)
        output = engine.partial.around(
            engine.backend.attention, engine.backend, q.flatten(1), None, None, layer(number), batch, False
        )
        keys, values = (
            torch.cat([text[number], new[n, number, 1, None]]) for n, text in ((0, other.keys), (1, other.values))
        )
        assert torch.equal(output.view(2, HEADS, HEAD_DIM)[1], full_attention(q[1], keys, values))


@pytest.mark.parametrize(("kwargs", "cap"), [({"sinks": 1}, 0.0), ({}, 30.0)], ids=["extra argument", "logit cap"])
def test_attention_of_another_kind_is_noticed(kwargs: dict[str, Any], cap: float) -> None:
    engine = Engine(Quest(page=4, dense_layers=0))
    req = engine.request(1, Quest(page=4, dense_layers=0), 30)
    batch, new, query = engine.batch([req]), engine.draw(1, KV_HEADS, HEAD_DIM), engine.draw(1, HEADS * HEAD_DIM)
    engine.partial.plan(batch, [req])
    capped = layer(0)
    capped.logit_cap = cap
    with pytest.raises(AssertionError, match="would be left out"):
        engine.partial.around(engine.backend.attention, engine.backend, query, new, new, capped, batch, **kwargs)
