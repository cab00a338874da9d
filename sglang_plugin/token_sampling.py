"""Tokens sampled with a seed of the request, where SGLang draws from one stream for the whole batch.

SGLang reads `sampling_seed` only under deterministic inference, which its torch-native backend does not
offer, and then for all requests of a batch. Here `SamplingBatchInfo.sampling_seed`, which SGLang keeps
in step with the batch, carries each request's seed, or -1 for none, and the plugin draws for those
that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvpolicy.kernels.seeded_sampling import filtered_weights, sample_tokens

NO_SEED = -1
SGLANG_DEFAULT_SEED = 42  # what SGLang gives all others under deterministic inference


class TokenSampling:
    """Hooks of one scheduler process; does nothing until a request comes with a seed."""

    def __init__(self, seed_of: Callable[[Any], int | None]) -> None:
        self._seed_of = seed_of
        self._in_use = False

    def after_from_schedule_batch(self, info: Any, _cls: type, batch: Any, *_: Any) -> None:
        """Note the seeds of the requests of a new batch; under deterministic inference all have one."""
        default = NO_SEED if info.sampling_seed is None else SGLANG_DEFAULT_SEED
        seeds = [self._seed_of(req) for req in batch.reqs]
        values = [default if seed is None else seed for seed in seeds]
        self._in_use |= any(value != NO_SEED for value in values)
        info.sampling_seed = torch.tensor(values, dtype=torch.int64).to(info.device, non_blocking=True)

    def around_sample_from_probs(
        self, original: Callable[..., Any], sampler: Any, probs: torch.Tensor, info: Any, positions: Any, simple: bool
    ) -> Any:
        """Let SGLang draw for all, and replace what it drew for requests with a seed.

        Which requests have one is known on the device only, so that no step waits for it.
        """
        seeds, info.sampling_seed = info.sampling_seed, None
        try:
            tokens, mask = original(sampler, probs, info, positions, simple)
        finally:
            info.sampling_seed = seeds
        if not self._in_use:
            return tokens, mask

        def drawn(rows: Any) -> torch.Tensor:
            weights = probs[rows]
            if not simple:
                weights = filtered_weights(weights, info.top_ks[rows], info.top_ps[rows], info.min_ps[rows])
            return sample_tokens(weights, seeds[rows], positions[rows]).to(tokens.dtype)

        seeded = seeds != NO_SEED
        # A look at the seeds waits for nothing on a CPU, and sorting a vocabulary takes long there.
        if tokens.device.type == "cpu":
            rows = seeded.nonzero().flatten()
            chosen = tokens.index_copy(0, rows, drawn(rows))
        else:
            chosen = torch.where(seeded, drawn(slice(None)), tokens)
        return chosen, mask and mask._replace(selected_weight=None)
