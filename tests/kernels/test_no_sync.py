"""No paged operation waits for the device: while the host prepares the next launch, the last one runs.

On a CUDA device PyTorch itself reports a wait. Without one, what would be a wait is looked for in two ways: in what a
call does (a tensor read by the host, a shape that depends on data) and in the text (copies from the host that block).
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from kernel_cases import OPERATIONS, Workload, plain_name
from kernel_rounds import evict
from kernel_speed import TINY

from kvpolicy.kernels.gumbel_keys_paged import uniform_paged
from kvpolicy.kernels.pack_rows_paged import pack_rows_paged
from kvpolicy.kernels.packed_attention import packed_attention
from kvpolicy.kernels.packed_buffer import PackedBuffer
from kvpolicy.kernels.unpack_rows_paged import unpack_rows_paged
from kvpolicy.policies.registry import POLICIES

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
WITH_KERNELS = ("vase-dkv", "vase-attnv", "snapkv", "curdkv", "random", "evict-large-range", "evict-small-range")
CALLS: dict[str, Callable[[Workload], object]] = {
    name: lambda work, case=case: case(work).run() for name, case in OPERATIONS.items()
}


def packed(work: Workload) -> PackedBuffer:
    """As large as a layer of the workload's values; none of its rows is protected. Made on the device."""
    (slots, heads, head_dim), dtype, device = work.values.shape[1:], work.values.dtype, work.values.device
    codes = torch.zeros(slots, heads, head_dim // 2, dtype=torch.uint8, device=device)
    scale, minimum = torch.zeros(2, slots, heads, 1, dtype=dtype, device=device)
    index = torch.full((slots, heads), -1, dtype=torch.int32, device=device)
    return PackedBuffer(
        codes, scale, minimum, 4, head_dim, index, torch.zeros(3, heads, head_dim, dtype=dtype, device=device)
    )


def attend_packed(work: Workload) -> torch.Tensor:
    """The newest query of each request in the first layer; its slots are the rows of SGLang's table."""
    table = work.rows.slots.view(work.requests, -1).int()
    rows = torch.arange(work.requests, device=table.device)
    queries, keys = work.queries[:, 0, :, -1], work.keys.buffers[0]
    lengths = torch.full_like(rows, table.shape[1])
    return packed_attention(queries, keys, packed(work), table, rows, lengths, 0.25, use_triton=True)


CALLS["uniform"] = lambda work: uniform_paged(work.rows, work.seeds, work.evictions, work.layer_ids, 2)
CALLS["pack_rows"] = lambda work: pack_rows_paged(packed(work), work.rows.slots, work.values.buffers[0])
CALLS["unpack_rows"] = lambda work: unpack_rows_paged(packed(work), work.rows.slots)
# Operations whose names do not say that they are paged.
OTHERS: dict[str, Callable[[Workload], object]] = {
    "packed_attention": attend_packed,
    "PackedBuffer.write": lambda work: packed(work).write(work.rows.slots, work.values.buffers[0]),
}
CALLS |= OTHERS
CALLS |= {f"a round of {name}": functools.partial(evict, POLICIES[name]()()) for name in WITH_KERNELS}

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
METHODS = {"item", "tolist", "cpu", "cuda", "numpy", "nonzero", "masked_select", "unique", "unique_consecutive"}


class Waits(AssertionError):
    """What would make the host wait for a device."""


class NoWait(TorchDispatchMode):
    """Raises Waits at an operation that would wait for a CUDA device; not within `launches`."""

    launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        by_mask = packet in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1])
        unsized = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if not self.launching and (packet in WAITING or by_mask or unsized):
            raise Waits(str(func))
        return func(*args, **kwargs)


@contextmanager
def no_wait() -> Iterator[None]:
    """On the CPU: raise where a wait would be. What Triton's interpreter does in place of a launch does not count."""
    from triton.runtime.interpreter import GridExecutor

    mode, launch = NoWait(), GridExecutor.__call__

    def launching(executor: Any, *args: Any, **kwargs: Any) -> Any:
        mode.launching = True
        try:
            return launch(executor, *args, **kwargs)
        finally:
            mode.launching = False

    def refusing(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def refused(*args: Any, **kwargs: Any) -> Any:
            if not mode.launching:
                raise Waits(f"Tensor.{name}")
            return method(*args, **kwargs)

        return refused

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(GridExecutor, "__call__", launching)
        for name in ("tolist", "cpu", "numpy"):  # which PyTorch does not dispatch on the CPU
            patch.setattr(torch.Tensor, name, refusing(name))
        yield


@contextmanager
def no_cuda_wait() -> Iterator[None]:
    """On a CUDA device: PyTorch raises where it waits."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("name", CALLS)
def test_an_operation_waits_for_nothing(name: str, device: torch.device) -> None:
    work = Workload(TINY, 2, device)
    if device.type == "cuda":
        CALLS[name](work)  # compiled
    with no_cuda_wait() if device.type == "cuda" else no_wait():
        CALLS[name](work)


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(lambda x: x.sum().item(), id="item"),
        pytest.param(lambda x: int(x[0]), id="int"),
        pytest.param(lambda x: bool(x.any()), id="bool"),
        pytest.param(lambda x: x[x > 0], id="boolean index"),
        pytest.param(lambda x: x.clone().index_put_((x > 0,), x[:1]), id="boolean assignment"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: x.masked_select(x > 0), id="masked_select"),
        pytest.param(lambda x: x.long().repeat_interleave(x.long()), id="repeat_interleave"),
        pytest.param(lambda x: torch.equal(x, x), id="equal"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.cpu(), id="cpu"),
        pytest.param(lambda x: x.numpy(), id="numpy"),
    ],
)
def test_a_wait_is_found(waits: Callable[[torch.Tensor], object]) -> None:
    pytest.importorskip("triton")
    with pytest.raises(Waits), no_wait():
        waits(torch.ones(3))
    assert torch.ones(3).tolist() == [1, 1, 1]


def host_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions of a module that run on the host, references aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.endswith("_reference"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any(decorator.startswith("triton.jit") for decorator in decorators):
                yield node


def blocking(function: ast.FunctionDef) -> list[str]:
    """Calls in it that wait for a device: reads, and copies that block."""
    found = []
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name, owner = call.func.attr, ast.unparse(call.func.value)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        arguments = [ast.unparse(argument) for argument in call.args]
        to_device = name == "to" and "device" in " ".join([*arguments, *keywords])
        from_host = owner == "torch" and name in ("tensor", "as_tensor") and "device" in keywords
        blocks = to_device and keywords.get("non_blocking") != "True"
        shaped_by_data = owner == "torch" and name == "where" and len(arguments) == 1
        if name in METHODS or from_host or blocks or shaped_by_data:
            found.append(ast.unparse(call))
    return found


def test_no_round_copies_and_waits() -> None:
    """All of the operations and of what is theirs alone in policies and plugin; by name in the other files."""
    whole = ("paged.py", "*_paged.py", "*_paged_kernel.py", "keyed_noise.py", "packed_attention.py")
    whole += ("packed_attention_kernel.py", "pack_rows.py")
    paths = [path for pattern in whole for path in KERNELS.glob(pattern)]
    paths += [ROOT / "policies" / "paged.py", ROOT / "sglang_plugin" / "paged_round.py"]
    functions = {
        f"{path.parent.name}.{path.stem}.{function.name}": blocking(function)
        for path in {*paths, *(ROOT / "policies").glob("*.py")}
        for function in host_functions(ast.parse(path.read_text()))
        if path in paths or function.name.endswith("_paged")
    }
    assert {"kernels.compact_paged.compact_paged", "policies.vase_attnv.select_paged"} <= functions.keys()
    assert {name: calls for name, calls in functions.items() if calls} == {}


@pytest.mark.parametrize(
    "text",
    ["x.to(device)", "x.to(y.device, torch.int64)", "torch.tensor([1], device=x.device)", "x.cuda()", "torch.where(x)"],
)
def test_a_copy_that_waits_is_found(text: str) -> None:
    (function,) = host_functions(ast.parse(f"def f(x, y, device):\n    {text}"))
    assert blocking(function) == [text]


@pytest.mark.parametrize("text", ["x.to(device, non_blocking=True)", "x.to(torch.int64)", "torch.where(x, 0, 1)"])
def test_what_does_not_wait_is_no_find(text: str) -> None:
    (function,) = host_functions(ast.parse(f"def f(x, device):\n    {text}"))
    assert blocking(function) == []


def test_every_paged_operation_is_called() -> None:
    defined = {
        function.name.removesuffix("_paged")
        for path in KERNELS.glob("*.py")
        for function in host_functions(ast.parse(path.read_text()))
        if function.name.endswith("_paged") and not function.name.startswith("_")
    }
    paged = CALLS.keys() - OTHERS.keys()
    assert defined == {plain_name(name) for name in paged if not name.startswith("a round")}
