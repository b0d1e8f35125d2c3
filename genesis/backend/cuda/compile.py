"""From a kernel's source and signature to machine code, through Triton's compiler.

Nothing here touches a GPU: any machine can compile for any architecture. What is compiled when: compilations.py.
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

# --- What a kernel is compiled for ------------------------------------------------------------------------------------

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
    """A Python float that reaches the kernel as float64; a plain one reaches it as float32."""


class Signature(NamedTuple):
    """The key of a compiled kernel: for every argument its type, or ("constexpr", value), nested as arguments are."""

    # one entry an argument: a string such as "*fp32" or "i32", with a trailing ":16" where 16 divides the value, or
    # "tensordesc<bf16[128, 64]>"; a pair for a constant; a tuple of entries for a tuple
    types: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]  # the keyword constants, sorted by name
    options: tuple[tuple[str, Any], ...]  # num_warps and num_stages and the like, sorted by name


def is_array(value: object) -> bool:
    """Whether a kernel's argument is an array (of a layer above)."""
    return hasattr(value, "storage")


def describe(value: Any, nested: bool = False, specialize: bool = True) -> Any:
    """The entry of one argument.

    As in Triton, an integer that is 1 becomes a constant, and integers and addresses that 16 divides are marked as
    such; here 0 becomes a constant, too, inside tuples, where it is the stride of a broadcast dimension.
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


# --- What it is compiled to -------------------------------------------------------------------------------------------


class Binary(NamedTuple):
    """Machine code and what its launch needs."""

    image: bytes  # the cubin
    name: str  # the kernel's name in it
    shared: int  # bytes of dynamic shared memory
    warps: int  # warps a block
    parameters: int  # how many the machine code takes, Triton's own scratch addresses at the end included
    descriptors: tuple[Facts, ...] = ()  # for each descriptor among the arguments, how its tensor map is to be made


MAX_SHARED, MAX_WARPS, MAX_PARAMETERS, MAX_BOX = 1 << 20, 64, 1 << 12, 1 << 16  # beyond every GPU and every kernel
_FACTS = ("name", "shared", "warps", "parameters", "descriptors")


def packed(made: Binary) -> tuple[bytes, bytes]:
    """The facts as JSON, and the image."""
    return json.dumps({key: getattr(made, key) for key in _FACTS}).encode(), made.image


def unpacked(facts: bytes, image: bytes) -> Binary | None:
    """What was packed, or None where a figure is none that a kernel can have."""
    try:
        found = json.loads(facts)
        name, shared, warps, parameters, descriptors = (found[key] for key in _FACTS)
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
    """A name for everything that the machine code depends on."""
    import triton

    with _parsing:
        constants = [(name, getattr(value, "cache_key", repr(value))) for name, value in signature.constants]
        source = kernel.cache_key
    made_by = (_HAND, triton.__version__, capability, kernel.fn.__qualname__, source)
    parts = (*made_by, signature.types, constants, signature.options)
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.kernel"


@functools.cache
def _scratch() -> str:
    """Triton keeps every stage of a compilation in a folder; this process's is its own and gone at the end."""
    return tempfile.mkdtemp(prefix="triton-", dir=private_folder())


_settings_lock = threading.Lock()
_settings_users: list[int] = []  # threads that compile for us
_settings_scopes = ExitStack()  # they put back the environment too, where Triton writes what is set


@contextmanager
def _own_settings() -> Iterator[None]:
    """Triton's cache folder, and our hand in its stages, while any thread compiles for us; they are the process's."""
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


# Held where Triton parses Python. Before 3.13 Python counts the depth of syntax trees for all threads together: where a
# garbage collection in the midst lets another thread parse, one of them ends with "recursion depth mismatch".
_parsing = threading.Lock()


def _assemble_dependent(*stage: Any) -> tuple[str, str] | None:
    """Triton's hook: change PTX on its way to the assembler. Without arguments it is asked for a name of the change."""
    if not stage:
        return _HAND, _HAND
    _, stages, _, _, capability = stage
    assemble = stages["cubin"]
    if capability >= 90:
        stages["cubin"] = lambda ptx, metadata: assemble(dependent(ptx), metadata)
    return None


def dependent(ptx: str) -> str:
    """A kernel that waits for the one before it in its stream, before it does anything; or where it says so itself
    (`genesis.kernels.dependents`).

    So it may be brought to the SMs as soon as that one's last programs leave them: 0.2 to 0.4 us less between
    two kernels of a graph. Nothing lets it in earlier (`griddepcontrol.launch_dependents`): programs that come while
    others run fill what places are free, unevenly, and there they stay (docs/log.md).
    """
    if _WAIT in ptx:
        return ptx
    changed, count = _BEGIN.subn(rf"\g<0>\t{_WAIT};\n", ptx)
    assert count == 1, "PTX without an entry"
    return changed


_WAIT = "griddepcontrol.wait"
_HAND = "genesis: waits at its beginning"  # what our hand in the stages does, for keys of caches
_BEGIN = re.compile(r"\.entry\s+[^{]*\{\n(?:\s*\.(?:reg|local|shared)\b[^\n]*\n)*")


def compile_kernel(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Binary:
    """Compile now, whatever the cache holds."""
    made = compiled(kernel, signature, capability)
    _check_layouts(made.asm["ttgir"], kernel.__name__)
    facts = made.metadata
    maps = tuple(
        Facts(m["swizzle"], m["elem_type"], m["elem_size"], tuple(m["block_size"])) for m in facts.tensordesc_meta or ()
    )
    entry = re.search(r"\.entry\s+\S+\s*\((.*?)\n\)", made.asm["ptx"], re.DOTALL)
    assert entry is not None, "PTX without an entry"
    parameters = entry.group(1).count(".param")
    shared, warps = int(facts.shared), int(facts.num_warps)
    return Binary(made.asm["cubin"], facts.name, shared, warps, parameters, maps)


_FOR = re.compile(r'elementwise_inline_asm "\{ // for ([^\\]*)\\0A.*?tensor<\w+, (#\w+)>')


def _check_layouts(ttgir: str, name: str) -> None:
    """Raise DeviceError where assembly does not get the layout of numbers in registers that its first line names."""
    import triton

    for expected, alias in _FOR.findall(ttgir):
        if f"{alias} = {expected}\n" not in ttgir:
            raise DeviceError(
                f"{name}: Triton {triton.__version__} holds accumulators in another layout than"
                f" the kernel's assembly was written for, {expected}",
                next="install a Triton that Genesis was tested with: 3.6.0",
            )


def compiled(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Any:
    """What Triton's compiler makes of a kernel: `asm` has each stage of it, from ttir to cubin."""
    import triton
    from triton.backends.compiler import GPUTarget

    types, constants, attributes = _for_triton(kernel, signature)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    else:
        from triton.compiler import ASTSource
    source = ASTSource(kernel, types, constants, attributes)
    make_ir = source.make_ir

    def make_ir_alone(*args: Any, **settings: Any) -> Any:
        with _parsing:
            return make_ir(*args, **settings)

    source.make_ir = make_ir_alone
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    options = {"enable_fp_fusion": True, **dict(signature.options)}  # 3.9 warns where it is left open
    with _parsing:
        source.hash()  # it has the kernel's cache_key, which stays
    with _own_settings():
        return triton.compile(source, target=target, options=options)


def _for_triton(kernel: Any, signature: Signature) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and attributes as Triton's compiler takes them: by name, by path, by path."""
    names = [name for name in kernel.arg_names if name not in dict(signature.constants)]
    assert len(names) == len(signature.types), f"{kernel.__name__} takes {names}, got {len(signature.types)} arguments"
    types: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}

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

    given = dict(zip(names, signature.types, strict=True))
    for at, name in enumerate(kernel.arg_names):
        if name in given:
            types[name] = enter(given[name], (at,))
        else:
            types[name] = "constexpr"
            constants[(at,)] = dict(signature.constants)[name]
    return types, constants, attributes
