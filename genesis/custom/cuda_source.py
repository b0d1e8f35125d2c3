"""Kernels written in CUDA C++: their parameters, arguments checked against these, machine code, and the launch.

C++ takes an address of the wrong type, or a number of the wrong width, without a word, and the kernel then reads
something else. So the parameter list is read from the source, and every argument is held against it.

NVRTC, the compiler that ships as a library, needs no nvcc, no files, no GPU. A source's names that depend on the call
(a tile's size, an element type) are macros. They are defined in front of it, behind NVRTC's own headers, which would be
read with them otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend.cuda.compile import Signature, is_array
from genesis.backend.cuda.driver import Function, Grid
from genesis.backend.cuda.launch import ADDRESS, Loaded, load, loaded_launch, submit
from genesis.backend.cuda.simulated import FakeDriver
from genesis.dtypes import DType
from genesis.errors import DeviceError, DTypeError, UsageError

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

# Element types in CUDA C++, and where the two that are not built in come from.
C_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "int64": "long long",
    "int32": "int",
    "int16": "short",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
}
HEADERS = {"float16": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}

Macro = int | float | bool | str | DType
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
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    **{f"{kind}{bits}_t": getattr(ctypes, f"c_{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
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


# --- Parameters -------------------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """One parameter of a kernel: its name, its type without qualifiers, and whether it is a pointer to that."""

    name: str
    type: str
    is_pointer: bool


def parameters_of(source: str, entry: str | None, where: str) -> tuple[str, tuple[Parameter, ...]]:
    """The name and the parameters of the kernel `entry`; None is the only one. Raises UsageError, with the op as
    `where`, for no such kernel, and for several without a name.
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


# --- Machine code -----------------------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """What became of a source."""

    name: str  # the kernel's name in the machine code (C++ decorates names with their parameters' types)
    ptx: str  # text for people
    cubin: bytes  # the machine code of one compute capability
    log: str  # the compiler's warnings, empty as a rule


def compile_source(
    source: str,
    entry: str,
    capability: tuple[int, int],
    macros: tuple[tuple[str, Macro], ...] = (),
    options: tuple[str, ...] = (),
    title: str = "kernel.cu",
) -> Compiled:
    """Compile one kernel for GPUs of a compute capability, such as (9, 0).

    Args:
        macros: names and values; a dtype stands for its C++ type, and brings the header that it needs.
        title: what the source is called in messages.

    Raises:
        UsageError: the source does not compile; with the compiler's log, which names lines of `source`.
        DeviceError: NVRTC is not installed, or does not know the GPU.
    """
    # Text tells macros of 2 and 2.0 apart; as keys they are equal.
    return _compiled(_preamble(macros), source, entry, capability, options, title)


@functools.lru_cache(512)
def _compiled(
    preamble: str, source: str, entry: str, capability: tuple[int, int], options: tuple[str, ...], title: str
) -> Compiled:
    nvrtc = _bindings()
    text = preamble + f'#line 1 "{title}"\n' + source
    program = _call(nvrtc.nvrtcCreateProgram, text.encode(), title.encode(), 0, None, None)
    try:
        _call(nvrtc.nvrtcAddNameExpression, program, entry.encode())
        words = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *_includes(), *options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(words), [word.encode() for word in words])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode().strip()
        if code == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise UsageError(_with_lines(log, source, title), where=title, next="correct the CUDA C++ source")
        if code == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            raise DeviceError(f"NVRTC refuses its options {' '.join(words)}: {log}", where=title)
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"NVRTC failed: {code.name} {log}", where=title)
        name = _call(nvrtc.nvrtcGetLoweredName, program, entry.encode()).decode()
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
        return Compiled(name, ptx, _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _bindings() -> Any:
    missing = "CUDA C++ is compiled by NVRTC, which is not installed"
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError(missing, next='pip install "cuda-python[all]>=12.9"') from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there, the library is not
        raise DeviceError(missing, next="pip install nvidia-cuda-nvrtc, or install the CUDA toolkit") from error
    return nvrtc


def _call(function: Any, *args: Any) -> Any:
    """Call NVRTC; its result without the code."""
    code, *rest = function(*args)
    if int(code):
        raise DeviceError(f"{function.__name__} failed: {code.name}")
    return rest[0] if rest else None


def _read(size: Any, get: Any, program: Any) -> bytes:
    buffer = bytes(int(_call(size, program)))
    _call(get, program, buffer)  # writes into the bytes, as the bindings ask for
    return buffer


def _preamble(macros: tuple[tuple[str, Macro], ...]) -> str:
    headers = sorted({HEADERS[v.name] for _, v in macros if isinstance(v, DType) and v.name in HEADERS})
    lines = [f"#include <{header}>" for header in headers]
    lines += [f"#define {name} {_c_value(value)}" for name, value in macros]
    return "".join(f"{line}\n" for line in lines)


def _c_value(value: Macro) -> str:
    if isinstance(value, DType):
        return C_TYPES[value.name]
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value!r}f" if isinstance(value, float) else str(value)


@functools.cache
def _includes() -> tuple[str, ...]:
    """Where CUDA's headers are: the toolkit's or a wheel's, else those that Triton brings."""
    folders = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folders.append(find_nvidia_header_directory("cudart"))
    except (ImportError, RuntimeError):  # older bindings bring no such thing
        pass
    found = importlib.util.find_spec("triton")  # not imported: only its folder is wanted
    if found is not None and found.origin is not None:
        folders.append(str(Path(found.origin).parent / "backends" / "nvidia" / "include"))
    return tuple(f"--include-path={folder}" for folder in folders if folder and Path(folder).is_dir())


def _with_lines(log: str, source: str, title: str) -> str:
    """The first error with the line of the source that it names, then the whole log."""
    first = re.search(rf"^{re.escape(title)}\((\d+)\): (?:catastrophic )?error: (.*)$", log, re.MULTILINE)
    if first is None:
        return f"the CUDA C++ source does not compile\n{log}"
    number, lines = int(first.group(1)), source.splitlines()
    shown = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"the CUDA C++ source does not compile, line {number}: {first.group(2)}\n    {shown}\n{log}"


# --- The kernel -------------------------------------------------------------------------------------------------------


_functions: dict[tuple[int, Compiled, int], Function] = {}  # by device, code and bytes of shared memory


@dataclass(frozen=True)
class SourceKernel:
    """A kernel in CUDA C++ and how it is compiled. Equal kernels are compiled once."""

    source: str
    entry: str
    parameters: tuple[Parameter, ...]
    title: str  # what it is called in messages: the op's name with ".cu"
    options: tuple[str, ...] = ()  # for NVRTC

    def compile(self, capability: tuple[int, int], macros: dict[str, Macro]) -> Compiled:
        """Machine code for a compute capability; see `compile_source` for what it raises."""
        key = tuple(sorted(macros.items()))
        return compile_source(self.source, self.entry, capability, key, self.options, self.title)

    def launch(
        self, backend: CudaBackend, grid: Grid, block: Grid, shared: int, args: tuple[Any, ...],
        macros: dict[str, Macro],
    ) -> None:  # fmt: skip
        """Launch on arrays and numbers, in the order of the parameters, on the current stream.

        The first launch compiles, so that an error of the source ends the call which needs it. Raises UsageError or
        DTypeError where the arguments do not fit the parameters.
        """
        values = self.checked(args, macros)
        driver = backend.driver
        if isinstance(driver, FakeDriver):
            types = tuple(f"{p.type}*" if p.is_pointer else p.type for p in self.parameters)
            signature = Signature(types, tuple(sorted(macros.items())), (("block", block), ("shared", shared)))
            made = driver.noted(self, signature, grid, args)
        else:
            code = self.compile(driver.properties.capability, macros)
            key = (driver.index, code, shared)
            if key not in _functions:
                _functions[key] = load(backend, code.cubin, code.name, shared, len(self.parameters))
            loaded = Loaded(_functions[key], block, shared, waits=False)
            made = loaded_launch(driver, self.entry, loaded, grid, values)
        submit(made, [a for a in args if is_array(a)], driver, backend.stream)

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
        if kind in ("float", "double"):
            return SCALARS[kind](value).value
        if isinstance(value, float):
            raise UsageError(
                f"{shown} is given {value}, which is no integer", next="declare it `float`, or pass an int"
            )
        held = SCALARS[kind](value).value
        if held != value:
            raise UsageError(f"{shown} cannot hold {value}", where=self.title, next="declare it `long long`")
        return held


def read_kernel(source: str, entry: str | None, title: str, options: tuple[str, ...] = ()) -> SourceKernel:
    """The kernel `entry` of a source, not compiled yet."""
    name, parameters = parameters_of(source, entry, title)
    return SourceKernel(source, name, parameters, title, options)
