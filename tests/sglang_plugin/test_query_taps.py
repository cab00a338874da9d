"""The rings of recorded queries against one plain list of all queries of each request."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpolicy.sglang_plugin.query_taps import QueryTaps
from tests.sglang_plugin.query_schedule import (
    DECODE,
    EXTEND,
    LAYERS,
    ROWS,
    Simulation,
    decode,
    draw,
    prefill,
    prefill_batch,
    taps_of,
)

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [1, 2, 7, 16])
def test_the_newest_queries_are_those_of_a_plain_list_after_every_step(window: int, dtype: torch.dtype) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        simulation = Simulation(window, seed, dtype)
        for _ in range(100):
            kinds = [simulation.prefill, simulation.decode, simulation.finish]
            simulation.random.choices(kinds, weights=[4, 8, 2])[0]()
            simulation.check()
        seen += simulation.seen
    kinds = {"cached", "equal", "longer", "chunked", "several", "reused", "decode", "mixed rows", "padding", "checked"}
    assert kinds - {kind for kind, times in seen.items() if times >= 5} == set()
    assert bool(seen["shorter"]) == (window > 1)


def test_a_decode_step_writes_into_the_storage_that_is_there() -> None:
    """A captured graph replays its writes to fixed addresses, so a buffer that moved would stay as it was."""
    taps, queries = taps_of(4), draw(2)
    ring, address = taps._ring, taps._ring.data_ptr()
    decode(taps, queries, [3, 1], [6, 9])
    assert taps._ring is ring
    assert ring.data_ptr() == address
    assert torch.equal(ring[:, 3 * 4 + 6 % 4], queries[:, 0])
    assert torch.equal(ring[:, 1 * 4 + 9 % 4], queries[:, 1])
    assert int((ring != 0).any(dim=(0, 2, 3)).sum()) == 2


def test_a_prefill_writes_each_slot_once() -> None:
    """Of two writes to one place in one call, a GPU may do either last."""
    taps = taps_of(4)
    taps.plan_prefill(prefill_batch((1, 0, 11), (2, 3, 2), (4, 5, 4)))
    assert taps._slots is not None
    assert sorted(taps._slots.tolist()) == [4, 5, 6, 7, 8, 11, 16, 17, 18, 19]


def test_padding_rows_of_a_decode_step_touch_no_request() -> None:
    taps, prompt = taps_of(4), draw(24, seed=1)
    chunks = [(row, 0, 4) for row in range(1, ROWS)]
    prefill(taps, prompt[:, :20], *chunks)
    decode(taps, draw(7, seed=2), [0] * 7, [0, 1, 2, 3, 4, 5, 0])
    for row, start in zip(range(1, ROWS), range(0, 20, 4), strict=True):
        assert torch.equal(taps.newest(row, 4, 4, slice(0, 3)), prompt[:, start : start + 4].transpose(1, 2))


def test_what_was_handed_out_is_not_changed_by_later_steps() -> None:
    taps, prompt = taps_of(4), draw(4)
    prefill(taps, prompt, (1, 0, 4))
    newest = taps.newest(1, 4, 4, slice(0, 3))
    decode(taps, draw(1, seed=2), [1], [4])
    assert torch.equal(newest, prompt.transpose(1, 2))


@pytest.mark.parametrize("recorded", [0, 1, 2], ids=["no layer", "the first layer", "all but the last layer"])
def test_a_prefill_that_bypassed_the_attention_hook_is_noticed_before_its_queries_are_used(recorded: int) -> None:
    taps = taps_of(4)
    batch = prefill_batch((1, 0, 2))
    taps.plan_prefill(batch)
    for layer in LAYERS[:recorded]:
        taps.record(draw(2)[0].flatten(1), layer, batch)
    bypassed = r"without passing through the attention hook.* --disable-prefill-cuda"
    with pytest.raises(RuntimeError, match=bypassed):
        taps.plan_prefill(batch)
    with pytest.raises(RuntimeError, match=bypassed):
        taps.newest(1, 2, 2, slice(0, 3))


def test_prefills_of_sglang_itself_are_not_recorded() -> None:
    """Before the first request, and when a pass was not announced, there is no plan."""
    taps, prompt = taps_of(4), draw(4)
    dummy = SimpleNamespace(forward_mode=EXTEND)
    for layer in LAYERS:
        taps.record(draw(9, seed=3)[0].flatten(1), layer, dummy)
    assert not taps._ring.any()
    prefill(taps, prompt, (2, 0, 4))
    for layer in LAYERS:
        taps.record(draw(9, seed=3)[0].flatten(1), layer, dummy)
    assert torch.equal(taps.newest(2, 4, 4, slice(0, 3)), prompt.transpose(1, 2))


def test_more_queries_than_are_recorded_cannot_be_asked_for() -> None:
    with pytest.raises(AssertionError, match="more than the"):
        taps_of(4).newest(1, 9, 5, slice(0, 3))


def runner(*layers: tuple[int, int, int], rows: int = 5, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What is read of SGLang's `ModelRunner`, with attention of (layer id, query heads, head size)."""
    attention = pytest.importorskip("sglang.srt.layers.radix_attention").RadixAttention
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(2, 2), attention(heads, head_dim, 1.0, 1, layer))
        for layer, heads, head_dim in layers
    ]
    table = torch.zeros(rows, 16, dtype=torch.int32)
    return SimpleNamespace(
        model=torch.nn.ModuleList(blocks), req_to_token_pool=SimpleNamespace(req_to_token=table), dtype=dtype
    )


def test_every_row_of_the_table_has_a_window_per_attention_layer() -> None:
    taps = QueryTaps.of_model(7, runner((1, 4, 32), (0, 4, 32), (2, 4, 32)))
    assert taps.window == 7
    assert taps.bytes_per_request == 3 * 7 * 4 * 32 * 2
    assert taps.total_bytes == 5 * taps.bytes_per_request


def test_the_rings_have_the_precision_of_the_model() -> None:
    half, single = (QueryTaps.of_model(7, runner((0, 4, 32), dtype=dtype)) for dtype in (torch.half, torch.float32))
    assert half.newest(1, 3, 3, slice(0, 1)).dtype == torch.half
    assert single.newest(1, 3, 3, slice(0, 1)).dtype == torch.float32
    assert single.total_bytes == 2 * half.total_bytes


def test_layers_of_a_pipeline_stage_may_start_anywhere() -> None:
    taps = QueryTaps.of_model(3, runner((9, 2, 4), (8, 2, 4)))
    batch = SimpleNamespace(forward_mode=DECODE, req_pool_indices=torch.tensor([1]), positions=torch.tensor([0]))
    queries = torch.ones(1, 8, dtype=torch.bfloat16)
    taps.record(queries, 8, batch)
    taps.record(2 * queries, 9, batch)
    assert taps.newest(1, 1, 1, slice(0, 2))[:, 0, 0, 0].tolist() == [1, 2]


def test_layers_with_a_gap_are_noticed() -> None:
    with pytest.raises(AssertionError, match="are not contiguous"):
        QueryTaps.of_model(3, runner((0, 2, 4), (2, 2, 4)))


def test_layers_of_different_shapes_are_noticed() -> None:
    with pytest.raises(ValueError, match="too many values to unpack"):
        QueryTaps.of_model(3, runner((0, 2, 4), (1, 4, 4)))
