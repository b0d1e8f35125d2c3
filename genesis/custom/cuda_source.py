"""Kernels written in CUDA C++: what their parameters are, arguments checked against them, and the launch.

C++ takes an address of the wrong type, or a number of the wrong width, without a word, and the kernel then reads
something else. So the parameter list is read from the source, and every argument is held against it.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend.cuda.compile import Signature, is_array
from genesis.backend.cuda.driver import Function, Grid
from genesis.backend.cuda.launch import ADDRESS, Loaded, load, loaded_launch, submit
from genesis.backend.cuda.simulated import FakeDriver
from genesis.custom.cuda_source import C_TYPES, Compiled, Macro, compile_source
from genesis.dtypes import DType
from genesis.errors import DTypeError, UsageError

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

# Scalar types of C++ of parameter lists; the words of one may come in any order.
SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "char": ctypes.c_int8,
    "signed char": ctypes.c_int8,
    "unsigned char": ctypes.c_uint8,
    "short": ctypes.c_int16,
    "unsigned short": ctypes.c_uint16,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint32,
    "long": ctypes.c_int64,
    "unsigned long": ctypes.c_uint64,
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
    "size_t": ctypes.c_uint64,
    "int8_t": ctypes.c_int8,
    "uint8_t": ctypes.c_uint8,
    "int16_t": ctypes.c_int16,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_WORD_ORDER = ("unsigned", "signed", "char", "short", "long", "int", "float", "double")
# What a pointer to a type may be given. A type that is not here (a struct, float4) is the author's own business.
ELEMENTS = {c: {name} for name, c in C_TYPES.items()} | {
    "half": {"float16"},
    "nv_bfloat16": {"bfloat16"},
    "long": {"int64"},
    "int64_t": {"int64"},
    "int32_t": {"int32"},
    "int16_t": {"int16"},
    "char": {"int8"},
    "int8_t": {"int8"},
    "unsigned char": {"uint8", "bool"},
    "uint8_t": {"uint8", "bool"},
}
_QUALIFIERS = re.compile(r"\b(?:const|volatile|__restrict__|__restrict|__grid_constant__)\b")
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(
    r"__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)"
)


_functions: dict[tuple[int, Compiled, int], Function] = {}  # by device, code and bytes of shared memory


class Parameter(NamedTuple):
    """One parameter of a kernel: its name, its type without qualifiers, and whether it is a pointer to that."""

    name: str
    type: str
    is_pointer: bool


def parameters_of(source: str, entry: str | None, where: str) -> tuple[str, tuple[Parameter, ...]]:
    """The kernel's name and its parameters, read from the source.

    Args:
        entry: the kernel's name; None where the source has one kernel.
        where: what the op is called in errors.

    Raises:
        UsageError: there is no such kernel, or several and no name.
    """
    found = dict(_KERNEL.findall(_COMMENTS.sub(" ", source)))
    if not found:
        raise UsageError("the source has no `__global__ void name(...)`", where=where, next="add the kernel")
    if entry is None and len(found) > 1:
        raise UsageError(f"the source has the kernels {', '.join(found)}", where=where, next='choose one: entry="..."')
    chosen = entry if entry is not None else next(iter(found))
    if chosen not in found:
        raise UsageError(f"the source has no kernel {chosen}", where=where, next=f"it has {', '.join(found)}")
    texts = [text.strip() for text in found[chosen].split(",")]
    return chosen, tuple(_parameter(text) for text in texts if text and text != "void")


def _parameter(text: str) -> Parameter:
    """`const float* __restrict__ x` as its parts."""
    words = _QUALIFIERS.sub(" ", text)
    match = re.fullmatch(r"\s*(.*?)\s*(\**)\s*(\w+)\s*(\[\s*\w*\s*\])?\s*", words, re.DOTALL)
    if match is None:
        return Parameter(text, text, False)
    kind, stars, name, brackets = match.groups()
    return Parameter(name, _in_order(kind), bool(stars or brackets))


def _in_order(kind: str) -> str:
    """The words of a type as `SCALARS` writes them: "long long unsigned int" is "unsigned long long"."""
    words = kind.split()
    if len(words) > 1 and all(word in _WORD_ORDER for word in words):
        if any(word in ("short", "long") for word in words):
            words = [word for word in words if word != "int"]
        words.sort(key=_WORD_ORDER.index)
        if words[0] == "signed" and words[1:] != ["char"]:
            words = words[1:]
    return " ".join(words)


@dataclass(frozen=True)
class SourceKernel:
    """A kernel in CUDA C++ and how it is compiled. Equal kernels are compiled once.

    Attributes:
        title: what it is called in messages: the op's name with ".cu".
        options: for NVRTC.
    """

    source: str
    entry: str
    parameters: tuple[Parameter, ...]
    title: str
    options: tuple[str, ...] = ()

    def compile(self, capability: tuple[int, int], macros: dict[str, Macro]) -> Compiled:
        """Machine code for a compute capability; see `compile_source` for what it raises."""
        key = tuple(sorted(macros.items()))
        return compile_source(self.source, self.entry, capability, key, self.options, self.title)

    def launch(
        self, backend: CudaBackend, grid: Grid, block: Grid, shared: int, args: tuple[Any, ...],
        macros: dict[str, Macro],
    ) -> None:  # fmt: skip
        """Launch on arrays and numbers, in the order of the parameters, on the current stream.

        The first launch compiles, so that an error of the source ends the call which needs it.

        Args:
            shared: bytes of dynamic shared memory.

        Raises:
            UsageError, DTypeError: the arguments do not fit the parameters.
        """
        values = self.checked(args, macros)
        driver = backend.driver
        if isinstance(driver, FakeDriver):
            types = tuple(f"{p.type}*" if p.is_pointer else p.type for p in self.parameters)
            signature = Signature(types, tuple(sorted(macros.items())), (("block", block), ("shared", shared)))
            made = driver.noted(self, signature, grid, args)
        else:
            kernel = self._loaded(backend, macros, block, shared)
            made = loaded_launch(driver, self.entry, kernel, grid, values)
        submit(made, [a for a in args if is_array(a)], driver, backend.stream)

    def _loaded(self, backend: CudaBackend, macros: dict[str, Macro], block: Grid, shared: int) -> Loaded:
        """The kernel on the device."""
        made = self.compile(backend.driver.properties.capability, macros)
        key = (backend.driver.index, made, shared)
        if key not in _functions:
            _functions[key] = load(backend, made.cubin, made.name, shared, len(self.parameters))
        return Loaded(_functions[key], block, shared, waits=False)

    @property
    def __name__(self) -> str:  # as Triton's kernels have it
        return self.entry

    def checked(self, args: tuple[Any, ...], macros: dict[str, Macro]) -> list[Any]:
        """The arguments as a launch takes them: numbers, each as its parameter's type holds it, and `ADDRESS`."""
        if len(args) != len(self.parameters):
            takes = f"{len(self.parameters)} arguments ({', '.join(p.name for p in self.parameters)})"
            what = f"the kernel {self.entry} takes {takes}, and is given {len(args)}"
            raise UsageError(what, where=self.title, next="list them in the kernel's order: arguments=")
        values = []
        for parameter, value in zip(self.parameters, args, strict=True):
            meant = macros.get(parameter.type, parameter.type)
            kind = C_TYPES[meant.name] if isinstance(meant, DType) else str(meant)
            if parameter.is_pointer:
                self._check_array(parameter, kind, value)
                values.append(ADDRESS)
            else:
                values.append(self._number(parameter, kind, value))
        return values

    def _check_array(self, parameter: Parameter, kind: str, value: Any) -> None:
        if not is_array(value):
            raise UsageError(
                f"parameter `{kind}* {parameter.name}` of the kernel {self.entry} is given {value!r}, no tensor",
                where=self.title,
                next="put the arguments into the kernel's order: arguments=",
            )
        fitting = ELEMENTS.get(kind)
        if fitting is not None and value.dtype.name not in fitting:
            raise DTypeError(
                f"parameter `{kind}* {parameter.name}` of the kernel {self.entry} is given a {value.dtype.name} tensor",
                where=self.title,
                next=f"cast it to {' or '.join(sorted(fitting))}, or name the type by a macro: "
                'constants=lambda out, x: {"T": x.dtype}',
            )

    def _number(self, parameter: Parameter, kind: str, value: Any) -> Any:
        shown = f"parameter `{kind} {parameter.name}` of the kernel {self.entry}"
        if is_array(value) or not isinstance(value, int | float):
            raise UsageError(f"{shown} is given {value!r}, which is no number", where=self.title)
        if kind not in SCALARS:
            known = "bool, int, long long, float, double and the like"
            raise UsageError(f"{shown} is of a type that cannot be passed", where=self.title, next=f"use {known}")
        made = SCALARS[kind](value if isinstance(value, int) or kind in ("float", "double") else _refuse(shown, value))
        if kind not in ("float", "double") and made.value != value:
            raise UsageError(f"{shown} cannot hold {value}", where=self.title, next="declare it `long long`")
        return made.value


def _refuse(shown: str, value: float) -> int:
    raise UsageError(f"{shown} is given {value}, which is no integer", next="declare it `float`, or pass an int")


def read_kernel(source: str, entry: str | None, title: str, options: tuple[str, ...] = ()) -> SourceKernel:
    """The kernel `entry` of a source, not compiled yet."""
    name, parameters = parameters_of(source, entry, title)
    return SourceKernel(source, name, parameters, title, options)
