"""Decode attention over a part of the cache, for requests whose policy reads a part and evicts nothing.

It stands around ``AttentionBackend.forward``. In a decode step the requests that read a part in this layer are taken
out of the batch: their new keys and values are written to the pool, exactly the rows that each head chose are gathered
from it, and attention runs over these. All other requests, and those that read everything in this layer, go through
SGLang's own backend as a batch of their own; a step in which nobody reads a part is SGLang's, untouched.

What a step reads is counted from the indices that attention is given. The choice itself reads page summaries beside.

It runs in Python at every layer of every decode step, so nothing of it can be part of a captured graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvpolicy.kernels.packed_buffer import Buffer
from kvpolicy.kernels.page_attention import page_attention
from kvpolicy.policies.base import Policy
from kvpolicy.policies.reading import Reader, ReadingPolicy, Rotary, ServedModel
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.pools import Pools
from kvpolicy.sglang_plugin.reads import Reads, reads_of
from kvpolicy.sglang_plugin.request_settings import RequestSettings

# Tokens whose keys are summarised at a time: all complete pages of a prompt are, at its first decode step.
CHUNK = 4096
# What of a decode batch has one row per request.
_PER_REQUEST = (
    "input_ids",
    "req_pool_indices",
    "seq_lens",
    "seq_lens_cpu",
    "out_cache_loc",
    "positions",
    "orig_seq_lens",
)


@dataclass(eq=False)
class _Step:
    """One reading request in the decode step under way."""

    row: int  # in the batch
    req: Any
    reads: Reads
    reader: Reader
    budget: int
    length: int
    slots: torch.Tensor | None = None  # int64 [length], oldest token first; known once the forward pass runs
    tokens: float = 0.0  # read so far, mean over heads, summed over layers


class PartialAttention:
    """Partial decode attention of one scheduler process.

    Parameters
    ----------
    policies : all that requests may choose, reading ones or not
    settings_of : the settings of a `Req`
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        settings_of: Callable[[Any], RequestSettings],
        pools: Pools,
        model: ServedModel,
    ) -> None:
        self._settings_of = settings_of
        self._pools = pools
        self._readers: dict[Policy, Reader] = {
            policy: policy.reader(model) for policy in policies if isinstance(policy, ReadingPolicy)
        }
        self._steps: list[_Step] = []
        self._requests, self._layers_done = 0, 0
        self._batch: Any = None  # the one that the backend's metadata is of, if not SGLang's own
        self._batch_rows: tuple[int, ...] | None = None

    @classmethod
    def of_model(
        cls,
        policies: Sequence[Policy],
        settings_of: Callable[[Any], RequestSettings],
        pools: Pools,
        model: torch.nn.Module,
        first_kv_head: int,
    ) -> PartialAttention:
        """For SGLang's loaded `model`, whose KV heads in this process begin with `first_kv_head` of the whole model.

        Raises
        ------
        KVPolicyError
            If a policy cannot work with the model.
        """
        from sglang.srt.layers.radix_attention import RadixAttention

        (query_heads,) = {each.tp_q_head_num for each in model.modules() if isinstance(each, RadixAttention)}
        _, kv_heads, head_dim = pools.keys[0].shape
        served = ServedModel(
            len(pools.layers), query_heads, kv_heads, first_kv_head, head_dim, pools.device, rotary_of(model)
        )
        try:
            return cls(policies, settings_of, pools, served)
        except ValueError as error:
            raise KVPolicyError(f"{error}.") from error

    def plan(self, forward_batch: Any, reqs: Sequence[Any]) -> None:
        """A decode step of `reqs` comes next; called when SGLang has made its `ForwardBatch`.

        Raises
        ------
        RuntimeError
            If the step before ran past the hook, so that its reading requests attended to everything.
        """
        if self._steps:
            raise RuntimeError(
                "kvpolicy: a decode step ran without passing through the attention hook, so its requests attended to "
                "all tokens (a captured graph?); start SGLang with --disable-cuda-graph."
            )
        self._requests, self._layers_done, self._batch, self._batch_rows = len(reqs), 0, None, None
        for row, req in enumerate(reqs):
            settings = self._settings_of(req)
            reader = self._readers.get(settings.arm.policy)
            if reader is not None:
                length = int(forward_batch.seq_lens_cpu[row])
                self._steps.append(_Step(row, req, reads_of(req), reader, settings.budget, length))

    def around(
        self,
        attention: Callable[..., torch.Tensor],
        backend: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``AttentionBackend.forward`` of one layer; layers come in ascending order.

        Parameters
        ----------
        attention : SGLang's own, with the parameters that follow
        q : ``[B, H_q * D]``, after RoPE
        k, v : ``[B, H_kv, D]`` of the new tokens; None if they are in the pool already
        """
        if not self._steps or not forward_batch.forward_mode.is_decode():
            return attention(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        index = layer.layer_id - self._pools.layers[0]
        assert index == self._layers_done, f"layer {layer.layer_id} came after {self._layers_done} layers"
        assert len(q) == self._requests, f"{len(q)} tokens came for {self._requests} requests"
        partial = [s for s in self._steps if not s.reader.reads_all(layer.layer_id, s.length, s.budget)]
        if partial:
            assert not kwargs, f"{kwargs = } of attention would be left out"
            assert not layer.logit_cap, f"{layer.logit_cap = } would be left out"
            if save_kv_cache and k is not None:
                self._pools.allocator.get_kvcache().set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
            output = self._of_others(attention, backend, q, k, v, layer, forward_batch, {s.row for s in partial})
            for step in partial:
                output[step.row] = self._attend(step, q[step.row], layer, index)
        else:
            batch = self._planned(backend, forward_batch, None)
            output = attention(backend, q, k, v, layer, batch, save_kv_cache, **kwargs)
        for step in self._steps:
            if step not in partial:
                step.tokens += step.length
        self._layers_done += 1
        if self._layers_done == len(self._pools.layers):
            for step in self._steps:
                step.reads.step(step.length, step.tokens / self._layers_done)
            self._steps = []
        return output

    def _of_others(
        self,
        attention: Callable[..., torch.Tensor],
        backend: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        partial: set[int],
    ) -> torch.Tensor:
        """The output ``[B, H_q * D_v]``, with SGLang's own in all rows but the `partial` ones, which are not written.

        The new keys and values are in the pool.
        """
        output = q.new_empty(len(q), layer.tp_q_head_num * layer.v_head_dim)
        if others := tuple(row for row in range(len(q)) if row not in partial):
            batch = self._planned(backend, forward_batch, others)
            rows = torch.tensor(others, device=q.device)
            new = (None, None) if k is None or v is None else (k[rows], v[rows])
            output[rows] = attention(backend, q[rows], *new, layer, batch, False).view(len(others), -1)
        return output

    def _planned(self, backend: Any, forward_batch: Any, rows: tuple[int, ...] | None) -> Any:
        """The batch of some `rows`, or of all (None), after the backend has prepared its metadata for it."""
        if rows != self._batch_rows:
            self._batch = None if rows is None else _rows_of(forward_batch, rows)
            self._batch_rows = rows
            backend.init_forward_metadata(self._batch or forward_batch)
        return self._batch or forward_batch

    def _attend(self, step: _Step, query: torch.Tensor, layer: Any, index: int) -> torch.Tensor:
        """``[H_q * D_v]``: attention of one request over what its heads choose."""
        if step.slots is None:
            step.slots = self._pools.row(step.req, step.length)
        query, slots = query.view(layer.tp_q_head_num, -1), step.slots
        summaries = self._summaries(step, slots, self._pools.keys[index], layer.layer_id)
        pages = step.reader.choose(query, summaries, step.length, step.budget, layer.layer_id)
        if self._pools.packed is None:
            keys, values = self._pools.movable[0][index], self._pools.movable[1][index]
        else:  # unpacked are all rows of the request; only the chosen ones take part
            keys, values = self._pools.keys[index][slots], self._pools.values[index][slots]
            slots = torch.arange(len(slots), device=slots.device)
        output, read = page_attention(query, keys, values, slots, pages, step.reader.page, layer.scaling)
        step.tokens += read
        return output.flatten()

    @staticmethod
    def _summaries(step: _Step, slots: torch.Tensor, keys: Buffer, layer: int) -> torch.Tensor:
        """``[H_kv, complete pages, S]``; those of pages that were completed since are added."""
        page, known = step.reader.page, step.reads.summaries.get(layer)
        have, complete = 0 if known is None else known.shape[1], step.length // page
        chunk = max(1, CHUNK // page)
        parts = [] if known is None else [known]
        for first in range(have, complete, chunk):
            last = min(first + chunk, complete)
            rows = keys[slots[first * page : last * page]].view(last - first, page, *keys.shape[1:])
            parts.append(step.reader.summarise(rows.permute(2, 0, 1, 3), first, layer))
        summaries = torch.cat(parts, dim=1)
        if have < complete:
            step.reads.summarised(layer, summaries)
        return summaries


def rotary_of(model: torch.nn.Module) -> Rotary | None:
    """The rotary embedding that all layers of SGLang's `model` share; None if there is no single one."""
    found: list[Any] = [module for module in model.modules() if hasattr(module, "cos_sin_cache")]
    if len(found) != 1:
        return None
    (rotary,) = found
    return Rotary(lambda: rotary.cos_sin_cache, interleaved=not rotary.is_neox_style)


def _rows_of(forward_batch: Any, rows: tuple[int, ...]) -> Any:
    """SGLang's decode `ForwardBatch` with some of its requests only."""
    part = copy.copy(forward_batch)
    for name in _PER_REQUEST:
        if (whole := getattr(forward_batch, name)) is not None:
            setattr(part, name, whole[torch.tensor(rows, device=whole.device)])
    part.batch_size, part.seq_lens_sum = len(rows), int(part.seq_lens_cpu.sum())
    return part
