"""Tracing: a function runs once on arrays without memory, and each op that it calls becomes a call of a graph.

A function that needs a value in memory, such as `item()`, cannot be traced: `Break` says where.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np

from genesis import array as arrays
from genesis.array import Array, Spec
from genesis.autograd.graph import calling_line
from genesis.backend import Backend, Device, backend_for, mode
from genesis.compiler.fuse import longest_row
from genesis.compiler.graph import Call, Graph, Value, renamed
from genesis.dtypes import DType, float32, float64
from genesis.errors import UsageError
from genesis.op import Op, common_device, current_tracer, execute, registry, tracing
from genesis.ops.formula import by_ops
from genesis.ops.shape import extent
from genesis.shapes import Shape, is_dense, normalize_axes, numel


class Break(BaseException):
    """The traced function does something that a graph cannot hold. `except Exception` in user code must not catch it.

    Attributes:
        reason: what the function does.
        line: file:line of the user's program.
        is_transient: whether a later call of the function may be traced.
    """

    def __init__(self, reason: str, line: str = "", is_transient: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.line, self.is_transient = reason, line or calling_line(), is_transient


class Pending:
    """Memory that is not allocated yet; once it is, attributes are read from the `real` storage.

    Attributes:
        value: the graph's value that the memory holds at this point.
        recorder: the lazy recorder that can run the ops that compute it; None in a trace, where reading it is a break.
        arrays: the arrays over it.
    """

    __slots__ = ("__weakref__", "arrays", "changes", "device", "nbytes", "real", "recorder", "value")
    owner = True  # the backward engine must not take this memory over

    def __init__(self, device: Device, nbytes: int, value: Any, recorder: Any = None) -> None:
        self.device, self.nbytes, self.value, self.recorder = device, nbytes, value, recorder
        self.arrays: list[weakref.ref[Array]] = []
        self.changes = 0
        self.real: Any = None

    @property
    def backend(self) -> Backend:
        return backend_for(self.device)

    @property
    def version(self) -> int:
        return self.changes if self.real is None else self.real.version

    @version.setter
    def version(self, version: int) -> None:
        if self.real is None:
            self.changes = version
        else:
            self.real.version = version

    def __getattr__(self, name: str) -> Any:
        if self.real is None:
            if self.recorder is None:
                raise Break("reads values on the host")
            self.recorder.flush("reads values on the host")
        if self.real is None:
            raise UsageError("this value was never computed, because an op before it failed", next="run the op again")
        return getattr(self.real, name)

    def become(self, real: Any) -> None:
        """Move this storage and all arrays over it to memory that exists."""
        real.version, self.real = self.changes, real
        for each in self.arrays:
            if (array := each()) is not None:
                array.storage, array.__class__ = real, Array


class Lazy(Array):
    """An array over a `Pending` storage; it becomes an `Array` when its memory exists."""

    __slots__ = ()

    def view(self, shape: Shape, strides: Shape, offset: int | None = None) -> Array:
        return lazy(Array.view(self, shape, strides, offset))

    def view_np(self) -> np.ndarray:
        _ = self.storage.pointer  # runs the ops that compute it
        return Array.view_np(self)


def lazy(x: Array) -> Array:
    """Return the array itself; if its storage is `Pending`, register it to become real with the storage."""
    storage: Any = x.storage
    if storage.__class__ is Pending and x.__class__ is Array:
        if storage.real is None:
            x.__class__ = Lazy
            storage.arrays.append(weakref.ref(x))
        else:
            x.storage = storage.real
    return x


def settings_of_sums() -> tuple[bool, bool, bool]:
    """The settings that choose the order and the precision of sums."""
    return mode.exact, mode.fixed_weights, mode.tf32


class Trace:
    """A tracer (see `genesis.op.Tracer`) that writes a graph.

    Args:
        owners: arrays of the tensors that the function can reach, such as parameters.

    Attributes:
        arguments: arrays of the inputs, each with its first value.
        captured: arrays in memory that the function reads, each with the value that it held at the beginning.
        constants: arrays that the function makes from numbers, by id.
        settings: the settings under which the ops of the graph were called.
    """

    is_functional = True

    def __init__(self, owners: Iterable[Array] = ()) -> None:
        self.graph, self.settings = Graph(), settings_of_sums()
        self.arguments: list[tuple[Array, Value]] = []
        self.captured: list[tuple[Array, Value]] = []
        self.constants: dict[int, Array] = {}
        self._owners: dict[int, list[Array]] = {}  # by storage
        for owner in owners:
            self._owners.setdefault(id(owner.storage), []).append(owner)
        self._slots: dict[int, list[int]] = {}  # indices into `captured` by storage
        self._now: list[Value] = []  # what each captured array holds at this point

    def input(self, like: Array | Value) -> Array:
        """Add an input with the layout of an array."""
        value = Value.like(like)
        self.graph.inputs.append(value)
        self.arguments.append((self.fake(value), value))
        return self.arguments[-1][0]

    def value_of(self, x: Array) -> Value:
        """Return a value for an array in memory that the function reads for the first time."""
        return Value.like(x)

    def fake(self, value: Value) -> Array:
        """Return an array that holds `value`, which must not be a view."""
        storage: Any = Pending(value.device, value.nbytes, value)
        return Lazy(storage, value.shape, value.strides, value.dtype, value.device)

    def new(self, shape: Shape, dtype: DType, device: Device) -> Array:
        attrs = {"value": 0, "shape": tuple(int(s) for s in shape), "dtype": dtype, "device": device}
        with tracing(self):
            return execute(registry["fill"], (), attrs)[0]

    def keep(self, x: Array, is_shared: bool) -> Array:
        """Return an array that the function created from numbers; `is_shared` if numpy arrays share its memory."""
        if current_tracer() is not self:
            return x
        self.constants[id(x)] = x
        return x if is_shared else self.fake(self.read(x))

    def touch(self) -> None:
        """Raise Break, because the host reads or writes memory."""
        if current_tracer() is self:
            raise Break("reads values on the host")

    # --- Reading and writing arrays -----------------------------------------------------------------------------------

    def read(self, x: Array) -> Value:
        """Return what an array holds at this point."""
        root, offset = self._place(x)
        return root.window(x.shape, x.strides, offset)

    def write(self, x: Array, root: Value) -> None:
        """Record that the memory of an array now holds `root`."""
        if isinstance(x.storage, Pending):
            x.storage.version += 1
            x.storage.value = root
            return
        index = self._slot(x)
        if id(self.captured[index][0]) in self.constants:
            raise Break("changes memory of a numpy array")
        others = [self.captured[i][0] for i in self._slots[id(x.storage)] if i != index]
        if any(overlap(other, self.captured[index][0]) for other in others):
            raise Break("changes memory that it also reads through another view")
        self._now[index] = root

    def _place(self, x: Array) -> tuple[Value, int]:
        """Return the root value that an array views, and the offset of its first element."""
        if isinstance(x.storage, Pending):
            return x.storage.value, x.offset
        index = self._slot(x)
        return self._now[index], x.offset - self.captured[index][0].offset if x.size else 0

    def _slot(self, x: Array) -> int:
        """Return the index of the captured array that contains `x`, which is captured if none does."""
        slots = self._slots.setdefault(id(x.storage), [])
        for index in slots:
            if contains(self.captured[index][0], x):
                return index
        owner = next((o for o in self._owners.get(id(x.storage), ()) if contains(o, x)), x)
        value = self.value_of(owner)
        if any(self._now[i] is not self.captured[i][1] and overlap(self.captured[i][0], owner) for i in slots):
            raise Break("changes memory that it also reads through another view")
        self.captured.append((owner, value))
        self._now.append(value)
        slots.append(len(self.captured) - 1)
        return slots[-1]

    # --- The tracer ---------------------------------------------------------------------------------------------------

    def call(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Array, ...]:
        """Record a call and return arrays without memory. Raises Break for an op that a graph cannot hold."""
        if op.view is not None:
            return (lazy(op.view(*inputs, **attrs)),)
        if op.name == "index_put_":
            op, out = registry["index_put"], inputs[0]
        elif op.mutates:
            raise Break(f"calls {op.name}, which changes its inputs")
        if settings_of_sums() != self.settings:
            raise Break("changes genesis.exact, genesis.fixed_weights or the precision of float32 matmuls")
        calls, values = self.planned(op, inputs, attrs, out, *inferred(op, inputs, attrs, out))
        self.graph.calls += calls
        return self.put(values, out)

    def planned(
        self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any, specs: tuple[Spec, ...], device: Device
    ) -> tuple[list[Call], list[Value]]:
        """Return the calls for an op whose results have these specs, and what the memory of each result then holds."""
        attrs = {name: value for name, value in attrs.items() if name != "device"}
        values = [Value.new(shape, dtype, device) for shape, dtype in specs]
        calls = [Call(op, tuple(self.read(x) if isinstance(x, Array) else x for x in inputs), attrs, tuple(values))]
        changed: dict[Value, Value] = {}  # by the outputs so far
        for i, x in enumerate(out if isinstance(out, tuple) else (out,)):
            if x is None:
                continue
            value, (before, offset) = values[i], self._place(x)
            root = changed.get(before, before)
            covers = offset == 0 and x.size == root.size and is_dense(x.shape, x.strides)
            covers = covers or (x.shape, x.strides, offset) == (root.shape, root.strides, 0)
            if covers and x.dtype is value.dtype and (op.elementwise or x.is_contiguous):
                value.strides = x.strides
            if x.dtype is not value.dtype or (covers and x.strides != value.strides):
                values[i] = Value.like(x) if covers else Value.new(x.shape, x.dtype, device)
                calls.append(Call(registry["cast"], (value,), {"dtype": x.dtype}, (values[i],)))
            if not covers:
                attrs = {"shape": x.shape, "strides": x.strides, "offset": offset}
                part, values[i] = values[i], Value.like(root)
                calls.append(Call(registry["as_strided_scatter"], (root, part), attrs, (values[i],)))
            changed[before] = values[i]
        return calls, values

    def put(self, values: list[Value], out: Any) -> tuple[Array, ...]:
        """Let the results of a call, or `out`, hold these values; return them."""
        if out is None:
            return tuple([self.fake(v) for v in values])
        pairs = list(zip(values, out if isinstance(out, tuple) else (out,), strict=True))
        for value, x in pairs:
            if x is not None:
                self.write(x, value)
        return tuple([self.fake(v) if x is None else x for v, x in pairs])

    def changed(self) -> list[tuple[Value, Value]]:
        """The arguments and captured arrays that the function changed, as pairs of their first and last value."""
        last = [*(x.storage.value for x, _ in self.arguments), *self._now]  # type: ignore[attr-defined]
        pairs = zip((*self.arguments, *self.captured), last, strict=True)
        return [(old, new.window(old.shape, old.strides, 0)) for (_, old), new in pairs if old is not new]


def inferred(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[tuple[Spec, ...], Device]:
    """Return the specs and the device of the results of a call. Raises the op's errors."""
    operands = (*inputs, *(out if isinstance(out, tuple) else (out,)))
    device = attrs.get("device") or common_device(op.name, operands)
    specs = op.infer(*inputs, **{name: value for name, value in attrs.items() if name != "device"})
    return (specs,) if isinstance(specs, Spec) else specs, device


@contextmanager
def active(tracer: Any) -> Iterator[None]:
    """Inside the block, let a tracer record the ops of this thread and create its arrays."""
    thread = get_ident()
    outer = arrays.makers.get(thread)
    arrays.makers[thread] = tracer
    try:
        with tracing(tracer):
            yield
    finally:
        del arrays.makers[thread]
        if outer is not None:
            arrays.makers[thread] = outer


def _span(x: Array) -> tuple[int, int]:
    """The address range of an array, in elements of its storage."""
    return x.offset, x.offset + extent(x.shape, x.strides)


def overlap(x: Array, y: Array) -> bool:
    """Whether the address ranges of two arrays of one storage overlap."""
    (start, end), (first, last) = _span(x), _span(y)
    return 0 not in x.shape and 0 not in y.shape and start < last and first < end


def contains(outer: Array, inner: Array) -> bool:
    """Whether the address range of `inner` lies in that of `outer`, of the same storage and dtype, or is empty."""
    (start, end), (first, last) = _span(outer), _span(inner)
    return inner is outer or (outer.dtype is inner.dtype and (first == last or (start <= first and last <= end)))


# --- Ops of several passes as calls of simple ops, so that a kernel can hold them together with their neighbours ------


_BACKWARD = ("softmax_backward", "log_softmax_backward")
_PASSES = ("softmax", "log_softmax", "logsumexp", *_BACKWARD)  # a kernel of rows holds all passes of these ops


def decomposed(graph: Graph) -> Graph:
    """Return the graph with ops of several passes as simple ops, which can be fused."""
    trace, simpler = Trace(), dict[Value, Value]()
    for call in graph.calls:
        inputs = tuple([renamed(x, simpler) for x in call.inputs])
        simple = decomposition(call)
        if simple is None:
            trace.graph.calls.append(Call(call.op, inputs, call.attrs, call.outputs))
            continue
        arrays = [x.within(trace.fake(x.root)) if isinstance(x, Value) else x for x in inputs]
        with active(trace):
            result = simpler[call.outputs[0]] = trace.read(simple(*arrays, **call.attrs))
        result.strides = call.outputs[0].strides  # an op in place stores in the order of its operand
    outputs = [renamed(v, simpler) for v in graph.outputs]
    return Graph(graph.inputs, trace.graph.calls, outputs, [(a, renamed(b, simpler)) for a, b in graph.writes])


def decomposition(call: Call) -> Callable[..., Array] | None:
    """The simple form of an op; None if the op's own implementation is better.

    On a GPU, a kernel must be able to hold the op's rows. On the CPU, activations become single steps, so that their
    temporaries lie in the memory of a block and backward reads exponentials of forward. With 2-byte floats the steps
    would round more often than the op.
    """
    out = call.outputs[0]
    if out.device.type == "cpu":
        is_activation = call.op.family == "activation" and call.op.elementwise and out.dtype in (float32, float64)
        is_exact = is_activation and all(x.dtype is out.dtype for x in call.inputs)
        return by_ops(call.op.formula) if is_exact and call.op.formula is not None else None
    if call.op.name not in _PASSES or not call.inputs[0].size:
        return None
    x, ndim = call.inputs[0], len(call.inputs[0].shape)
    if call.op.name in _BACKWARD and call.inputs[1].dtype is not x.dtype:
        return None
    axes = normalize_axes(call.attrs.get("axes", call.attrs.get("dim", -1)), ndim)
    columns = numel([x.shape[a] for a in axes])
    is_trailing = tuple(axes) == tuple(range(ndim - len(axes), ndim))
    return call.op.plain if is_trailing and columns <= longest_row(x.size // columns) else None
