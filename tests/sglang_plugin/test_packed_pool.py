"""The packed pool as SGLang uses a pool: rows written and read back, bytes, moved slots, what it cannot do."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpolicy.kernels.pack_rows import pack_rows, unpack_rows
from kvpolicy.kernels.packed_buffer import PackedBuffer
from kvpolicy.quant.cache_format import FORMATS, CacheFormat
from tests.sglang_plugin.packed_pools import FIRST_LAYER, allocated_bytes, built

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LAYERS, HEADS, HEAD_DIM, SIZE = 2, 3, 80, 50
DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def pool_class() -> Any:
    pytest.importorskip("sglang.srt.mem_cache.memory_pool")
    from kvpolicy.sglang_plugin.packed_pool import PackedKVPool

    return PackedKVPool


def made(pool_class: Any, name: str, keys: str = "none", size: int = SIZE, dtype: torch.dtype = DTYPE) -> Any:
    fitted = CacheFormat(name, protect=0.1, keys=keys).fitted(HEAD_DIM)
    chosen = functools.partial(pool_class, cache_format=fitted, requests=2, recent=3)
    return built(chosen, size, layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM, dtype=dtype)


def rows(count: int, seed: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """``[layers, n, heads, D]``."""
    return torch.randn(LAYERS, count, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(exact: torch.Tensor, name: str) -> torch.Tensor:
    """What is read of rows that were packed in a format of this name; "none" changes nothing."""
    bits = {"int8": 8, "int4": 4, "int2": 2}.get(name.removeprefix("range-"))
    return exact if bits is None else unpack_rows(pack_rows(exact, bits, 16), bits, exact.dtype)


def write(pool: Any, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    for layer in range(LAYERS):
        pool.set_kv_buffer(SimpleNamespace(layer_id=FIRST_LAYER + layer), slots, keys[layer], values[layer])


def read(pool: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    layers = range(FIRST_LAYER, FIRST_LAYER + LAYERS)
    keys, values = ([get(layer)[slots] for layer in layers] for get in (pool.get_key_buffer, pool.get_value_buffer))
    return torch.stack(keys), torch.stack(values)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keys_name", ["none", "int8", "int4"])
def test_what_is_written_is_read_back(pool_class: Any, name: str, keys_name: str) -> None:
    pool = made(pool_class, name, keys_name)
    slots = torch.tensor([9, 3, 50, 1, 27])
    keys, values = rows(5, 1), rows(5, 2)
    write(pool, slots, keys, values)
    found_keys, found_values = read(pool, slots)
    assert torch.equal(found_keys, coded(keys, keys_name))
    assert torch.equal(found_values, coded(values, name))
    assert not torch.equal(found_values, values)
    backwards, _ = read(pool, slots.flip(0))
    assert torch.equal(backwards, found_keys.flip(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_rows_are_read_in_the_precision_of_the_model(pool_class: Any, dtype: torch.dtype) -> None:
    pool, slots = made(pool_class, "range-int8", "int8", dtype=dtype), torch.tensor([4, 8])
    keys, values = rows(2, 3, dtype), rows(2, 4, dtype)
    pool.protected.take(slots[:1])
    write(pool, slots, keys, values)
    found_keys, found_values = read(pool, slots)
    assert found_keys.dtype == found_values.dtype == dtype
    assert torch.equal(found_keys, coded(keys, "int8"))
    assert torch.equal(found_values[:, 0], values[:, 0])
    assert torch.equal(found_values[:, 1], coded(values, "int8")[:, 1])


def test_rows_come_flat_and_out_of_a_larger_matrix(pool_class: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, slots = made(pool_class, "range-int4", "int8"), torch.tensor([4, 8, 2])
    keys, values = rows(3, 5), rows(3, 6)
    together = torch.cat([keys.flatten(2), values.flatten(2)], dim=-1)
    width = HEADS * HEAD_DIM
    for layer in range(LAYERS):
        where = KVWriteLoc(slots) if layer else slots
        flat = together[layer]
        pool.set_kv_buffer(
            SimpleNamespace(layer_id=FIRST_LAYER + layer), where, flat[:, :width], flat[:, width:], None, None
        )
    found_keys, found_values = read(pool, slots)
    assert torch.equal(found_keys, coded(keys, "int8"))
    assert torch.equal(found_values, coded(values, "int4"))


def test_protected_rows_are_exact_in_their_layer_and_head_alone(pool_class: Any) -> None:
    pool, slots = made(pool_class, "range-int2"), torch.tensor([9, 3, 50, 1])
    wanted = torch.zeros(LAYERS, HEADS, 4, dtype=torch.bool)
    wanted[0, 1, 2], wanted[1, 0, :2], wanted[1, 2, 3] = True, True, True
    pool.protected.take(slots, wanted)
    for seed in (1, 2):  # a slot that is written again has the newer row
        values = rows(4, seed)
        write(pool, slots, rows(4, 9), values)
        expected = torch.where(wanted.transpose(1, 2).unsqueeze(-1), values, coded(values, "int2"))
        assert torch.equal(read(pool, slots)[1], expected)
    pool.protected.give_back(slots)
    assert torch.equal(read(pool, slots)[1], coded(values, "int2"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keys_name", ["none", "int4"])
@pytest.mark.parametrize("size", [1, 50, 333])
def test_bytes_are_those_of_all_tensors(pool_class: Any, name: str, keys_name: str, size: int) -> None:
    pool = made(pool_class, name, keys_name, size)
    of_keys, of_values = pool.get_kv_size_bytes()
    assert of_keys + of_values == allocated_bytes(pool)
    assert of_keys == allocated_bytes(pool.k_buffer)
    assert of_values == allocated_bytes(pool.v_buffer, pool.protected)
    assert pool.mem_usage == pytest.approx((of_keys + of_values) / 2**30)


@pytest.mark.parametrize(("name", "capacity"), [("range-int4", 5 + 2 * (2 * 3 + 4)), ("int4", None)])
def test_rows_to_protect_with(pool_class: Any, name: str, capacity: int | None) -> None:
    """A tenth of 51 slots; for two requests, four sinks and twice the three newest tokens each."""
    pool = made(pool_class, name)
    if capacity is None:
        assert pool.protected is None
        return
    assert capacity <= pool.protected.capacity <= capacity + 1
    assert pool.protected.index.shape == (LAYERS, SIZE + 1, HEADS)
    for layer, buffer in enumerate(pool.v_buffer):
        assert buffer.index.data_ptr() == pool.protected.index[layer].data_ptr()
        assert buffer.rows.data_ptr() == pool.protected.rows[layer].data_ptr()


@pytest.mark.parametrize("keys_name", ["none", "int8"])
def test_buffers_are_what_readers_ask_for(pool_class: Any, keys_name: str) -> None:
    pool = made(pool_class, "range-int4", keys_name)
    keys, values = pool.get_kv_buffer(FIRST_LAYER + 1)
    assert isinstance(values, PackedBuffer)
    assert isinstance(keys, torch.Tensor if keys_name == "none" else PackedBuffer)
    assert keys.shape == values.shape == (SIZE + 1, HEADS, HEAD_DIM)
    assert keys.dtype == values.dtype == DTYPE
    assert keys is pool.k_buffer[1]
    assert pool.dtype == pool.store_dtype == torch.uint8
    kinds = pool.movable()
    assert [len(kind) for kind in kinds] == [LAYERS] * (4 if keys_name == "none" else 6)
    for kind in kinds:
        for tensor in kind:
            assert tensor.shape[:2] == (SIZE + 1, HEADS)
    assert allocated_bytes(kinds) == allocated_bytes(pool) - allocated_bytes(pool.protected)


@pytest.mark.parametrize("keys_name", ["none", "int4"])
@pytest.mark.parametrize("integers", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_moved_slots_take_scales_and_protected_rows_along(
    pool_class: Any, keys_name: str, integers: torch.dtype
) -> None:
    pool, every = made(pool_class, "range-int4", keys_name), torch.arange(1, SIZE + 1)
    rng = random.Random(3)
    for trial in range(12):
        pool.protected.clear()
        protected = torch.tensor(rng.sample(range(1, SIZE + 1), 10))
        drawn = torch.rand(LAYERS, HEADS, 10, generator=torch.Generator().manual_seed(trial)) < 0.5
        pool.protected.take(protected, drawn)
        write(pool, every, rows(SIZE, trial), rows(SIZE, trial + 100))
        before, held = read(pool, every), pool.protected.holds(every)
        count = rng.randint(1, 12)
        source = rng.sample(range(1, SIZE + 1), count)
        others = [slot for slot in range(1, SIZE + 1) if slot not in source]
        # Apart, or such that targets are sources too, down to all of them in a circle.
        target = [source[1:] + source[:1], rng.sample(range(1, SIZE + 1), count), rng.sample(others, count)][trial % 3]
        pool.move_kv_cache(torch.tensor(target, dtype=integers), torch.tensor(source, dtype=integers))
        came_from = list(range(1, SIZE + 1))
        for to, from_ in zip(target, source, strict=True):
            came_from[to - 1] = from_
        origin = torch.tensor(came_from) - 1
        for found, old in zip(read(pool, every), before, strict=True):
            assert torch.equal(found, old[:, origin])
        assert torch.equal(pool.protected.holds(every), held[:, :, origin])
    assert int(pool.protected.denied) == 0


def test_moving_without_protection(pool_class: Any) -> None:
    pool, every = made(pool_class, "int2", "int8"), torch.arange(1, SIZE + 1)
    write(pool, every, rows(SIZE, 1), rows(SIZE, 2))
    before = read(pool, every)
    pool.move_kv_cache(torch.tensor([7, 8]), torch.tensor([8, 20]))
    for found, old in zip(read(pool, torch.tensor([7, 8, 20])), before, strict=True):
        assert torch.equal(found, old[:, torch.tensor([8, 20, 20]) - 1])


def test_the_garbage_of_padded_tokens_in_slot_0_reaches_no_other_slot(pool_class: Any) -> None:
    pool, slots = made(pool_class, "range-int4"), torch.tensor([6, 2, 9])
    pool.protected.take(slots)
    keys, values = rows(3, 1), rows(3, 2)
    write(pool, slots, keys, values)
    padded = torch.tensor([0, 0, 12, 0, 0])
    garbage = torch.full((LAYERS, 5, HEADS, HEAD_DIM), torch.nan, dtype=DTYPE)
    good = rows(1, 3)
    garbage[:, 2] = good[:, 0]
    write(pool, padded, garbage, garbage)
    assert torch.equal(read(pool, slots)[1], values)
    assert torch.equal(read(pool, torch.tensor([12]))[1], coded(good, "int4"))
    assert not pool.protected.holds(torch.tensor([0, 12])).any()
    assert pool.protected.taken.unique().tolist() == [3]
    free = pool.protected.capacity - 3
    others = torch.arange(20, 20 + free)
    pool.protected.take(others)  # none of these rows is the one that garbage went to
    assert pool.protected.holds(others).all()
    write(pool, torch.tensor([0, 0, 0]), garbage[:, :3], garbage[:, :3])
    assert not pool.protected.rows[:, :-1].isnan().any()


@pytest.mark.parametrize("name", ["get_cpu_copy", "load_cpu_copy", "get_contiguous_buf_infos", "get_device_pool_infos"])
def test_what_would_need_the_plain_layout_is_not_there(pool_class: Any, name: str) -> None:
    arguments = {"get_cpu_copy": ([1],), "load_cpu_copy": ([], [1])}.get(name, ())
    with pytest.raises(NotImplementedError, match="kvpolicy: a packed KV cache has no copy outside its pool"):
        getattr(made(pool_class, "int4"), name)(*arguments)


def test_the_other_door_for_writing_is_closed(pool_class: Any) -> None:
    """SGLang writes the accepted tokens of a draft through it."""
    pool, slots = made(pool_class, "int4"), torch.tensor([[1, 2], [3, 4]])
    keys, values = rows(4, 1), rows(4, 2)
    layer = SimpleNamespace(layer_id=FIRST_LAYER)
    with pytest.raises(TypeError):
        pool.set_kv_buffer_prefix_valid(layer, slots, torch.tensor([1, 2]), keys[0], values[0])


@pytest.mark.parametrize(
    ("changed", "sentence"), [({"page_size": 16}, "must be 1"), ({"post_capture_active": True}, "cannot be packed")]
)
def test_pools_that_cannot_be_packed_are_not_built(pool_class: Any, changed: dict[str, Any], sentence: str) -> None:
    fitted = CacheFormat("int4").fitted(HEAD_DIM)

    def changing(*args: Any, **kw: Any) -> Any:
        return pool_class(*args, **{**kw, **changed}, cache_format=fitted, requests=1, recent=1)

    with pytest.raises(AssertionError, match=sentence):
        built(changing, 16, layers=1, heads=1, head_dim=HEAD_DIM, dtype=DTYPE)
