"""Kernels in CUDA C++: their parameters, checks of the arguments, compilation, and the launch.

C++ silently accepts an address of the wrong type or a number of the wrong width, and the kernel then reads something
else. So the parameter list is parsed from the source, and every argument is checked against it.

NVRTC, CUDA's compiler library, needs no nvcc, no files and no GPU. Names in a source that depend on the call, such as
a tile size or an element type, are macros. They are defined before the source but after NVRTC's own headers, which the
macros would change otherwise.
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

# Element types in CUDA C++, and the headers of the two that are not built in.
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
# Scalar C++ types in parameter lists; the words of a type may come in any order.
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
# The dtypes that a pointer to a type accepts. Pointers to other types, such as a struct or float4, are not checked.
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
    """One parameter of a kernel: its name, its type without qualifiers, and whether it is a pointer to that type."""

    name: str
    type: str
    is_pointer: bool


def parameters_of(source: str, entry: str | None, where: str) -> tuple[str, tuple[Parameter, ...]]:
    """Return the name and parameters of the kernel `entry`, or of the only kernel if `entry` is None.
    Raises UsageError, which names `where`, if the kernel does not exist or there are several.
    """
    kernels = kernels_of(source, where)
    if entry is None and len(kernels) > 1:
        raise UsageError(
            f"the source has the kernels {', '.join(kernels)}", where=where, next='choose one: entry="..."'
        )
    chosen = entry if entry is not None else next(iter(kernels))
    if chosen not in kernels:
        raise UsageError(f"the source has no kernel {chosen}", where=where, next=f"it has {', '.join(kernels)}")
    return chosen, kernels[chosen]


def kernels_of(source: str, where: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of every kernel of a source. Raises UsageError if there is none."""
    kernels = {}
    for name, listed in _KERNEL.findall(_COMMENTS.sub(" ", source)):
        texts = [text.strip() for text in listed.split(",")]
        kernels[name] = tuple(_parameter(text) for text in texts if text and text != "void")
    if not kernels:
        raise UsageError("the source has no `__global__ void name(...)`", where=where, next="add the kernel")
    return kernels


def _parameter(text: str) -> Parameter:
    """Parse a parameter such as `const float* __restrict__ x`."""
    words = _QUALIFIERS.sub(" ", text)
    match = re.fullmatch(r"\s*(.*?)\s*(\**)\s*(\w+)\s*(\[\s*\w*\s*\])?\s*", words, re.DOTALL)
    if match is None:
        return Parameter(text, text, False)
    kind, stars, name, brackets = match.groups()
    return Parameter(name, _normalize_type(kind), bool(stars or brackets))


def _normalize_type(kind: str) -> str:
    """Put the words of a type into the order of `SCALARS`: "long long unsigned int" becomes "unsigned long long"."""
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
    """The result of a compilation."""

    name: str  # in the machine code, where C++ appends the parameter types to names
    ptx: str  # readable assembly
    cubin: bytes  # the machine code of one compute capability
    log: str  # compiler warnings, usually empty


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
        macros: names and values; a dtype becomes its C++ type and includes the header it needs.
        title: the name of the source in messages.

    Raises:
        UsageError: the source does not compile. The message has the compiler's log, with lines of `source`.
        DeviceError: NVRTC is not installed, or does not support the GPU.
    """
    return compile_together(source, (entry,), capability, macros, options, title)[0]


def compile_together(
    source: str,
    entries: tuple[str, ...],
    capability: tuple[int, int],
    macros: tuple[tuple[str, Macro], ...] = (),
    options: tuple[str, ...] = (),
    title: str = "kernel.cu",
) -> tuple[Compiled, ...]:
    """Compile several kernels of a source into the same machine code, as `compile_source` does one."""
    # The cache key is the text, because the values 2 and 2.0 of a macro are equal.
    return _compiled(_preamble(macros), source, entries, capability, options, title)


@functools.lru_cache(512)
def _compiled(
    preamble: str, source: str, entries: tuple[str, ...], capability: tuple[int, int], options: tuple[str, ...],
    title: str,
) -> tuple[Compiled, ...]:  # fmt: skip
    nvrtc = _bindings()
    text = preamble + f'#line 1 "{title}"\n' + source
    program = _call(nvrtc.nvrtcCreateProgram, text.encode(), title.encode(), 0, None, None)
    try:
        for entry in entries:
            _call(nvrtc.nvrtcAddNameExpression, program, entry.encode())
        words = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *_includes(), *options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(words), [word.encode() for word in words])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode().strip()
        if code == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise UsageError(_with_lines(log, source, title), where=title, next="correct the CUDA C++ source")
        if code == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            raise DeviceError(f"NVRTC refused the options {' '.join(words)}: {log}", where=title)
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"NVRTC failed: {code.name} {log}", where=title)
        # C++ mangles names; NVRTC reports the name in the machine code.
        names = [_call(nvrtc.nvrtcGetLoweredName, program, entry.encode()).decode() for entry in entries]
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return tuple(Compiled(name, ptx, cubin, log) for name in names)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _bindings() -> Any:
    missing = "CUDA C++ needs NVRTC, which is not installed"
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError(missing, next='pip install "cuda-python[all]>=12.9"') from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are installed, but the library is not
        raise DeviceError(missing, next="pip install nvidia-cuda-nvrtc, or install the CUDA toolkit") from error
    return nvrtc


def _call(function: Any, *args: Any) -> Any:
    code, *results = function(*args)
    if int(code):
        raise DeviceError(f"{function.__name__} failed: {code.name}")
    return results[0] if results else None


def _read(size: Any, get: Any, program: Any) -> bytes:
    buffer = bytes(int(_call(size, program)))
    _call(get, program, buffer)  # the bindings require bytes and write into them
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
    """The include options for CUDA's headers from the toolkit or a wheel, then from Triton."""
    folders = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folders.append(find_nvidia_header_directory("cudart"))
    except (ImportError, RuntimeError):  # older bindings have no pathfinder
        pass
    triton = importlib.util.find_spec("triton")  # not imported: only its folder is needed
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "include"))
    return tuple(f"--include-path={folder}" for folder in folders if folder and Path(folder).is_dir())


def _with_lines(log: str, source: str, title: str) -> str:
    """The first error with the source line that it names, then the whole log."""
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
    """A kernel in CUDA C++ with its compiler options. Equal kernels are compiled once."""

    source: str
    entry: str
    parameters: tuple[Parameter, ...]
    title: str  # name of the source in messages: the op's name with ".cu"
    options: tuple[str, ...] = ()  # for NVRTC
    together: tuple[str, ...] = ()  # kernels compiled together, including this one; empty for a single kernel

    def compile(self, capability: tuple[int, int], macros: dict[str, Macro]) -> Compiled:
        """Compile for a compute capability. Raises the errors of `compile_source`."""
        key, entries = tuple(sorted(macros.items())), self.together or (self.entry,)
        code = compile_together(self.source, entries, capability, key, self.options, self.title)
        return code[entries.index(self.entry)]

    def launch(
        self, backend: CudaBackend, grid: Grid, block: Grid, shared: int, args: tuple[Any, ...],
        macros: dict[str, Macro],
    ) -> None:  # fmt: skip
        """Launch on arrays and numbers, in the order of the parameters, in the current stream.

        The first launch compiles, so errors in the source are raised by the call that needs it.

        Raises:
            UsageError: an argument does not fit its parameter. DTypeError: a tensor has the wrong dtype.
        """
        values = self.checked(args, macros)
        driver = backend.driver
        if isinstance(driver, FakeDriver):
            types = tuple(f"{p.type}*" if p.is_pointer else p.type for p in self.parameters)
            signature = Signature(types, tuple(sorted(macros.items())), (("block", block), ("shared", shared)))
            kernel_launch = driver.noted(self, signature, grid, args)
        else:
            code = self.compile(driver.properties.capability, macros)
            key = (driver.index, code, shared)
            if key not in _functions:
                _functions[key] = load(backend, code.cubin, code.name, shared, len(self.parameters))
            loaded = Loaded(_functions[key], block, shared, waits=False)
            kernel_launch = loaded_launch(driver, self.entry, loaded, grid, values)
        submit(kernel_launch, [a for a in args if is_array(a)], driver, backend.stream)

    @property
    def __name__(self) -> str:  # the attribute that Triton kernels have
        return self.entry

    def checked(self, args: tuple[Any, ...], macros: dict[str, Macro]) -> list[Any]:
        """Check the arguments and return launch values: numbers in the parameter's type, and `ADDRESS` for arrays."""
        if len(args) != len(self.parameters):
            takes = f"{len(self.parameters)} arguments ({', '.join(p.name for p in self.parameters)})"
            what = f"the kernel {self.entry} takes {takes}, not {len(args)}"
            raise UsageError(what, where=self.title, next="list the arguments in the kernel's order: arguments=")
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
                f"parameter `{kind}* {parameter.name}` of the kernel {self.entry} got {value!r}, which is not a tensor",
                where=self.title,
                next="list the arguments in the kernel's order: arguments=",
            )
        fitting = ELEMENTS.get(kind)
        if fitting is not None and value.dtype.name not in fitting:
            raise DTypeError(
                f"parameter `{kind}* {parameter.name}` of the kernel {self.entry} got a {value.dtype.name} tensor",
                where=self.title,
                next=f"cast the tensor to {' or '.join(sorted(fitting))}, or make the type a macro: "
                'constants=lambda out, x: {"T": x.dtype}',
            )

    def _number(self, parameter: Parameter, kind: str, value: Any) -> Any:
        shown = f"parameter `{kind} {parameter.name}` of the kernel {self.entry}"
        if is_array(value) or not isinstance(value, int | float):
            raise UsageError(f"{shown} got {value!r}, which is not a number", where=self.title)
        if kind not in SCALARS:
            known = "bool, int, long long, float, double or another scalar type"
            raise UsageError(f"{shown} has a type that cannot be passed", where=self.title, next=f"use {known}")
        if kind in ("float", "double"):
            return SCALARS[kind](value).value
        if isinstance(value, float):
            raise UsageError(
                f"{shown} got {value}, which is not an integer", next="declare it as `float`, or pass an int"
            )
        held = SCALARS[kind](value).value
        if held != value:
            raise UsageError(f"{shown} cannot hold {value}", where=self.title, next="declare it as `long long`")
        return held


def read_kernel(source: str, entry: str | None, title: str, options: tuple[str, ...] = ()) -> SourceKernel:
    """Find the kernel `entry` of a source, without compiling it."""
    name, parameters = parameters_of(source, entry, title)
    return SourceKernel(source, name, parameters, title, options)
