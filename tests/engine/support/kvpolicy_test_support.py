"""An SGLang plugin for the engine tests: a policy that only permutes, a probe, and a saboteur.

Its folder is put on PYTHONPATH, so that every process of an engine loads it like any installed plugin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvpolicy.policies.base import Candidates, Noise, Policy


@dataclass(frozen=True)
class Permute(Policy):
    """Evicts nothing: every `period` tokens each layer and head gets its own random order of all slots."""

    name: ClassVar[str] = "permute"

    def due(self, resident: int, budget: int, period: int, *, evicted: int = 0) -> bool:
        return resident % period == 0

    def n_keep(self, resident: int, budget: int, *, evicted: int = 0) -> int:
        return resident

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        return noise.uniform(*candidates.shape[1:]).argsort(-1)


def before_forward(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Append one JSON line for each decode step: lengths, positions, free slots, a digest of the rows' heads."""
    if not forward_batch.forward_mode.is_decode():
        return
    rows = runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
    prefix = int(os.environ["KVPOLICY_TEST_PREFIX"])
    line = {
        "positions": forward_batch.positions.tolist(),
        "resident": forward_batch.seq_lens.tolist(),
        "free": runner.token_to_kv_pool_allocator.available_size(),
        "slots": rows[:, :prefix].tolist(),
        "digest": [_digest(runner, row[:prefix].long()) for row in rows],
        "protected": _protected(runner),
        "attention": type(runner.attn_backend).__name__,
    }
    with Path(os.environ["KVPOLICY_TEST_PROBE"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _digest(runner: Any, slots: torch.Tensor) -> str:
    pool = runner.token_to_kv_pool_allocator.get_kvcache()
    buffers = [*pool.k_buffer, *pool.v_buffer]
    return hashlib.sha256(b"".join(buffer[slots].numpy().tobytes() for buffer in buffers)).hexdigest()


def _protected(runner: Any) -> list[int]:
    """The fewest and the most protected rows that a layer and head has taken, and all there are."""
    rows = getattr(runner.token_to_kv_pool_allocator.get_kvcache(), "protected", None)
    return [] if rows is None else [int(rows.taken.min()), int(rows.taken.max()), rows.capacity]


def sabotage(paths: str, how: str) -> None:
    """Break functions of SGLang for this process: `unhooked`, or one as `missing` or with another `signature`."""
    if how == "unhooked":  # SGLang logs the failure and goes on
        from sglang.srt.plugins.hook_registry import HookRegistry

        apply = HookRegistry._apply_target.__func__

        def refuse(cls: type, target: str, hooks: list[Any]) -> None:
            if target in paths.split():
                raise RuntimeError("sabotaged")
            apply(cls, target, hooks)

        HookRegistry._apply_target = classmethod(refuse)
        return
    owner_path, _, name = paths.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    if how == "missing":
        delattr(owner, name)
    else:
        setattr(owner, name, lambda renamed: None)


def interpret_kernels() -> None:
    """Have Triton's interpreter stand in for its compiler in this process, until it ends."""
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.kernels.interpreting import interpreted

    _held.enter_context(interpreted())


_held = contextlib.ExitStack()


def register() -> None:
    if "KVPOLICY_TEST_INTERPRET" in os.environ and multiprocessing.parent_process() is not None:
        interpret_kernels()
    if "KVPOLICY_TEST_PROBE" in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(
            "sglang.srt.model_executor.model_runner.ModelRunner.forward", before_forward, HookType.BEFORE
        )
    if "KVPOLICY_TEST_SABOTAGE" in os.environ:
        where, paths, how = os.environ["KVPOLICY_TEST_SABOTAGE"].split("|")
        if where == "everywhere" or multiprocessing.parent_process() is not None:
            sabotage(paths, how)
