"""Dispatch of ops: from a call to its launches, which are recorded once as a launch plan and then repeated.

A CUDA implementation of an op (in `genesis.kernels`) is plain Python that calls `launch`. What it does may depend on
shapes, strides, dtypes, attributes and numbers, and on whether ops are recorded for backward, never on values in
memory. So its launches are recorded the first time and kept as a `Plan` under exactly those; the next call with the
same key makes its outputs, puts addresses into the recorded parameters and goes straight to the driver. An
implementation that reads memory back (a count, say) has no plan.
"""

from __future__ import annotations

import enum
import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from genesis.backend import ArrayLike, Device, OpLike, mode
from genesis.backend.cuda.driver import Driver
from genesis.backend.cuda.launch import Recorder
from genesis.backend.cuda.memory import CudaStorage
from genesis.backend.cuda.stream import Runtime
from genesis.dtypes import DType
from genesis.errors import DeviceError
from genesis.shapes import contiguous_strides

# --- CUDA implementations ---------------------------------------------------------------------------------------------

CudaImpl = Callable[..., None]
cuda_impls: dict[str, CudaImpl] = {}


def cuda_impl(*names: str) -> Callable[[CudaImpl], CudaImpl]:
    """Decorator: the function below runs the ops of these names on CUDA arrays.

    It has the reference's signature, `f(out, *inputs, **attrs)`, with arrays in the place of numpy arrays, and writes
    every element of `out` (a tuple where the op has several outputs).
    """

    def register(function: CudaImpl) -> CudaImpl:
        for name in names:
            assert name not in cuda_impls, f"op {name} has two CUDA implementations"
            cuda_impls[name] = function
        return function

    return register


def cuda_impl_of(op: OpLike) -> CudaImpl:
    """The CUDA implementation of an op: its own, or the one of its name. Raises DeviceError without one."""
    return op.cuda_impl or cuda_impl_named(op.name, op.family)


@functools.cache
def cuda_impl_named(name: str, family: str) -> CudaImpl:
    """The implementation in the module of `genesis.kernels` named `family`. Raises DeviceError without one."""
    if name not in cuda_impls:
        importlib.import_module("genesis.kernels").load(family)
    if name not in cuda_impls:
        raise DeviceError(f"{name} has no CUDA kernel", next="move its inputs to the CPU")
    return cuda_impls[name]


# --- How float32 GEMMs are computed -----------------------------------------------------------------------------------


class Switch:
    """A process-wide flag. Plans are kept under it, so a change takes effect at the next call."""

    __slots__ = ("on",)

    def __init__(self, on: bool) -> None:
        self.on = on

    def __bool__(self) -> bool:
        return self.on

    def get(self) -> bool:
        """Whether it is on."""
        return self.on

    def set(self, on: bool) -> bool:
        """Turn it on or off; what it was before."""
        before, self.on = self.on, bool(on)
        return before


# With tf32 the tensor cores read 10 bits of each operand's mantissa (sums stay float32): 8 times faster, with relative
# errors near 3e-4 instead of 1e-6.
allow_tf32 = Switch(False)

# --- The key of a call ------------------------------------------------------------------------------------------------

_ALONE = frozenset((str, type(None), DType, Device))  # equal to their own kind alone, and equal means the same
_VALUES = frozenset((int, bool, float, str, type(None), DType, Device))


def exact(value: Any) -> Any:
    """A value with its type and sign, so that what computes differently is unequal; all NaNs are one.

    Python's own equality does not do: 1, 1.0 and True are equal, 0.0 and -0.0 are, and NaN equals nothing.
    """
    kind = value.__class__
    if kind is float:  # no other kind's key is a float
        return value if value and value == value else (float, value.hex())
    if kind in _ALONE:
        return value
    if kind is tuple:
        for each in value:
            if each.__class__ is not int:
                break
        else:  # nearly all: dimensions
            return value
    # Of what `is_value` takes, the text says type, sign and all digits, at any depth.
    return (kind, repr(value) if isinstance(value, tuple) else value)


def is_value(value: Any) -> bool:
    """Whether a value cannot change: other objects may, and numpy's scalars are equal where their bits are not."""
    if isinstance(value, tuple):
        return all(map(is_value, value))
    return value.__class__ in _VALUES or isinstance(value, enum.Enum)


@dataclass(slots=True, eq=False)
class Layout:
    """Shape, strides, dtype, device, address modulo 16; one object for each combination, compared by its identity."""

    parts: tuple[Any, ...]


ABSENT = object()  # the layout of what is no array
LAYOUTS = 1 << 16  # distinct ones; sizes which depend on data would otherwise pile up
_layouts: dict[tuple[Any, ...], Layout] = {}


def layout_of(array: ArrayLike) -> Layout:
    """The layout of an array, remembered on it."""
    found: Layout | None = array.layout
    if found is None:
        parts = (array.shape, array.strides, array.dtype, array.device, array.data_ptr() & 15)
        found = _layouts.get(parts)
        if found is None:
            if len(_layouts) >= LAYOUTS:  # calls with forgotten layouts are recorded again
                _layouts.clear()
            found = _layouts.setdefault(parts, Layout(parts))
        array.layout = found
    return found


def call_key(op: OpLike, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[Any, ...]:
    """All that an op's launches may depend on, besides where its outputs are.

    The same array given twice differs from two of equal layouts: in the plan it is one operand. Where an
    op changes its inputs, so is memory that two of them share: its CUDA implementation may have to copy one first.
    """
    if len(inputs) == 2 and not attrs and not op.mutates and inputs[0] is not inputs[1]:  # what follows gives the same
        x, y = getattr(inputs[0], "layout", None), getattr(inputs[1], "layout", None)
        if x is not None and y is not None:
            return (op, allow_tf32.on, mode.grad, mode.fixed_weights, x, y)
    parts: list[Any] = [op, allow_tf32.on, mode.grad, mode.fixed_weights]
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


def are_as_made(op: OpLike, outputs: tuple[ArrayLike, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> bool:
    """Whether outputs are laid out as those of a call without `out` are: then the call may be remembered under its
    inputs alone. Memory that was given may be of another dtype, or start elsewhere.
    """
    inferred = op.infer(*inputs, **attrs)
    specs: Any = (inferred,) if hasattr(inferred, "dtype") else inferred
    return len(specs) == len(outputs) and all(
        layout_of(a).parts == (s.shape, contiguous_strides(s.shape), s.dtype, a.device, 0)
        and not any(x is a for x in inputs)
        for a, s in zip(outputs, specs, strict=True)
    )


# --- Plans ------------------------------------------------------------------------------------------------------------

PLANS = 8192  # kept a device; numbers that change with every call would otherwise pile up


def remember(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value; the oldest goes when there are too many."""
    if len(kept) >= PLANS:
        kept.pop(next(iter(kept)))
    kept[key] = value


Allocate = Callable[[int, str], Any]


class Plan:
    """The launches of one call of an op, to be repeated on other operands of the same layout."""

    __slots__ = ("allocate", "driver", "kept", "launches", "lock", "owner", "sizes")

    def __init__(self, recorder: Recorder, driver: Driver, allocate: Allocate, owner: str) -> None:
        self.launches = tuple(recorder.launches)
        self.sizes = tuple(s.nbytes for s in recorder.temporaries)
        self.kept = recorder.kept
        self.driver, self.allocate, self.owner = driver, allocate, owner
        self.lock = threading.Lock()  # the parameter buffers are shared

    def run(self, operands: tuple[ArrayLike, ...], stream: int) -> None:
        """Launch everything on these operands."""
        self.launch([x.data_ptr() for x in operands], stream)

    def launch(self, pointers: list[int], stream: int) -> None:
        """Launch everything on operands at these addresses."""
        if self.sizes:
            temporaries = [self.allocate(n, self.owner) for n in self.sizes]  # freed at the end, reused in stream order
            pointers += [storage.pointer for storage in temporaries]
        if self.driver.pending:
            self.driver.pending.append(lambda: self._launch(pointers, stream))
        else:
            self._launch(pointers, stream)

    def _launch(self, pointers: list[int], stream: int) -> None:
        with self.lock:
            for each in self.launches:
                if each.prepare is not None:  # was prepared, unless compiling failed when it was first asked for
                    each.make_ready()
                words = each.words
                for slot, operand, delta in each.addresses:
                    words[slot] = pointers[operand] + delta
                each.go(stream)


def record(
    operands: tuple[ArrayLike, ...], implementation: Callable[[], None], driver: Driver, allocate: Allocate, owner: str
) -> Plan | None:
    """Run a CUDA implementation and record it; None where its launches cannot be repeated.

    `allocate(nbytes, owner)` gives temporaries of later runs, for the op `owner`.
    """
    recorder = Recorder(operands)
    with recorder.active():
        implementation()
    return Plan(recorder, driver, allocate, owner) if recorder.cacheable else None


class Call:
    """A repeatable call: its plan is launched on outputs made afresh, like those given, and on the arrays among its
    inputs, of which it changes those that it `mutates`.
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
            _ = layout_of(a), a.spec  # known, and so known of what is made like it
            self.outputs.append((a.like(CudaStorage(backend.pool, None, 0, 0)), a.nbytes))  # holds no memory

    def run(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Launch everything on `inputs`; the outputs."""
        pool, stream, plan = self.backend.pool, self.backend.stream, self.plan
        made, pointers = [], []
        for array, nbytes in self.outputs:
            block = pool.take(nbytes, stream, plan.owner)
            made.append(array.like(CudaStorage(pool, block, block.pointer, nbytes)))
            pointers.append(block.pointer)
        for i in self.operands:
            x = inputs[i]
            pointers.append(x.storage.pointer + x.offset * x.dtype.itemsize)
        plan.launch(pointers, stream)
        for i in self.mutates:
            inputs[i].storage.version += 1
        return tuple(made)
