"""Dispatch of ops: the launches of a call are recorded once as a launch plan and then replayed.

A CUDA implementation of an op (in `genesis.kernels`) is plain Python that calls `launch`. Its launches may depend on
shapes, strides, dtypes, attributes and numbers, and on whether ops are recorded for backward, but never on values in
memory. The first call records them as a `Plan` under a key of exactly those properties. The next call with the same key
allocates its outputs, writes addresses into the recorded parameters and calls the driver directly. An implementation
that reads memory back (a count, say) has no plan.
"""

from __future__ import annotations

import enum
import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from genesis.backend import ArrayLike, Device, Mode, OpLike, mode
from genesis.backend.cuda.driver import Driver
from genesis.backend.cuda.launch import Recorder, watches
from genesis.backend.cuda.memory import CudaStorage
from genesis.backend.cuda.stream import Runtime
from genesis.dtypes import DType
from genesis.errors import DeviceError
from genesis.shapes import contiguous_strides

# --- CUDA implementations ---------------------------------------------------------------------------------------------

CudaImpl = Callable[..., None]
cuda_impls: dict[str, CudaImpl] = {}


def cuda_impl(*names: str) -> Callable[[CudaImpl], CudaImpl]:
    """Register the decorated function as the CUDA implementation of the named ops.

    The function has the reference's signature, `f(out, *inputs, **attrs)`, but takes arrays instead of numpy arrays. It
    writes every element of `out`, which is a tuple if the op has several outputs.
    """

    def register(function: CudaImpl) -> CudaImpl:
        for name in names:
            assert name not in cuda_impls, f"op {name} has two CUDA implementations"
            cuda_impls[name] = function
        return function

    return register


def cuda_impl_of(op: OpLike) -> CudaImpl:
    """The CUDA implementation of an op: its own, or the one registered for its name. Raises DeviceError without one."""
    return op.cuda_impl or cuda_impl_named(op.name, op.family)


@functools.cache
def cuda_impl_named(name: str, family: str) -> CudaImpl:
    """The implementation that `genesis.kernels` has for the op. Raises DeviceError without one."""
    if name not in cuda_impls:
        importlib.import_module("genesis.kernels").load(name, family)
    if name not in cuda_impls:
        raise DeviceError(f"{name} has no CUDA kernel", next="move its inputs to the CPU")
    return cuda_impls[name]


# --- How float32 GEMMs are computed -----------------------------------------------------------------------------------


class AllowTF32:
    """The process-wide flag `Mode.tf32`. Call keys contain it, so a change takes effect at the next call."""

    def __bool__(self) -> bool:
        return mode.tf32

    def get(self) -> bool:
        """Whether the flag is set."""
        return mode.tf32

    def set(self, on: bool) -> bool:
        """Set the flag and return its previous value."""
        before, Mode.tf32 = Mode.tf32, bool(on)
        return before


# With TF32 the tensor cores read 10 bits of each operand's mantissa and accumulate in float32. This is 8 times faster;
# relative errors are near 3e-4 (1e-6 without TF32).
allow_tf32 = AllowTF32()

# --- The key of a call ------------------------------------------------------------------------------------------------

# A value of these types equals only values of its own type, and equal values compute the same.
_UNAMBIGUOUS = frozenset((str, type(None), DType, Device))
_VALUES = frozenset((int, bool, float, str, type(None), DType, Device))


def exact(value: Any) -> Any:
    """Return a key for a value that includes its type and sign, so values that compute differently have unequal keys.

    Python's equality is not enough: 1 == 1.0 == True, 0.0 == -0.0, and NaN equals nothing. All NaNs get one key.
    """
    kind = value.__class__
    if kind is float:  # only floats have a float as their key
        return value if value and value == value else (float, value.hex())
    if kind in _UNAMBIGUOUS:
        return value
    if kind is tuple:
        for each in value:
            if each.__class__ is not int:
                break
        else:  # the common case: dimensions
            return value
    # The repr of values that `is_value` accepts contains type, sign and all digits, also inside nested tuples.
    return (kind, repr(value) if isinstance(value, tuple) else value)


def is_value(value: Any) -> bool:
    """Whether a value is immutable and safe in a key. numpy scalars are not: they can be equal with different bits."""
    if isinstance(value, tuple):
        return all(map(is_value, value))
    return value.__class__ in _VALUES or isinstance(value, enum.Enum)


@dataclass(slots=True, eq=False)
class Layout:
    """Shape, strides, dtype, device, and address modulo 16. Each combination is one object, compared by identity."""

    parts: tuple[Any, ...]


ABSENT = object()  # the layout of a value that is not an array
LAYOUTS = 1 << 16  # distinct layouts; data-dependent sizes would accumulate without a limit
_layouts: dict[tuple[Any, ...], Layout] = {}


def layout_of(array: ArrayLike) -> Layout:
    """The layout of an array, cached on the array."""
    layout: Layout | None = array.layout
    if layout is None:
        parts = (array.shape, array.strides, array.dtype, array.device, array.data_ptr() & 15)
        layout = _layouts.get(parts)
        if layout is None:
            if len(_layouts) >= LAYOUTS:  # calls with a dropped layout are recorded again
                _layouts.clear()
            layout = _layouts.setdefault(parts, Layout(parts))
        array.layout = layout
    return layout


def call_key(op: OpLike, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[Any, ...]:
    """The key of everything that the launches of an op may depend on, except the memory of its outputs.

    The same array given twice differs from two arrays of equal layout: the plan has one operand for it. If an op
    mutates inputs, the key also says which inputs share memory: its CUDA implementation may have to copy one first.
    """
    # A shortcut for binary ops; the loop below gives the same key.
    if len(inputs) == 2 and not attrs and not op.mutates and inputs[0] is not inputs[1]:
        x, y = getattr(inputs[0], "layout", None), getattr(inputs[1], "layout", None)
        if x is not None and y is not None:
            return (op, mode.tf32, mode.grad, mode.fixed_weights, mode.exact, x, y)
    # Inputs by layout or exact value, and which of them are the same array or memory.
    parts: list[Any] = [op, mode.tf32, mode.grad, mode.fixed_weights, mode.exact]
    seen: list[Any] = []
    for x in inputs:
        layout = getattr(x, "layout", ABSENT)
        if layout is ABSENT:
            parts.append(exact(x))
            continue
        parts.append(layout or layout_of(x))
        if op.mutates:
            parts.extend([(i, len(seen)) for i, other in enumerate(seen) if other.storage is x.storage])
        elif x in seen:
            parts.append((seen.index(x), len(seen)))
        seen.append(x)
    for name, value in attrs.items():
        parts.append(name)
        parts.append(exact(value))
    return tuple(parts)


def has_default_layout(
    op: OpLike, outputs: tuple[ArrayLike, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]
) -> bool:
    """Whether outputs have the layout that a call without `out` allocates, so its key needs no output layouts.

    Memory that a caller gives may have another dtype or another alignment.
    """
    inferred = op.infer(*inputs, **attrs)
    specs: Any = (inferred,) if hasattr(inferred, "dtype") else inferred
    return len(specs) == len(outputs) and all(
        layout_of(a).parts == (s.shape, contiguous_strides(s.shape), s.dtype, a.device, 0)
        and not any(x is a for x in inputs)
        for a, s in zip(outputs, specs, strict=True)
    )


# --- Plans ------------------------------------------------------------------------------------------------------------

PLANS = 8192  # kept per device; numbers that change with every call would accumulate without a limit


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Cache a value, evicting the oldest entry when the cache is full."""
    if len(cache) >= PLANS:
        cache.pop(next(iter(cache)))
    cache[key] = value


Allocate = Callable[[int, str], Any]


class Plan:
    """The launches of one call of an op, which can be replayed on other operands of the same layouts."""

    __slots__ = ("allocate", "driver", "kept", "launches", "lock", "owner", "sizes")

    def __init__(self, recorder: Recorder, driver: Driver, allocate: Allocate, owner: str) -> None:
        self.launches = tuple(recorder.launches)
        self.sizes = tuple(s.nbytes for s in recorder.temporaries)
        self.kept = recorder.kept
        self.driver, self.allocate, self.owner = driver, allocate, owner
        self.lock = threading.Lock()  # the parameter buffers are shared

    def run(self, operands: tuple[ArrayLike, ...], stream: int) -> None:
        """Launch all kernels on these operands."""
        self.launch([x.data_ptr() for x in operands], stream)

    def launch(self, pointers: list[int], stream: int) -> None:
        """Launch all kernels on operands at these addresses."""
        if self.sizes:
            temporaries = [self.allocate(n, self.owner) for n in self.sizes]  # freed on return, reused in stream order
            pointers += [storage.pointer for storage in temporaries]
        if self.driver.pending:
            self.driver.pending.append(lambda: self._launch(pointers, stream))
        else:
            self._launch(pointers, stream)

    def _launch(self, pointers: list[int], stream: int) -> None:
        with self.lock:
            for each in self.launches:
                if each.prepare is not None:  # only if an earlier compilation failed
                    each.make_ready()
                words = each.words
                for slot, operand, delta in each.addresses:
                    words[slot] = pointers[operand] + delta
                if watches:
                    watches[-1](each, stream)
                else:
                    each.run(stream)


def record(
    operands: tuple[ArrayLike, ...], implementation: Callable[[], None], driver: Driver, allocate: Allocate, owner: str
) -> Plan | None:
    """Run a CUDA implementation and return its plan, or None if its launches cannot be replayed.

    Args:
        allocate: `allocate(nbytes, owner)` returns the temporaries of later runs.
        owner: the name of the op.
    """
    recorder = Recorder(operands)
    with recorder.active():
        implementation()
    return Plan(recorder, driver, allocate, owner) if recorder.cacheable else None


class Call:
    """A replayable call. It launches its plan on newly allocated outputs and on the arrays among its inputs, and
    increments the version of the inputs in `mutates`.
    """

    __slots__ = ("backend", "mutates", "operands", "outputs", "plan")

    def __init__(
        self, backend: Runtime, plan: Plan, outputs: tuple[Any, ...], inputs: tuple[Any, ...],
        mutates: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.backend, self.plan, self.mutates = backend, plan, mutates
        self.operands = tuple([i for i, x in enumerate(inputs) if hasattr(x, "storage")])
        self.outputs = []
        for a in outputs:
            _ = layout_of(a), a.spec  # cached here, and thereby on arrays made like it
            self.outputs.append((a.like(CudaStorage(backend.pool, None, 0, 0)), a.nbytes))  # a template without memory

    def run(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Launch the plan on `inputs` and return the outputs."""
        pool, stream, plan = self.backend.pool, self.backend.stream, self.plan
        results, pointers = [], []
        for array, nbytes in self.outputs:
            block = pool.take(nbytes, stream, plan.owner)
            results.append(array.like(CudaStorage(pool, block, block.pointer, nbytes)))
            pointers.append(block.pointer)
        for i in self.operands:
            x = inputs[i]
            pointers.append(x.storage.pointer + x.offset * x.dtype.itemsize)
        if plan.sizes or plan.driver.pending:
            plan.launch(pointers, stream)
        else:
            plan._launch(pointers, stream)
        for i in self.mutates:
            inputs[i].storage.version += 1
        return tuple(results)
