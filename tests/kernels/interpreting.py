"""Triton's interpreter, for a test at a time.

Importing Triton with TRITON_INTERPRET=1 would be the usual way, but it decides for the whole process, SGLang's kernels
and engines included, and an earlier import of Triton decides before it. Here kernels are compiled ones for everybody
else, and the interpreter stands in for them until the end of a block.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.kernels.compiling import Launch

KERNELS = Path(__file__).parents[2] / "kernels"


@functools.cache
def kernel_modules() -> tuple[Any, ...]:
    """Every module of `kvpolicy.kernels` that defines kernels or helper functions of theirs."""
    names = sorted(path.stem for path in KERNELS.glob("*.py") if "import triton" in path.read_text())
    return tuple(importlib.import_module(f"kvpolicy.kernels.{name}") for name in names)


@functools.cache
def stand_in(source: Callable[..., Any]) -> Any:
    """The interpreter's version of a function; one object for each, for the interpreter compares them."""
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(source)


class Writes(defaultdict[Any, list[Any]]):
    """The addresses that each program of a launch has stored to."""

    def __init__(self) -> None:
        super().__init__(list)

    def check(self, kernel: str) -> None:
        """No two programs may store to one address: on a GPU, where they run at once, either could win."""
        each = [numpy.unique(numpy.concatenate(addresses)) for addresses in self.values()]
        if each:
            assert len(together := numpy.concatenate(each)) == len(numpy.unique(together)), (
                f"programs of {kernel} store to the same address: a mask is missing, or they race"
            )


def poison(pointers: Any) -> Any:
    """What the interpreter takes for the values at these addresses: NaN, or the largest integer."""
    from triton.runtime import interpreter

    element = pointers.get_element_ty()
    kind = interpreter._get_np_dtype(element)  # bf16 is held as uint16, whose largest is a NaN of bf16
    value = numpy.nan if kind.kind == "f" else True if kind.kind == "b" else numpy.iinfo(kind).max
    return interpreter.TensorHandle(numpy.full(pointers.data.shape, value, dtype=kind), element)


def widened(operand: Any) -> Any:
    """An operand of `tl.dot` in fp32 if it is bf16, which the interpreter would multiply as the integers it holds."""
    from triton.runtime import interpreter

    if operand.dtype.scalar != interpreter.tl.bfloat16:
        return operand
    return interpreter.interpreter_builder.cast_impl(operand, interpreter.tl.float32)


@contextmanager
def interpreted(*more: Any) -> Iterator[list[Launch]]:
    """Triton's interpreter in place of the compiler, in our kernels and in the functions of Triton that they call.

    Yields the launches, as they come. It is stricter than the interpreter alone: programs that would race fail, and
    what a masked load leaves out and has no `other` for, undefined on a GPU and else 0 here, is poison. The interpreter
    patches `triton.language` while it runs and does not undo all of it; here all is undone.

    more : modules with kernels, besides those of `kvpolicy.kernels`.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("triton.language") and module]
    spaces: list[Any] = [*kernel_modules(), *more, *modules, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]
    before = [(space, dict(vars(space))) for space in spaces]
    functions = [member for _, members in before for member in members.values() if isinstance(member, JITFunction)]
    compiled = {function.fn: function for function in functions}
    launched: list[Launch] = []
    run, load, dot = InterpretedFunction.run, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_dot
    store, writes = InterpreterBuilder.create_masked_store, Writes()

    def recording(function: Any, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        if function.fn in compiled:
            launched.append(Launch.of(compiled[function.fn], args, options))
        writes.clear()
        result = run(function, *args, **kwargs)
        writes.check(function.fn.__name__)
        return result

    def poisoning(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        return load(builder, pointers, mask, poison(pointers) if other is None else other, *rest)

    def noting(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        writes[builder.grid_idx].append(pointers.data[mask.data])
        return store(builder, pointers, value, mask, *rest)

    def widening(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, widened(a), widened(b), *rest)

    quiet = warnings.catch_warnings(action="ignore", category=RuntimeWarning)  # a GPU does not warn of NaNs
    with pytest.MonkeyPatch.context() as patch, quiet:
        patch.setenv("TRITON_INTERPRET", "1")  # read again at every call of a constexpr function
        patch.setattr(InterpretedFunction, "run", recording)
        patch.setattr(InterpreterBuilder, "create_masked_load", poisoning)
        patch.setattr(InterpreterBuilder, "create_masked_store", noting)
        patch.setattr(InterpreterBuilder, "create_dot", widening)
        try:
            for space, members in before:
                for name, member in members.items():
                    if isinstance(member, JITFunction):
                        setattr(space, name, stand_in(member.fn))
            yield launched
        finally:
            for space, members in before:
                for name, member in members.items():
                    if vars(space).get(name) is not member:
                        setattr(space, name, member)
