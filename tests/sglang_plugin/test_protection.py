"""When tokens get and lose protected rows: whole lives of requests against loops over single tokens, and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from kvpolicy.sglang_plugin.protection import Protection
from tests.sglang_plugin.protected_cache import CPU, HEAD_DIM, Cache
from tests.sglang_plugin.protected_lives import Life
from tests.sglang_plugin.protection_by_loops import HEADS, LAYERS, SINKS

SHARES = [0.05, 0.1, 0.25, 0.3333, 0.5]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", SHARES)
def test_lives_of_many_requests(share: float, seed: int) -> None:
    life = Life(share, seed)
    life.run(160)
    assert int(life.cache.rows.denied) == 0


@pytest.mark.parametrize("rows", [0, 1, 13])
def test_lives_for_which_there_are_too_few_rows(rows: int) -> None:
    """Whoever gets a row has it exactly, and all others have codes."""
    life = Life(0.25, 7, rows)
    life.run(120)
    assert int(life.cache.rows.denied) > 0
    assert int(life.cache.rows.taken.max()) <= rows


def of_ranges(ranges: list[float]) -> torch.Tensor:
    """Values of tokens whose range is given, the same in each layer and head: ``[L, n, H, D]``."""
    unit = torch.linspace(0, 1, HEAD_DIM)
    return (torch.tensor(ranges).view(1, -1, 1, 1) * unit).expand(LAYERS, -1, HEADS, -1).bfloat16()


def held_positions(cache: Cache, slots: list[int]) -> list[int]:
    """The places in `slots` that have a row, which must be the same in each layer and head."""
    held = cache.rows.holds(torch.tensor(slots))
    assert (held == held[:1, :1]).all()
    found: list[int] = held[0, 0].nonzero().flatten().tolist()
    return found


@pytest.mark.parametrize("share", SHARES)
def test_shares_add_up_whatever_the_blocks(share: float) -> None:
    """A prompt in chunks, then decoded tokens in blocks: at each boundary as many as the share of all before it."""
    rng = random.Random(SHARES.index(share))
    for _ in range(6):
        cache, length, recent, end = Cache(100, share), rng.randint(0, 40), rng.randint(1, 6), 90
        slots = rng.sample(range(100), end)
        start = 0
        while start < length:
            stop = rng.randint(start + 1, length)
            cache.prefill([(slots[start:stop], start, length, recent)])
            start = stop
        cache.decode(slots[length:])
        settled = max(SINKS, length - recent)
        while settled < end:
            held = cache.rows.holds(torch.tensor(slots[SINKS:settled], dtype=torch.int64)).sum(dim=-1)
            assert set(held.flatten().tolist()) == {
                int(Fraction(str(share)) * settled) - int(Fraction(str(share)) * SINKS)
            }
            block = rng.randint(1, end - settled)
            cache.settle(slots[settled : settled + block], settled)
            settled += block
        assert cache.rows.holds(torch.tensor(slots[:SINKS])).all()
        cache.check_held()


def test_a_prompt_keeps_sinks_newest_and_the_widest_of_the_rest_the_older_of_equals() -> None:
    cache, slots = Cache(40, 0.25), list(range(30, 10, -1))
    ranges = [1.0] * 4 + [2, 5, 3, 5, 5, 1, 5, 5, 2, 2, 2, 2] + [1.0] * 4
    cache.prefill([(slots, 0, 20, 4)], of_ranges(ranges))  # 16 // 4 - 4 // 4 of tokens 4 to 15
    assert held_positions(cache, slots) == [0, 1, 2, 3, 5, 7, 8, 16, 17, 18, 19]


def test_requests_of_one_batch_do_not_compete_with_each_other() -> None:
    cache = Cache(60, 0.5)
    first, second, third = list(range(1, 11)), list(range(20, 25)), list(range(40, 48))
    chunks = [(first, 0, 10, 1), (second, 6, 30, 2), (third, 10, 18, 5)]
    low, high = [1.0 + i / 8 for i in range(5)], [3.0] * 3
    cache.prefill(chunks, of_ranges([2.0] * 10 + low + high + [1.0] * 5))
    assert held_positions(cache, first) == [0, 1, 2, 3, 4, 5, 9]  # 4 to 8: 9 // 2 - 4 // 2
    assert held_positions(cache, second) == [3, 4]  # 6 to 10: 11 // 2 - 6 // 2
    assert held_positions(cache, third) == [0, 3, 4, 5, 6, 7]  # 10 to 12: 13 // 2 - 10 // 2
    cache.check_held()


@pytest.mark.parametrize(("length", "recent"), [(1, 1), (3, 1), (4, 9), (5, 1), (6, 2), (20, 64)])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_short_prompts_are_sinks_and_newest_tokens(length: int, recent: int, chunk: int) -> None:
    cache, slots = Cache(40, 0.05), list(range(1, length + 1))
    for start in range(0, length, chunk):
        cache.prefill([(slots[start : start + chunk], start, length, recent)])
    assert held_positions(cache, slots) == list(range(length))


def test_of_a_block_the_widest_keep_rows_the_older_of_equals() -> None:
    cache, slots = Cache(40, 0.25), list(range(30, 10, -1))
    cache.protection.before_decode(torch.tensor(slots))
    cache.write(slots, of_ranges([2.0] * 8 + [1, 4, 4, 1, 4, 3, 3, 9] + [8.0] * 4))
    cache.protection.settle(torch.tensor(slots[8:15]), 8)  # 15 // 4 - 8 // 4
    assert held_positions(cache, slots) == [*range(8), 9, *range(15, 20)]
    cache.protection.settle(torch.tensor(slots[15:]), 15)  # 20 // 4 - 15 // 4
    assert held_positions(cache, slots) == [*range(8), 9, 15, 16]
    cache.protection.settle(torch.tensor(slots[4:4]), 4)
    assert held_positions(cache, slots) == [*range(8), 9, 15, 16]


def test_a_number_that_is_none_or_infinite_is_wider_than_any() -> None:
    cache, slots = Cache(40, 0.25), list(range(20))
    values = of_ranges([1.0] * 6 + [3.0] * 14).clone()
    values[:, 9, :, 3], values[:, 15, :, 0] = torch.inf, torch.nan
    cache.protection.before_decode(torch.tensor(slots))
    cache.protection.settle_released()
    for buffer, rows in zip(cache.buffers, values, strict=True):
        buffer.write(torch.tensor(slots), rows)
    cache.protection.settle(torch.tensor(slots[8:]), 8)
    assert held_positions(cache, slots) == [*range(8), 8, 9, 15]


def test_an_eviction_keeps_sinks_newest_and_the_widest_of_those_that_had_a_row() -> None:
    cache, row = Cache(60, 0.25), list(range(1, 21))
    cache.prefill([(row, 0, 20, 4)], of_ranges([1.0] * 4 + [2, 5, 3, 4, 5, 1, 5, 1, 2, 2, 2, 2] + [1.0] * 4))
    assert held_positions(cache, row) == [0, 1, 2, 3, 5, 8, 10, 16, 17, 18, 19]
    keep = [0, 1, 4, 5, 6, 7, 8, 10, 17, 18]  # 10 // 4 of 5, 8 and 10; 4, 6 and 7 had none
    kept = cache.protection.carry(torch.tensor(row), torch.tensor(keep).expand(LAYERS, HEADS, -1), 3)
    destination = list(range(40, 50))
    cache.protection.place(torch.tensor(row[12:]), kept, torch.tensor(destination))
    # 5 is the fourth of those kept, so it is a sink now, and 8 and 10 need not compete with it.
    assert held_positions(cache, destination) == [0, 1, 3, 6, 7, 8, 9]
    assert held_positions(cache, row[:12]) == [0, 1, 2, 3, 5, 8, 10]  # the tree's
    assert held_positions(cache, row[12:]) == []


def test_each_head_keeps_its_own_tokens() -> None:
    cache, row = Cache(60, 0.5), list(range(1, 13))
    cache.decode(row)
    cache.settle(row[4:10], 4)
    rng = random.Random(1)
    keep = [[sorted(rng.sample(range(12), 7)) for _ in range(HEADS)] for _ in range(LAYERS)]
    cache.evict(row, row, keep, row[:7], 2)
    cache.check_held()
    cache.check_content()
    held = cache.rows.holds(torch.tensor(row[:7]))
    assert not (held == held[:1, :1]).all()


def test_a_prefill_that_was_not_announced_gets_no_rows() -> None:
    cache = Cache(20, 0.5)
    cache.protection.choose(0, torch.arange(8), cache.values(8)[0])
    assert not cache.held()


def test_one_layer_chooses_for_itself() -> None:
    cache, slots = Cache(30, 0.25), list(range(1, 13))
    cache.protection.before_prefill([(0, 12, 12, 2)], CPU)
    values = of_ranges([1.0] * 4 + [1, 2, 3, 1, 1, 1, 1, 1])
    cache.protection.choose(1, torch.tensor(slots), values[1])
    assert not cache.rows.holds(torch.tensor(slots))[0].any()
    held = cache.rows.holds(torch.tensor(slots))[1]
    assert held[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 6, 10, 11]


def test_a_prefix_that_was_given_back_to_make_room_still_protects_the_tokens_that_are_kept() -> None:
    cache, row = Cache(60, 0.25), list(range(1, 17))
    cache.prefill([(row[:12], 0, 12, 3)])
    for slot in row[12:]:
        cache.decode([slot])
    cache.release(row[:12])
    keep = [0, 1, 2, 3, 9, 10, 11, 14]
    destination = [*row[12:], 12, 11, 2, 30]  # three of them are of the prefix
    cache.evict(row, row[12:], [[keep] * HEADS] * LAYERS, destination, 3)
    assert held_positions(cache, destination[:4]) == [0, 1, 2, 3]
    cache.check_held()
    cache.check_content()
    assert held_positions(cache, [1, 3, 4, 5, 6, 7, 8, 9, 10]) == []


def without(cache: Cache, row: list[int], count: int) -> list[list[list[int]]]:
    """Per layer and head the places in `row` but for the `count` oldest tokens that have no row."""
    held = cache.rows.holds(torch.tensor(row)).tolist()
    dropped = [[[i for i, has in enumerate(of_head) if not has][:count] for of_head in of_layer] for of_layer in held]
    return [[[i for i in range(len(row)) if i not in of_head] for of_head in of_layer] for of_layer in dropped]


def test_the_newest_token_keeps_its_row_where_the_shares_of_two_blocks_round_to_one_more_than_their_sum() -> None:
    cache, row, recent = Cache(100, 0.05), list(range(1, 61)), 6
    cache.decode(row)
    cache.settle(row[4:54], 4)  # 54 // 20 - 4 // 20 of these keep their rows
    cache.evict(row, row, without(cache, row, 20), row[:40], recent)  # and all of these, because 40 // 20 may
    row = [*row[:40], *range(80, 92)]
    cache.decode(row[40:])
    cache.settle(row[34:40], 34)  # of these 40 // 20 - 34 // 20
    assert cache.rows.holds(torch.tensor(row)).sum(dim=-1).eq(SINKS + 2 + 1 + 2 * recent).all()
    cache.evict(row, row, without(cache, row, 1), row[:51], recent)
    cache.check_held()
    assert cache.rows.holds(torch.tensor(row[45:51])).all()


CALLS: dict[str, Callable[[Protection], object]] = {
    "decode": lambda protection: protection.before_decode(torch.tensor([9])),
    "prefill": lambda protection: protection.before_prefill([(0, 1, 1, 1)], CPU),
    "settle": lambda protection: protection.settle(torch.tensor([9]), 4),
    "settle nothing": lambda protection: protection.settle(torch.tensor([], dtype=torch.int64), 4),
    "itself": lambda protection: protection.settle_released(),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_of_slots_that_were_given_back_are_free_at_the_next_call(name: str) -> None:
    cache = Cache(20, 0.5)
    cache.decode([1, 2, 3, 4])
    cache.release([2])
    cache.release([4, 5])
    assert held_positions(cache, [1, 2, 3, 4]) == [0, 1, 2, 3]
    CALLS[name](cache.protection)
    assert held_positions(cache, [1, 2, 3, 4]) == [0, 2]


def test_slots_that_were_given_back_and_taken_again_hold_the_new_token() -> None:
    cache = Cache(20, 0.5)
    cache.decode([1, 2, 3])
    cache.release([3, 1])
    cache.decode([1])
    cache.check_held()
    cache.check_content()
    cache.settle([], 4)
    assert held_positions(cache, [1, 2, 3]) == [0, 1]


def test_after_all_slots_were_given_back_nothing_is_pending() -> None:
    cache = Cache(20, 0.5)
    cache.decode([1, 2, 3])
    cache.release([1])
    cache.clear()
    assert not cache.held()
    cache.decode([1, 4])
    assert held_positions(cache, [1, 2, 3, 4]) == [0, 3]
