"""The newest queries of each request, recorded as they enter attention.

A ring of `window` queries per row of SGLang's request table and layer; the query at true position p
lies in slot ``p % window``. The buffers are static and indexed by tensors that SGLang keeps at fixed
addresses while it replays a CUDA graph, so a captured decode step records too.

What makes the ring right: a prefill computes at least the last `window` tokens of its text, because a
hit in the radix tree is capped that far before its end (`Runtime.after_max_prefix_len`); positions only
grow; and nothing in the ring depends on which tokens are resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class QueryTaps:
    """Rings of one scheduler process.

    Parameters
    ----------
    layers : ids of the model's layers, contiguous and ascending
    rows : rows of SGLang's request table, its padding row 0 included
    """

    def __init__(
        self,
        window: int,
        layers: tuple[int, ...],
        rows: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window
        self._layers = layers
        self._ring = torch.zeros(len(layers), rows * window, heads, head_dim, dtype=dtype, device=device)
        self._slots: torch.Tensor | None = None  # of the tokens that the forward pass under way records
        self._tokens: torch.Tensor | None = None  # which tokens of the pass those are; None: all
        self._planned = False

    @classmethod
    def of_model(cls, window: int, runner: Any) -> QueryTaps:
        """Rings for the attention layers of SGLang's `ModelRunner`, once its pools exist."""
        from sglang.srt.layers.radix_attention import RadixAttention

        attention = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
        layers = tuple(sorted(module.layer_id for module in attention))
        assert layers == tuple(range(layers[0], layers[0] + len(layers))), f"{layers = } are not contiguous"
        ((heads, head_dim),) = {(module.tp_q_head_num, module.qk_head_dim) for module in attention}
        table = runner.req_to_token_pool.req_to_token
        return cls(window, layers, len(table), heads, head_dim, runner.dtype, table.device)

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one row's rings over this process' layers and query heads."""
        layers, _, heads, head_dim = self._ring.shape
        return layers * self.window * heads * head_dim * self._ring.element_size()

    @property
    def total_bytes(self) -> int:
        return self._ring.nbytes

    def plan_prefill(self, forward_batch: Any) -> None:
        """Work out which tokens of a prefill, or of one chunk of it, are among the newest of their request."""
        self._require_recorded()
        tokens, requests, slots, start = [], [], [], 0
        lengths = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        for request, (before, length) in enumerate(lengths):
            first = max(0, length - self.window)
            tokens.append(torch.arange(start + first, start + length))
            requests.append(torch.full((length - first,), request))
            slots.append(torch.arange(before + first, before + length) % self.window)
            start += length
        device = self._ring.device
        self._tokens, of_request, slot = (
            torch.cat(parts).to(device, non_blocking=True) for parts in (tokens, requests, slots)
        )
        self._slots = forward_batch.req_pool_indices[of_request] * self.window + slot
        self._planned = True

    def record(self, queries: torch.Tensor, layer: int, forward_batch: Any) -> None:
        """Store the queries ``[tokens, H_q * D]`` of one layer of the forward pass under way.

        Called in ascending order of layers. Captured in a CUDA graph of a decode step, it reads the
        graph's own `req_pool_indices` and `positions`.
        """
        index = layer - self._layers[0]
        if forward_batch.forward_mode.is_decode():
            if index == 0:
                rows, positions = forward_batch.req_pool_indices, forward_batch.positions
                self._slots, self._tokens = rows * self.window + positions % self.window, None
        elif self._planned:
            self._planned = index < len(self._layers) - 1
        else:  # SGLang's own dummy prefills, before the first request
            return
        assert self._slots is not None
        queries = queries.view(len(queries), *self._ring.shape[2:])
        self._ring[index].index_copy_(0, self._slots, queries if self._tokens is None else queries[self._tokens])

    def newest(self, row: int, true_len: int, count: int, layers: slice) -> torch.Tensor:
        """``[L, H_q, w, D]``: queries of the newest ``w = min(count, true_len)`` tokens of a row, oldest first.

        Parameters
        ----------
        true_len : tokens of the request whose queries were ever computed
        count : at most `window`
        """
        self._require_recorded()
        assert count <= self.window, f"{count = } queries are more than the {self.window = } that are recorded"
        positions = torch.arange(max(0, true_len - count), true_len, device=self._ring.device)
        return self._ring[layers, row * self.window + positions % self.window].transpose(1, 2)

    def newest_of(self, rows: Sequence[int], true_lens: Sequence[int], count: int) -> torch.Tensor:
        """``[R, L, H_q, count, D]``: the same for several rows, each with at least `count` tokens, in one gather."""
        self._require_recorded()
        assert count <= self.window, f"{count = } queries are more than the {self.window = } that are recorded"
        assert min(true_lens) >= count, f"{true_lens = } must all be at least {count = }"
        row, end = torch.tensor([rows, true_lens])
        positions = end[:, None] - count + torch.arange(count)
        slots = row[:, None] * self.window + positions % self.window
        queries = self._ring[:, slots.to(self._ring.device, non_blocking=True)]
        return queries.permute(1, 0, 3, 2, 4)

    def _require_recorded(self) -> None:
        if self._planned:
            raise RuntimeError(
                "kvpolicy: a prefill ran without passing through the attention hook, so its queries are unknown "
                "(a captured prefill graph?); start SGLang with --disable-prefill-cuda-graph."
            )
