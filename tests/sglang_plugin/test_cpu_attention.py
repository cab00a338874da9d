"""The batched CPU backend against SGLang's own `torch_native`, on pools that are plain tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvpolicy.sglang_plugin import cpu_attention
from kvpolicy.sglang_plugin.cpu_attention import CPUAttentionBackend
from kvpolicy.sglang_plugin.cpu_platform import TorchCPUPlatform

LAYERS, KV_HEADS, GROUP, HEAD_DIM, SLOTS, ROWS, LONGEST = 3, 2, 3, 16, 900, 6, 400
HEADS = KV_HEADS * GROUP
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Layer(SimpleNamespace):
    """What is read of SGLang's `RadixAttention`."""

    def __init__(self, number: int, **changed: Any) -> None:
        plain = {
            "layer_id": number,
            "tp_q_head_num": HEADS,
            "tp_k_head_num": KV_HEADS,
            "qk_head_dim": HEAD_DIM,
            "v_head_dim": HEAD_DIM,
            "scaling": 0.3,
            "logit_cap": 0.0,
            "is_cross_attention": False,
            "attn_type": AttentionType.DECODER,
            "sliding_window_size": -1,
        }
        super().__init__(**{**plain, **changed})


class Pool:
    """Keys and values of each layer; slots that nobody wrote to hold NaN."""

    def __init__(self, dtype: torch.dtype, value_dim: int) -> None:
        self.keys, self.values = (
            [torch.full((SLOTS, KV_HEADS, width), torch.nan, dtype=dtype) for _ in range(LAYERS)]
            for width in (HEAD_DIM, value_dim)
        )

    def get_key_buffer(self, number: int) -> torch.Tensor:
        return self.keys[number]

    def get_value_buffer(self, number: int) -> torch.Tensor:
        return self.values[number]

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        for buffers, new in ((self.keys, k), (self.values, v)):
            buffers[layer.layer_id][where.loc] = new.to(buffers[layer.layer_id].dtype)


class Two:
    """Both backends, each on a pool of its own, and the text of each row so far."""

    def __init__(self, dtype: torch.dtype = torch.float32, value_dim: int = HEAD_DIM) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.dtype, self.value_dim = dtype, value_dim
        self.table = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        self.free = torch.randperm(SLOTS, generator=self.generator).tolist()
        self.lengths = [0] * ROWS
        self.native, self.ours = (
            kind(
                SimpleNamespace(
                    device="cpu",
                    req_to_token_pool=SimpleNamespace(req_to_token=self.table),
                    token_to_kv_pool=Pool(dtype, value_dim),
                )
            )
            for kind in (TorchNativeAttnBackend, CPUAttentionBackend)
        )

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def batch(self, new: dict[int, int], mode: ForwardMode) -> Any:
        """A `ForwardBatch` in which each row of `new` gets that many tokens."""
        before = [self.lengths[row] for row in new]
        slots = []
        for row, count in new.items():
            own = [self.free.pop() for _ in range(count)]
            self.table[row, self.lengths[row] : self.lengths[row] + count] = torch.tensor(own, dtype=torch.int32)
            self.lengths[row] += count
            slots += own
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(new),
            req_pool_indices=torch.tensor(list(new)),
            seq_lens=torch.tensor([self.lengths[row] for row in new]),
            extend_prefix_lens=torch.tensor(before),
            extend_prefix_lens_cpu=before,
            extend_seq_lens=torch.tensor(list(new.values())),
            extend_seq_lens_cpu=list(new.values()),
            out_cache_loc=torch.tensor(slots),
            encoder_lens=None,
            encoder_out_cache_loc=None,
        )

    def forward(self, batch: Any, plan: bool = True, **changed: Any) -> None:
        """One pass over all layers through both; outputs and pools must be alike."""
        if plan:
            for backend in (self.native, self.ours):
                backend.init_forward_metadata(batch)
        for number in range(LAYERS):
            layer, tokens = Layer(number, v_head_dim=self.value_dim, **changed), len(batch.out_cache_loc)
            q = self.draw(tokens, HEADS * HEAD_DIM)
            k, v = (self.draw(tokens, KV_HEADS, width) for width in (HEAD_DIM, self.value_dim))
            expected, found = (each.forward(q, k, v, layer, batch) for each in (self.native, self.ours))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=BOUND[self.dtype], atol=BOUND[self.dtype])
            pools = self.native.token_to_kv_pool, self.ours.token_to_kv_pool
            for buffers in ("keys", "values"):
                native, ours = (getattr(pool, buffers)[number] for pool in pools)
                torch.testing.assert_close(ours, native, rtol=0, atol=0, equal_nan=True)

    def prefill(self, new: dict[int, int], **changed: Any) -> None:
        self.forward(self.batch(new, ForwardMode.EXTEND), **changed)

    def decode(self, *rows: int, **changed: Any) -> None:
        self.forward(self.batch(dict.fromkeys(rows, 1), ForwardMode.DECODE), **changed)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the backend did itself, in order."""
    made: list[str] = []
    for name in ("plan_decode", "causal_mask", "batched_decode_attention", "prefill_attention"):
        original = getattr(cpu_attention, name)

        def counted(*arguments: Any, name: str = name, original: Any = original) -> Any:
            made.append(name)
            return original(*arguments)

        monkeypatch.setattr(cpu_attention, name, counted)
    return made


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 24])
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_cold_and_warm_prefills_and_decode_steps_are_those_of_torch_native(dtype: torch.dtype, value_dim: int) -> None:
    both = Two(dtype, value_dim)
    both.prefill({4: 63})
    both.prefill({1: 1, 4: 40, 0: 111, 5: 1})  # two are new, one goes on, one has a single token
    for rows in [(4, 1, 0), (5,), (0, 5, 4, 1), (1, 4), (0, 5, 4, 1)]:
        both.decode(*rows)
    both.prefill({1: 7, 0: 1})
    both.decode(1, 0, 4)


def test_a_mixed_batch_is_a_prefill_of_which_some_rows_get_one_token() -> None:
    both = Two()
    both.prefill({2: 30, 3: 9})
    both.forward(both.batch({0: 12, 3: 1, 2: 1}, ForwardMode.MIXED))


def test_a_pass_is_planned_once_for_all_layers(calls: list[str]) -> None:
    both = Two()
    both.prefill({2: 30, 3: 9})
    assert calls == ["causal_mask"] + ["prefill_attention"] * 2 * LAYERS
    calls.clear()
    for _ in range(2):
        both.decode(2, 3)
    assert calls == (["plan_decode"] + ["batched_decode_attention"] * LAYERS) * 2


def test_a_batch_that_nobody_announced_is_planned_all_the_same(calls: list[str]) -> None:
    both = Two()
    both.prefill({2: 30, 3: 9})
    both.decode(2, 3)
    both.forward(both.batch({3: 1}, ForwardMode.DECODE), plan=False)
    assert calls.count("plan_decode") == 2


def test_a_batch_that_is_announced_again_is_planned_again(calls: list[str]) -> None:
    both = Two()
    both.prefill({2: 30, 3: 9})
    batch = both.batch({2: 1, 3: 1}, ForwardMode.DECODE)
    both.forward(batch)
    batch.seq_lens = batch.seq_lens - 5  # as after an eviction
    both.forward(batch)
    assert calls.count("plan_decode") == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window_size": 10},
        {"logit_cap": 30.0},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"is_cross_attention": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_kinds_of_attention_are_left_to_torch_native(changed: dict[str, Any], calls: list[str]) -> None:
    both = Two()
    both.prefill({2: 30, 3: 9})
    calls.clear()
    for new, mode in [({2: 3, 3: 1}, ForwardMode.EXTEND), ({2: 1, 3: 1}, ForwardMode.DECODE)]:
        batch = both.batch(new, mode)
        batch.encoder_out_cache_loc = batch.out_cache_loc
        both.forward(batch, **changed)
    assert calls == []


def test_a_decoder_beside_an_encoder_is_left_to_torch_native(calls: list[str]) -> None:
    both = Two()
    both.prefill({2: 30, 3: 9})
    calls.clear()
    batch = both.batch({2: 1, 3: 1}, ForwardMode.DECODE)
    batch.encoder_lens, batch.seq_lens = torch.tensor([4, 2]), batch.seq_lens - torch.tensor([4, 2])
    both.forward(batch)
    assert calls == []


def test_a_cache_of_another_dtype_is_left_to_torch_native(calls: list[str]) -> None:
    both = Two()
    for backend in (both.native, both.ours):
        backend.token_to_kv_pool = Pool(torch.bfloat16, HEAD_DIM)
    both.prefill({2: 30})
    both.decode(2)
    assert calls == []


def test_sglang_calls_the_method_that_is_hooked() -> None:
    from kvpolicy.sglang_plugin import support

    support.check_attention(object.__new__(CPUAttentionBackend))


def test_the_platform_makes_it_the_default_and_known_by_name() -> None:
    platform = TorchCPUPlatform()
    name = platform.get_default_attention_backend()
    assert name in ATTENTION_BACKEND_CHOICES
    platform.init_backend()
    assert ATTENTION_BACKENDS[name] is CPUAttentionBackend
