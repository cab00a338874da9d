"""How much the hidden state changes from token to token, in a few layers of the model.

The output of decoder layer ``l`` (residual included) is what SGLang offers layer ``l + 1`` for capture; a forward
pre-hook on that module asks for it. Of each request the newest hidden state of every tapped layer is kept, and one
number per token and band: memory is linear in length, and no attention matrix is involved. The buffers are static and
indexed by tensors that SGLang keeps at fixed addresses while it replays a CUDA graph.

What makes the numbers right: a prefill computes at least the last token of the prompt, because a hit in the radix tree
is capped before it (`Runtime.after_max_prefix_len`), and all tokens after it in order, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpolicy.policies.base import Band


class HiddenTaps:
    """Tables of one scheduler process.

    Parameters
    ----------
    bands : of layers, as policies need them
    depth : layers of the model
    rows, width : of SGLang's request table: requests, its padding row 0 included, and tokens of a request
    hidden_size : elements of a hidden state
    """

    def __init__(
        self,
        bands: Sequence[Band],
        depth: int,
        rows: int,
        width: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bands = {band: band.layers(depth) for band in bands}
        self.layers = tuple(sorted({layer for layers in self._bands.values() for layer in layers}))
        self._width = width
        self._newest = torch.zeros(len(self.layers), rows, hidden_size, dtype=dtype, device=device)
        self._change = torch.zeros(len(bands), rows * width, device=device)
        # Rows of the tokens; the first and the last token of each row.
        self._prefill: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._awaited: set[int] = set()  # layers that the prefill under way has not passed yet

    @classmethod
    def of_model(cls, bands: Sequence[Band], runner: Any) -> HiddenTaps:
        """Tables for SGLang's `ModelRunner`, once its pools exist, and the hooks that fill them."""
        modules: Any = runner.model.model.layers
        table, config = runner.req_to_token_pool.req_to_token, runner.model_config
        rows, width = table.shape
        taps = cls(bands, len(modules), rows, width, config.hidden_size, runner.dtype, table.device)
        for layer in taps.layers:
            modules[layer + 1].register_forward_pre_hook(taps.asking_for(layer), with_kwargs=True)
        return taps

    def asking_for(self, layer: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        """A forward pre-hook of the next layer that has the output of `layer` handed to :meth:`record`."""

        def before_forward(
            _module: Any, args: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            others, forward_batch = keywords.get("capture_output"), args[2]

            def capture(hidden: torch.Tensor, **ownership: bool) -> None:
                self.record(hidden, layer, forward_batch)
                if others is not None:
                    others(hidden, **ownership)

            return args, {**keywords, "capture_output": capture}

        return before_forward

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one row of the tables."""
        newest = self._newest[:, 0].numel() * self._newest.element_size()
        return newest + len(self._change) * self._width * self._change.element_size()

    @property
    def total_bytes(self) -> int:
        return self._newest.nbytes + self._change.nbytes

    def plan_prefill(self, forward_batch: Any) -> None:
        """Note which row each token of a prefill, or of one chunk of it, belongs to."""
        self._require_recorded()
        lengths = torch.tensor(forward_batch.extend_seq_lens_cpu)
        device = self._change.device
        ends = lengths.cumsum(0)
        counts, starts, last = torch.stack([lengths, ends - lengths, ends - 1]).to(device, non_blocking=True)
        rows = forward_batch.req_pool_indices.repeat_interleave(counts, output_size=int(ends[-1]))
        self._prefill, self._awaited = (rows, starts, last), set(self.layers)

    def record(self, hidden: torch.Tensor, layer: int, forward_batch: Any) -> None:
        """Measure the change in `hidden`, ``[tokens, hidden_size]``, the output of one layer in the pass under way."""
        newest = self._newest[self.layers.index(layer)]
        if forward_batch.forward_mode.is_decode():
            rows = forward_batch.req_pool_indices
            before = newest[rows]
            newest.index_copy_(0, rows, hidden)
        elif layer in self._awaited:
            self._awaited.discard(layer)
            assert self._prefill is not None
            rows, starts, last = self._prefill
            before = hidden.roll(1, dims=0)
            before[starts] = newest[rows[starts]]
            newest.index_copy_(0, rows[last], hidden[last])
        else:  # SGLang's own dummy prefills, before the first request
            return
        change = torch.linalg.vector_norm(hidden.float() - before.float(), dim=-1)
        places = rows * self._width + forward_batch.positions
        for table, layers in zip(self._change, self._bands.values(), strict=True):
            if layer == layers[0]:
                table.index_copy_(0, places, change / len(layers))
            elif layer in layers:
                table.index_add_(0, places, change / len(layers))

    def changes(self, row: int, prompt_len: int, true_len: int, bands: Sequence[Band]) -> torch.Tensor:
        """fp32 ``[bands, true_len - prompt_len]``: one request's change at each of its decode tokens."""
        self._require_recorded()
        known = list(self._bands)
        start = row * self._width
        return torch.stack([self._change[known.index(band), start + prompt_len : start + true_len] for band in bands])

    def _require_recorded(self) -> None:
        if self._awaited:
            raise RuntimeError(
                "kvpolicy: a prefill ran without passing its hidden states on, so their change is unknown "
                "(a captured prefill graph?); start SGLang with --disable-prefill-cuda-graph."
            )
