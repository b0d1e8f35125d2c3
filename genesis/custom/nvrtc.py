"""CUDA C++ to machine code through NVRTC, the compiler that ships as a library: no nvcc, no files, no GPU needed.

A source's names that depend on the call (a tile's size, an element type) are macros. They are defined in front of it,
behind NVRTC's own headers, which would be read with them otherwise.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

from genesis.dtypes import DType
from genesis.errors import DeviceError, UsageError

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


class Compiled(NamedTuple):
    """What became of a source.

    Attributes:
        name: the kernel's name in the machine code (C++ decorates names with their parameters' types).
        ptx, cubin: text for people, and the machine code of one compute capability.
        log: the compiler's warnings, empty as a rule.
    """

    name: str
    ptx: str
    cubin: bytes
    log: str


def compile_source(
    source: str,
    entry: str,
    capability: tuple[int, int],
    macros: tuple[tuple[str, Macro], ...] = (),
    options: tuple[str, ...] = (),
    title: str = "kernel.cu",
) -> Compiled:
    """Compile one kernel.

    Args:
        source: CUDA C++, with the kernel `entry`.
        capability: (major, minor) of the GPU, such as (9, 0).
        macros: names and values; a dtype stands for its C++ type, and brings the header that it needs.
        options: for NVRTC, such as "--use_fast_math".
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
