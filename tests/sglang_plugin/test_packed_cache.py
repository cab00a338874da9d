"""How SGLang is told to size and build a packed pool, against pools that were built; and when tokens are decided on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpolicy.quant.cache_format import FORMATS, CacheFormat
from kvpolicy.sglang_plugin.packed_cache import PackedCache
from kvpolicy.sglang_plugin.protected_rows import ProtectedRows
from kvpolicy.sglang_plugin.protection import Protection
from kvpolicy.sglang_plugin.residency import residency_of
from tests.sglang_plugin.packed_pools import allocated_bytes, built

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

Ranks = Callable[[int], None]
LAYERS, HEADS, RANKS, DTYPE = 3, 4, 2, torch.bfloat16
OF_RANK = HEADS // RANKS


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Of so many tensor-parallel ranks this process is one, whatever an engine said that ran in it before."""
    context = pytest.importorskip("sglang.srt.runtime_context")

    def of(count: int) -> None:
        monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=count, attn_dcp_size=1))

    of(RANKS)
    return of


def configurator(head_dim: int, requests: int | None) -> Any:
    """As much of SGLang's `KVCacheConfigurator` as the hooks read."""
    model = SimpleNamespace(head_dim=head_dim, get_num_kv_heads=lambda ranks, dcp: HEADS // (ranks // dcp))
    return SimpleNamespace(
        model_config=model, kv_cache_dtype=DTYPE, server_args=SimpleNamespace(max_running_requests=requests)
    )


def settings_of(req: Any) -> Any:
    return SimpleNamespace(period=req.period)


class Sized:
    """A pool of as many slots as SGLang finds room for in `available` bytes, by the hooks and its own division."""

    def __init__(
        self,
        cache_format: CacheFormat,
        head_dim: int,
        requests: int | None,
        recent: int,
        available: int,
    ) -> None:
        cache, kvc = PackedCache(cache_format, recent, settings_of), configurator(head_dim, requests)
        sizes = SimpleNamespace()
        self.cell = cache.after_compute_cell_size(10**6, sizes, kvc, LAYERS)
        (of, left, page_size), keywords = cache.before_calculate_pool_sizes(sizes, available, 1)
        assert (of, page_size, keywords) == (sizes, 1, {})
        self.slots = left // self.cell
        pool_class = cache.after_resolve_kv_pool_class(object(), kvc, kind="mha", default=object())
        self.pool = built(pool_class, self.slots, layers=LAYERS, heads=OF_RANK, head_dim=head_dim, dtype=DTYPE)
        self.bytes = allocated_bytes(self.pool)


def bytes_of_row(head_dim: int) -> int:
    """Of a protected row of all layers and heads, and its place in the list."""
    return LAYERS * OF_RANK * (head_dim * DTYPE.itemsize + 4)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("keys", "head_dim", "group"), [("none", 64, None), ("int8", 80, 80), ("int4", 128, 16)])
@pytest.mark.parametrize("available", [2_000_000, 2_345_678])
def test_a_pool_is_as_large_as_its_budget_to_a_slot(
    ranks: Ranks, name: str, keys: str, head_dim: int, group: int | None, available: int
) -> None:
    """SGLang adds one slot for padding, whatever the pool; the spare row and the counters are ours."""
    found = Sized(CacheFormat(name, group, 0.07, keys), head_dim, 3, 8, available)
    beside = 0
    if found.pool.protected is not None:
        assert found.pool.protected.capacity < found.slots
        beside = 2 * bytes_of_row(head_dim) + 8 * (LAYERS * OF_RANK + LAYERS + OF_RANK + 1)
    assert available - found.cell < found.bytes <= available + found.cell + beside


@pytest.mark.parametrize("name", ["int4", "range-int4"])
def test_one_more_slot_costs_a_cell(ranks: Ranks, name: str) -> None:
    """Between pools a thousand slots apart, so that all roundings are small beside it."""
    small, large = (Sized(CacheFormat(name), 64, 2, 8, n) for n in (1_000_000, 3_000_000))
    slots = large.slots - small.slots
    assert slots > 1000
    assert (large.bytes - small.bytes) / slots == pytest.approx(small.cell, rel=0.002)
    assert small.cell == large.cell


@pytest.mark.parametrize(("requests", "recent"), [(0, 8), (None, 8), (1, 8), (6, 8), (6, 16)])
def test_rows_of_running_requests_are_set_aside(ranks: Ranks, requests: int | None, recent: int) -> None:
    """Four sinks and twice the newest tokens of each, in every layer and head."""
    cache, sizes = PackedCache(CacheFormat("range-int4"), recent, settings_of), SimpleNamespace()
    cache.after_compute_cell_size(0, sizes, configurator(64, requests), LAYERS)
    (_, left, _), _ = cache.before_calculate_pool_sizes(sizes, 10**7, 1)
    rows = (requests or 0) * (4 + 2 * recent)
    assert rows * bytes_of_row(64) <= 10**7 - left <= (rows + 1) * bytes_of_row(64)


def test_without_protection_nothing_is_set_aside_and_a_cell_is_a_slot(ranks: Ranks) -> None:
    cache, sizes, kvc = PackedCache(CacheFormat("int4"), 8, settings_of), SimpleNamespace(), configurator(64, 4)
    ranks(1)
    cell = cache.after_compute_cell_size(0, sizes, kvc, LAYERS)
    assert cell == LAYERS * HEADS * (64 * 2 + 64 // 2 + 2 * 2)
    assert cache.before_calculate_pool_sizes(sizes, 777, 1) == ((sizes, 777, 1), {})


def test_a_cell_is_rounded_up_to_bytes(ranks: Ranks) -> None:
    cache, sizes = PackedCache(CacheFormat("range-int2", protect=0.3333), 8, settings_of), SimpleNamespace()
    ranks(HEADS)
    cell = cache.after_compute_cell_size(0, sizes, configurator(64, 4), 1)
    slot, row = 64 * 2 + 64 // 4 + 2 * 2 + 4, 64 * 2 + 4
    assert slot + 0.3333 * row <= cell < slot + 0.3333 * row + 1


def test_less_memory_than_is_set_aside_is_no_slot(ranks: Ranks) -> None:
    cache, sizes = PackedCache(CacheFormat("range-int4"), 64, settings_of), SimpleNamespace()
    cache.after_compute_cell_size(0, sizes, configurator(64, 128), LAYERS)
    assert cache.before_calculate_pool_sizes(sizes, 1000, 1) == ((sizes, 0, 1), {})


def test_the_pool_class_knows_format_requests_and_newest_tokens(ranks: Ranks) -> None:
    cache, stock = PackedCache(CacheFormat("range-int4", keys="int8"), 9, settings_of), object()
    found = cache.after_resolve_kv_pool_class(stock, configurator(96, 5), kind="mha", default=stock)
    assert found.keywords == {
        "cache_format": CacheFormat("range-int4", 32, keys="int8"),
        "requests": 5,
        "recent": 9,
    }
    for kind in ("mla", "dsa"):
        assert cache.after_resolve_kv_pool_class(stock, configurator(96, 5), kind=kind, default=stock) is stock


class Running:
    """A `PackedCache` whose pools are a row of slots per request and protected rows."""

    def __init__(self, share: float = 0.25) -> None:
        self.cache = PackedCache(CacheFormat("range-int4", protect=share), 8, settings_of)
        self.rows = ProtectedRows(1, 200, 1, 200, 4, DTYPE, torch.device("cpu"))
        self.cache.protection = Protection(self.rows, CacheFormat("range-int4", protect=share))
        self.allocator = SimpleNamespace(free_group=None)
        pools: Any = SimpleNamespace(
            allocator=self.allocator, packed=object(), row=lambda req, length: torch.arange(length) + req.first
        )
        self.cache.attach(pools)

    def forward(self, decode: bool, slots: list[int], reqs: list[Any], *lengths: tuple[int, int]) -> None:
        mode = SimpleNamespace(is_decode=lambda: decode, is_extend=lambda: not decode)
        batch = SimpleNamespace(
            forward_mode=mode,
            out_cache_loc=torch.tensor(slots),
            extend_prefix_lens_cpu=[before for before, _ in lengths],
            extend_seq_lens_cpu=[new for _, new in lengths],
        )
        self.cache.before_forward(batch, reqs)
        if not decode:
            assert self.cache.protection is not None
            self.cache.protection.choose(0, torch.tensor(slots), torch.zeros(len(slots), 1, 4, dtype=DTYPE))

    def held(self, req: Any, length: int) -> list[int]:
        found: list[int] = self.rows.holds(torch.arange(length) + req.first)[0, 0].nonzero().flatten().tolist()
        return found


def request(first: int, prompt: int, period: int) -> Any:
    kv = SimpleNamespace(kv_committed_len=prompt)
    return SimpleNamespace(
        first=first, origin_input_ids=[0] * prompt, output_ids=[], period=period, extend_end=0, kv=kv
    )


def batch_of(*lengths: tuple[Any, int]) -> Any:
    return SimpleNamespace(
        reqs=[req for req, _ in lengths],
        seq_lens_cpu=torch.tensor([length for _, length in lengths]),
        is_empty=lambda: not lengths,
    )


@pytest.mark.parametrize("chunks", [[20], [5, 15], [19, 1], [1] * 20], ids=len)
def test_what_a_prefill_decided_is_settled_and_no_more(chunks: list[int]) -> None:
    """SGLang appends the first token of the output before it says that the prompt is in its tree."""
    running, req, before = Running(), request(10, 20, period=3), 0
    for i, new in enumerate(chunks):
        slots = list(range(10 + before, 10 + before + new))
        running.forward(False, slots, [req], (before, new))
        before = req.extend_end = before + new
        if i == len(chunks) - 1:
            req.output_ids.append(7)
        residency_of(req).prefilled(req.extend_end)
        assert residency_of(req).settled == min(before, 17)
    assert running.held(req, 20) == [0, 1, 2, 3, *running.held(req, 17)[4:], 17, 18, 19]
    assert len(running.held(req, 17)) == 4 + 17 // 4 - 4 // 4


@pytest.mark.parametrize("period", [1, 3, 6])
def test_a_request_never_has_more_rows_than_are_set_aside_for_it(period: int) -> None:
    running, req = Running(), request(10, 20, period)
    running.forward(False, list(range(10, 30)), [req], (0, 20))
    req.extend_end = 20
    req.output_ids.append(7)
    residency_of(req).prefilled(20)
    for length in range(20, 120):
        running.cache.before_update_running_batch(batch_of((req, length)), lambda: None)
        running.forward(True, [10 + length], [req])
        held = running.held(req, length + 1)
        assert held[:4] == [0, 1, 2, 3]
        assert held[-period:] == list(range(length + 1 - period, length + 1))
        settled = residency_of(req).settled
        assert period <= length - settled < 2 * period
        assert held[-(length + 1 - settled) :] == list(range(settled, length + 1))
        assert len(held) == 4 + settled // 4 - 4 // 4 + length + 1 - settled <= (length + 1) // 4 + 4 + 2 * period


def test_the_step_in_flight_is_waited_for_only_where_something_is_decided() -> None:
    running, req, waits = Running(), request(10, 20, period=3), list[None]()
    residency_of(req).prefilled(20)
    residency_of(req).settled, req.extend_end = 17, 20
    running.forward(True, list(range(10, 34)), [req])
    for length, expected in ((22, 0), (23, 1), (24, 1), (25, 1), (26, 2)):
        running.cache.before_update_running_batch(batch_of((req, length)), lambda: waits.append(None))
        assert len(waits) == expected
    residency_of(req).published = None  # under overlap scheduling its prefill may not have been processed
    running.cache.before_update_running_batch(batch_of((req, 60)), lambda: waits.append(None))
    running.cache.before_update_running_batch(batch_of(), lambda: waits.append(None))
    assert len(waits) == 2


def test_what_stays_in_the_tree_keeps_rows_for_its_range_alone() -> None:
    running, req = Running(), request(10, 20, period=6)
    running.forward(True, list(range(10, 34)), [req])
    residency_of(req).settled, req.kv.kv_committed_len = 4, 24
    running.cache.before_release(req, lambda: None)
    assert residency_of(req).protected_end == 1
    assert len(running.held(req, 24)) == 4 + 24 // 4 - 4 // 4


def test_a_row_that_was_compacted_is_not_decided_on_when_it_ends() -> None:
    running, req = Running(), request(10, 20, period=6)
    running.forward(True, list(range(10, 22)), [req])
    residency_of(req).evictions, req.kv.kv_committed_len = 1, 24
    running.cache.before_release(req, lambda: None)
    assert residency_of(req).protected_end == 0.5
    assert running.held(req, 24) == list(range(12))


def test_slots_are_released_once_and_only_those_of_this_pool() -> None:
    running, req = Running(), request(10, 20, period=6)
    running.forward(True, [10, 11, 12, 13], [req])
    running.cache.before_free(SimpleNamespace(free_group=None), torch.tensor([10]))
    running.allocator.free_group = []
    running.cache.before_free(running.allocator, torch.tensor([11]))  # SGLang calls again with the whole group
    running.allocator.free_group = None
    running.cache.before_free(running.allocator, torch.tensor([], dtype=torch.int64))
    running.cache.before_free(running.allocator, torch.tensor([12]))
    assert running.cache.protection is not None
    running.cache.protection.settle_released()
    assert running.held(req, 4) == [0, 1, 3]
    running.cache.after_clear(None, SimpleNamespace(free_group=None))
    assert running.held(req, 4) == [0, 1, 3]
    running.cache.after_clear(None, running.allocator)
    assert running.held(req, 4) == []
