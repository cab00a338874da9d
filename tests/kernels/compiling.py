"""Compile what the interpreter ran, for a GPU that need not be there.

The interpreter runs Python that the compiler refuses (an unknown type, a size that is no constant, a global). So each
kernel that a test launches interpreted is translated as the same launch on a GPU would have it (:func:`translate`,
milliseconds), and a test may compile it down to machine code and look at what it needs (:func:`machine_code`, seconds).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HOPPER = 90


@dataclass(frozen=True)
class Launch:
    """One launch: the Python function of a kernel and what its arguments make it compile to.

    signature : Triton's name of the type of each argument; ``constexpr`` for those in `constants`.
    attrs : per place of an argument, what Triton is told of it: that 16 divides it.
    options : `num_warps` and its like.
    """

    source: Callable[..., Any]
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    attrs: Mapping[tuple[int], Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launch:
        """Of a compiled kernel (not its stand-in) with these arguments."""
        from triton.runtime.jit import mangle_type

        params = {param.name: param for param in kernel.params}
        named = dict(zip(params, args, strict=False)) | {name: kwargs[name] for name in params if name in kwargs}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attrs: dict[tuple[int], Any] = {}
        for place, (name, param) in enumerate(params.items()):
            value = named.get(name, param.default if param.has_default else None)
            special = not param.do_not_specialize
            if param.is_constexpr or value is None or (special and type(value) is int and value == 1):
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = mangle_type(value)
            number = value.data_ptr() if hasattr(value, "data_ptr") else value
            if special and type(number) is int and number % 16 == 0:
                attrs[place,] = [["tt.divisibility", 16]]
        options = {name: value for name, value in kwargs.items() if name not in params}
        return cls(kernel.fn, signature, constants, attrs, options)

    @property
    def key(self) -> str:
        """Equal for launches that share one compilation."""
        return repr((self.source.__qualname__, self.signature, self.constants, self.attrs, self.options))


class MachineCode(NamedTuple):
    """A compiled kernel: bytes of shared memory of a block, registers of a thread, bytes that did not fit into them."""

    ptx: str
    shared: int
    registers: int
    spilled: int


def _source(launch: Launch) -> Any:
    from triton.compiler import ASTSource

    kernel = vars(sys.modules[launch.source.__module__])[launch.source.__name__]
    constants = {(kernel.arg_names.index(name),): value for name, value in launch.constants.items()}
    return ASTSource(kernel, dict(launch.signature), constants, dict(launch.attrs))


def _target() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", HOPPER, 32)


def translate(launch: Launch) -> None:
    """Let the compiler read the kernel, up to its first intermediate form; what it refuses is raised."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(_target())
    options = backend.parse_options(dict(launch.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    _source(launch).make_ir(_target(), options, codegen, modules, context)


def machine_code(launch: Launch) -> MachineCode:
    """Compile a kernel for an H100 or H200."""
    import triton
    from triton.backends import nvidia

    compiled = triton.compile(_source(launch), target=_target(), options=dict(launch.options))
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return MachineCode(compiled.asm["ptx"], compiled.metadata.shared, int(found[1]), int(found[2]))
