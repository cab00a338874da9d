"""Decode steps of requests that read a part, on pools that are plain tensors, with every text kept beside as a list."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpolicy.policies.base import Policy
from kvpolicy.policies.full import Full
from kvpolicy.policies.quest import Quest
from kvpolicy.policies.reading import Rotary, ServedModel
from kvpolicy.sglang_plugin.arms import Arm
from kvpolicy.sglang_plugin.partial_attention import PartialAttention
from kvpolicy.sglang_plugin.reads import reads_of
from kvpolicy.sglang_plugin.request_settings import RequestSettings
from tests.policies.gate_files import rotary_table

LAYERS, KV_HEADS, GROUP, HEAD_DIM, SLOTS, ROWS, LONGEST = 4, 2, 3, 6, 400, 6, 100
HEADS, SCALING = KV_HEADS * GROUP, 0.4
QUEST, FULL = Quest(page=4, dense_layers=1), Full()
DECODE = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False)
EXTEND = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)


def layer(number: int) -> Any:
    """What is read of SGLang's `RadixAttention`."""
    return SimpleNamespace(
        layer_id=number, tp_q_head_num=HEADS, v_head_dim=HEAD_DIM, logit_cap=0.0, scaling=SCALING, qk_head_dim=HEAD_DIM
    )


class Pools:
    """Slots, rows and the pool that new tokens are written to."""

    layers = tuple(range(LAYERS))
    device = torch.device("cpu")
    packed = None

    def __init__(self) -> None:
        self.keys = [torch.full((SLOTS, KV_HEADS, HEAD_DIM), torch.nan) for _ in range(LAYERS)]
        self.values = [torch.full((SLOTS, KV_HEADS, HEAD_DIM), torch.nan) for _ in range(LAYERS)]
        self.movable = [self.keys, self.values]
        self.table = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        self.allocator = SimpleNamespace(get_kvcache=lambda: self)

    def row(self, req: Any, length: int) -> torch.Tensor:
        return self.table[req.kv.req_pool_idx, :length].to(torch.int64)

    def set_kv_buffer(self, layer: Any, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer.layer_id][slots], self.values[layer.layer_id][slots] = keys, values


class Backend:
    """Full attention as SGLang's plain PyTorch backend does it, request by request; remembers its calls."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.calls: list[tuple[int, Any, bool]] = []
        self.planned: list[list[int]] = []

    def init_forward_metadata(self, batch: Any) -> None:
        self.planned.append(batch.req_pool_indices.tolist())

    def attention(
        self, _self: Any, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        assert len(q) == batch.batch_size == len(batch.seq_lens) == len(batch.out_cache_loc)
        assert batch.seq_lens_sum == int(batch.seq_lens_cpu.sum())
        self.calls.append((layer.layer_id, batch, save_kv_cache))
        if save_kv_cache:
            self.pools.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        output = torch.empty_like(q)
        for i, (row, length) in enumerate(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)):
            slots = self.pools.table[row, :length].long()
            keys, values = (pool[layer.layer_id][slots] for pool in (self.pools.keys, self.pools.values))
            output[i] = full_attention(q[i].view(HEADS, HEAD_DIM), keys, values).flatten()
        return output


def full_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[H_q, D]`` over all of ``[N, H_kv, D]``."""
    attended = scaled_dot_product_attention(
        query[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=SCALING, enable_gqa=True
    )
    return attended[0, :, 0]


class Engine:
    """Prefills and decodes requests as SGLang would, every decode step through :class:`PartialAttention`."""

    def __init__(self, *policies: Policy, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)
        self.pools, self.free = Pools(), list(range(1, SLOTS))
        self.random.shuffle(self.free)
        self.backend = Backend(self.pools)
        rotary = Rotary(lambda: rotary_table(LONGEST, HEAD_DIM))
        model = ServedModel(LAYERS, HEADS, KV_HEADS, 0, HEAD_DIM, Pools.device, rotary)
        pools: Any = self.pools
        self.partial = PartialAttention([FULL, *policies], lambda req: req.settings, pools, model)

    def draw(self, *shape: int) -> torch.Tensor:
        """Whole numbers, so that choices are exact and often tie."""
        return torch.randint(-3, 4, shape, generator=self.generator).float()

    def request(self, row: int, policy: Policy, prompt: int, budget: int = 12) -> Any:
        """A prefilled request in `row`; `keys` and `values` ``[L, N, H_kv, D]`` are its text."""
        settings = RequestSettings(Arm(policy.name, policy.name, "", policy), budget, 4, 0)
        req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row), settings=settings)
        self.prefill(req, prompt)
        return req

    def prefill(self, req: Any, tokens: int) -> None:
        req.keys, req.values = (self.draw(LAYERS, tokens, KV_HEADS, HEAD_DIM) for _ in "kv")
        slots = torch.tensor([self.free.pop() for _ in range(tokens)])
        self.pools.table[req.kv.req_pool_idx, :tokens] = slots.int()
        for number in range(LAYERS):
            self.pools.set_kv_buffer(layer(number), slots, req.keys[number], req.values[number])

    def release(self, req: Any) -> None:
        """Give the row and its slots back; the next owner will find what was there."""
        self.free += self.pools.row(req, req.keys.shape[1]).tolist()
        self.random.shuffle(self.free)
        reads_of(req).forget_pages()

    def batch(self, reqs: list[Any]) -> Any:
        """A decode step's `ForwardBatch`: each request got one more slot."""
        lengths = torch.tensor([req.keys.shape[1] + 1 for req in reqs])
        slots = torch.tensor([self.free.pop() for _ in reqs])
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        self.pools.table[rows, lengths - 1] = slots.int()
        return SimpleNamespace(
            forward_mode=DECODE,
            batch_size=len(reqs),
            input_ids=slots,
            req_pool_indices=rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=slots,
            positions=lengths - 1,
            orig_seq_lens=None,
        )

    def decode(self, *reqs: Any, queries: torch.Tensor | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One step: queries ``[B, H_q, D]``, given or drawn, and outputs ``[B, H_q, D]`` of each layer."""
        batch, layers = self.batch(list(reqs)), []
        self.partial.plan(batch, reqs)
        new = self.draw(2, LAYERS, len(reqs), KV_HEADS, HEAD_DIM)
        for i, req in enumerate(reqs):
            req.keys, req.values = (
                torch.cat([text, new[n, :, i, None]], dim=1) for n, text in enumerate((req.keys, req.values))
            )
        for number in range(LAYERS):
            q = self.draw(len(reqs), HEADS, HEAD_DIM) if queries is None else queries[number]
            output = self.partial.around(
                self.backend.attention, self.backend, q.flatten(1), new[0, number], new[1, number], layer(number), batch
            )
            layers.append((q, output.view(len(reqs), HEADS, HEAD_DIM)))
        return layers


def quest_tokens(query: torch.Tensor, keys: torch.Tensor, page: int, budget: int) -> list[list[int]]:
    """By loops, per query head: the tokens of the best pages and of the newest; `keys` ``[N, H_kv, D]``."""
    tokens, newest, read = len(keys), (len(keys) - 1) // page, []
    for head, q in enumerate(query):
        scores = []
        for number in range(newest):
            of_page = keys[number * page : (number + 1) * page, head // GROUP]
            channels = zip(q.tolist(), of_page.T.tolist(), strict=True)
            scores.append(sum(max(x * max(c), x * min(c)) for x, c in channels))
        best = sorted(range(newest), key=lambda number: (-scores[number], number))[: budget // page - 1]
        chosen = {*best, newest}
        read.append([t for t in range(tokens) if t // page in chosen])
    return read


def check_quest(req: Any, number: int, query: torch.Tensor, output: torch.Tensor) -> float:
    """Compare one layer's output of a request under `QUEST`; returns the tokens read, mean over heads."""
    keys, values = req.keys[number], req.values[number]
    budget, length = req.settings.budget, len(keys)
    if number < QUEST.dense_layers or length <= budget:
        torch.testing.assert_close(output, full_attention(query, keys, values))
        return length
    read = quest_tokens(query, keys, QUEST.page, budget)
    for head, tokens in enumerate(read):
        own = slice(head // GROUP, head // GROUP + 1)
        expected = full_attention(query[head : head + 1], keys[tokens, own], values[tokens, own])
        torch.testing.assert_close(output[head : head + 1], expected, rtol=1e-5, atol=1e-6)
    return sum(map(len, read)) / HEADS
