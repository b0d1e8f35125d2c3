"""Compilation of a kernel through Triton: from its source and signature to machine code.

Nothing here uses a GPU: any machine can compile for any architecture. compilations.py decides when to compile.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from genesis.backend.cuda.tma import Facts, is_descriptor
from genesis.errors import DeviceError
from genesis.files.trust import private_folder

# --- The signature of a kernel ----------------------------------------------------------------------------------------

_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}


class Double(float):
    """A Python float that is passed to a kernel as float64. A plain float is passed as float32."""


class Signature(NamedTuple):
    """The key of a compiled kernel: the type of every argument, or ("constexpr", value), nested like the arguments."""

    # One entry per argument: a string such as "*fp32" or "i32", with the suffix ":16" if 16 divides the value, or
    # "tensordesc<bf16[128, 64]>"; a pair for a constant; a tuple of entries for a tuple.
    types: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]  # the keyword constants, sorted by name
    options: tuple[tuple[str, Any], ...]  # such as num_warps and num_stages, sorted by name


def is_array(value: object) -> bool:
    """Whether a kernel's argument is an array. (The class is defined in a layer above.)"""
    return hasattr(value, "storage")


def describe(value: Any, nested: bool = False, specialize: bool = True) -> Any:
    """Return the signature entry of one argument.

    As in Triton, the integer 1 becomes a constant, and integers and addresses that 16 divides are marked. Unlike in
    Triton, 0 inside a tuple also becomes a constant: it is the stride of a broadcast dimension.
    """
    if is_array(value):
        return "*" + _NAMES[value.dtype.name] + (":16" if value.data_ptr() % 16 == 0 else "")
    if isinstance(value, bool) or value is None:
        return ("constexpr", value)
    if is_descriptor(value):
        layout = f",{value.layout}" if value.layout else ""
        return f"tensordesc<{_NAMES[value.array.dtype.name]}{list(value.block)}{layout}>"
    if isinstance(value, int):
        if specialize and (value == 1 or (nested and value == 0)):
            return ("constexpr", value)
        kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return kind + ":16" if specialize and value % 16 == 0 else kind
    if isinstance(value, float):
        return "fp64" if isinstance(value, Double) else "fp32"
    if isinstance(value, tuple):
        return tuple(describe(item, True, specialize) for item in value)
    raise TypeError(f"a kernel takes arrays, numbers and tuples of them, not {type(value).__name__}")


# --- Machine code -----------------------------------------------------------------------------------------------------


class Binary(NamedTuple):
    """Machine code and the facts that its launch needs."""

    image: bytes  # the cubin
    name: str  # the kernel's name in the cubin
    shared: int  # bytes of dynamic shared memory
    warps: int  # per block
    parameters: int  # of the machine code, including Triton's scratch addresses at the end
    descriptors: tuple[Facts, ...] = ()  # how to encode the tensor map of each descriptor argument


MAX_SHARED, MAX_WARPS, MAX_PARAMETERS, MAX_BOX = 1 << 20, 64, 1 << 12, 1 << 16  # above every GPU and kernel
_FACTS = ("name", "shared", "warps", "parameters", "descriptors")


def packed(binary: Binary) -> tuple[bytes, bytes]:
    """The facts as JSON, and the image."""
    return json.dumps({key: getattr(binary, key) for key in _FACTS}).encode(), binary.image


def unpacked(facts: bytes, image: bytes) -> Binary | None:
    """Restore a binary from the result of `packed`; None if a value is outside the range of real kernels."""
    try:
        values = json.loads(facts)
        name, shared, warps, parameters, descriptors = (values[key] for key in _FACTS)
        maps = tuple(Facts(s, k, i, tuple(box)) for s, k, i, box in descriptors)
        numbers = [n for s, k, i, box in maps for n in (s, k, i, *box)]
        bounds = [(shared, MAX_SHARED), (warps, MAX_WARPS), (parameters, MAX_PARAMETERS)]
        bounds += [(n, MAX_BOX) for n in numbers]
        if not isinstance(name, str) or not all(type(n) is int and 0 <= n <= most for n, most in bounds):
            return None
        return Binary(image, name, shared, warps, parameters, maps)
    except (ValueError, KeyError, TypeError):
        return None


def entry_name(kernel: Any, signature: Signature, capability: tuple[int, int]) -> str:
    """A file name that hashes everything the machine code depends on."""
    import triton

    with _parsing:
        constants = [(name, getattr(value, "cache_key", repr(value))) for name, value in signature.constants]
        source = kernel.cache_key
    compiler = (_HOOK_NAME, triton.__version__, capability, kernel.fn.__qualname__, source)
    parts = (*compiler, signature.types, constants, signature.options)
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.kernel"


@functools.cache
def _scratch() -> str:
    """Triton's folder for the stages of a compilation: private to this process and removed when it exits."""
    return tempfile.mkdtemp(prefix="triton-", dir=private_folder())


_settings_lock = threading.Lock()
_settings_users: list[int] = []  # threads that are compiling
_settings_scopes = ExitStack()  # on close they also restore the environment, which Triton writes to


@contextmanager
def _own_settings() -> Iterator[None]:
    """Set Triton's cache folder and our hook while any thread compiles. The settings are global to the process."""
    from triton import knobs

    with _settings_lock:
        if not _settings_users:
            _settings_scopes.enter_context(knobs.cache.scope())
            _settings_scopes.enter_context(knobs.runtime.scope())
            knobs.cache.dir, knobs.runtime.add_stages_inspection_hook = _scratch(), _assemble_dependent
        _settings_users.append(threading.get_ident())
    try:
        yield
    finally:
        with _settings_lock:
            _settings_users.remove(threading.get_ident())
            if not _settings_users:
                _settings_scopes.close()


# Held while Triton parses Python. Before 3.13, Python counts the depth of syntax trees across all threads: if a garbage
# collection lets another thread parse meanwhile, one of them fails with "recursion depth mismatch".
_parsing = threading.Lock()


def _assemble_dependent(*stage: Any) -> tuple[str, str] | None:
    """Triton's hook, which changes PTX before assembly. Called without arguments, it returns the change's name."""
    if not stage:
        return _HOOK_NAME, _HOOK_NAME
    _, stages, _, _, capability = stage
    assemble = stages["cubin"]
    if capability >= 90:
        stages["cubin"] = lambda ptx, metadata: assemble(dependent(ptx), metadata)
    return None


def dependent(ptx: str) -> str:
    """Make a kernel wait for its predecessor in the stream, at its start or where the kernel itself waits
    (`genesis.kernels.dependents`).

    The GPU may then start the kernel as soon as the last programs of its predecessor leave their SMs. This saves 0.2 to
    0.4 us between two kernels of a graph. `griddepcontrol.launch_dependents` allows an even earlier start, but is not
    used: programs that arrive early are spread unevenly over the SMs and remain there (docs/log.md).
    """
    if _WAIT in ptx:
        return ptx
    changed, count = _BEGIN.subn(rf"\g<0>\t{_WAIT};\n", ptx)
    assert count == 1, "PTX without an entry"
    return changed


_WAIT = "griddepcontrol.wait"
_HOOK_NAME = "genesis: waits at its beginning"  # names the change of the hook, for cache keys
_BEGIN = re.compile(r"\.entry\s+[^{]*\{\n(?:\s*\.(?:reg|local|shared)\b[^\n]*\n)*")


def compile_kernel(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Binary:
    """Compile a kernel without looking into the cache."""
    result = compiled(kernel, signature, capability)
    _check_layouts(result.asm["ttgir"], kernel.__name__)
    facts = result.metadata
    maps = tuple(
        Facts(m["swizzle"], m["elem_type"], m["elem_size"], tuple(m["block_size"])) for m in facts.tensordesc_meta or ()
    )
    entry = re.search(r"\.entry\s+\S+\s*\((.*?)\n\)", result.asm["ptx"], re.DOTALL)
    assert entry is not None, "PTX without an entry"
    parameters = entry.group(1).count(".param")
    shared, warps = int(facts.shared), int(facts.num_warps)
    return Binary(result.asm["cubin"], facts.name, shared, warps, parameters, maps)


_FOR = re.compile(r'elementwise_inline_asm "\{ // for ([^\\]*)\\0A.*?tensor<\w+, (#\w+)>')


def _check_layouts(ttgir: str, name: str) -> None:
    """Raise DeviceError if inline assembly gets operands in a register layout that its first line does not declare."""
    import triton

    for expected, alias in _FOR.findall(ttgir):
        if f"{alias} = {expected}\n" not in ttgir:
            raise DeviceError(
                f"{name}: Triton {triton.__version__} does not keep accumulators in the layout that"
                f" the kernel's assembly needs, {expected}",
                next="pip install triton==3.6.0",
            )


def compiled(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Any:
    """Run Triton's compiler and return its result, whose `asm` has the text of each stage, from ttir to cubin."""
    import triton
    from triton.backends.compiler import GPUTarget

    types, constants, attributes = _for_triton(kernel, signature)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    else:
        from triton.compiler import ASTSource
    source = ASTSource(kernel, types, constants, attributes)
    # Only the parsing of Python is serialized; passes and assembly run in parallel.
    make_ir = source.make_ir

    def make_ir_alone(*args: Any, **settings: Any) -> Any:
        with _parsing:
            return make_ir(*args, **settings)

    source.make_ir = make_ir_alone
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    options = {"enable_fp_fusion": True, **dict(signature.options)}  # Triton 3.9 warns if this is not set
    with _parsing:
        source.hash()  # caches the kernel's cache_key while the lock is held
    with _own_settings():
        return triton.compile(source, target=target, options=options)


def _for_triton(kernel: Any, signature: Signature) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Types by name, constants by path and attributes by path, as Triton's compiler takes them."""
    names = [name for name in kernel.arg_names if name not in dict(signature.constants)]
    assert len(names) == len(signature.types), f"{kernel.__name__} takes {names}, got {len(signature.types)} arguments"
    types: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}

    # Triton addresses nested arguments by path.
    def enter(entry: Any, path: tuple[int, ...]) -> Any:
        if isinstance(entry, str):
            kind, _, divides = entry.partition(":")
            if divides:
                attributes[path] = [["tt.divisibility", 16]]
            return kind
        if entry[:1] == ("constexpr",):
            constants[path] = entry[1]
            return "constexpr"
        return tuple(enter(item, (*path, i)) for i, item in enumerate(entry))

    entries = dict(zip(names, signature.types, strict=True))
    for at, name in enumerate(kernel.arg_names):
        if name in entries:
            types[name] = enter(entries[name], (at,))
        else:
            types[name] = "constexpr"
            constants[(at,)] = dict(signature.constants)[name]
    return types, constants, attributes
