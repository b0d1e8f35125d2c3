"""Tracing: a function runs once on arrays without memory, and each op that it calls becomes a call of a graph.

A function that needs a value in memory, such as `item()`, cannot be traced: `Break` says where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn

from genesis import array as arrays
from genesis.array import Array, Spec
from genesis.autograd.graph import calling_line
from genesis.backend import Backend, Device, backend_for
from genesis.compiler.decompose import decomposition
from genesis.compiler.graph import Call, Graph, Value
from genesis.dtypes import DType
from genesis.op import Op, common_device, registry, tracing
from genesis.shapes import Shape, contiguous_strides, is_dense


class Break(BaseException):
    """The traced function does something that a graph cannot hold. `except Exception` in user code must not catch it.

    Attributes:
        reason: what the function does.
        line: file:line of the user's program.
    """

    def __init__(self, reason: str, line: str = "") -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line or calling_line()


class FakeStorage:
    """Memory that does not exist. `value` is what it holds at this point of the trace."""

    __slots__ = ("device", "nbytes", "value", "version")

    def __init__(self, device: Device, nbytes: int, value: Value | None = None) -> None:
        self.device, self.nbytes, self.value = device, nbytes, value
        self.version = 0

    @property
    def backend(self) -> Backend:
        return backend_for(self.device)

    @property
    def pointer(self) -> int:
        raise Break("reads the address of a tensor")

    @property
    def block(self) -> NoReturn:
        raise Break("reads values on the host")


class Fake(Array):
    """An array over a `FakeStorage`."""

    __slots__ = ()

    def view(self, shape: Shape, strides: Shape, offset: int | None = None) -> Array:
        """Return another window on the same storage."""
        start = self.offset if offset is None else offset
        return Fake(self.storage, shape, strides, self.dtype, self.device, start)

    def like(self, storage: Any) -> Array:
        raise Break("needs memory of a device")

    def data_ptr(self) -> int:
        raise Break("reads the address of a tensor")

    def _read(self) -> NoReturn:
        raise Break("reads values on the host")

    view_np = numpy = item = _read


def fake(value: Value) -> Fake:
    """Return an array that holds `value`, which must not be a view."""
    storage = FakeStorage(value.device, value.nbytes, value)
    return Fake(storage, value.shape, value.strides, value.dtype, value.device)


def as_fake(x: Array) -> Array:
    """Return an array over a `FakeStorage` as a `Fake`."""
    if isinstance(x, Fake) or not isinstance(x.storage, FakeStorage):
        return x
    return Fake(x.storage, x.shape, x.strides, x.dtype, x.device, x.offset)


class Trace:
    """A tracer (see `genesis.op.Tracer`) that writes a graph.

    Args:
        owners: arrays of the tensors that the function can reach, such as parameters.

    Attributes:
        captured: arrays in memory that the function reads, each with the value that it held at the beginning.
        constants: arrays that the function makes from numbers, by id.
    """

    def __init__(self, owners: Iterable[Array] = ()) -> None:
        self.graph = Graph()
        self.captured: list[tuple[Array, Value]] = []
        self.constants: dict[int, Array] = {}
        self._owners: dict[int, list[Array]] = {}  # by storage
        for owner in owners:
            self._owners.setdefault(id(owner.storage), []).append(owner)
        self._slots: dict[int, list[int]] = {}  # indices into `captured` by storage
        self._now: list[Value] = []  # what each captured array holds at this point

    def input(self, like: Array) -> Fake:
        """Add an input with the layout of an array."""
        value = Value(like.shape, like.strides, like.dtype, like.device)
        self.graph.inputs.append(value)
        return fake(value)

    def new(self, shape: Shape, dtype: DType, device: Device) -> Fake:
        """Return an array with undefined contents."""
        shape = tuple(int(s) for s in shape)
        like = Value(shape, contiguous_strides(shape), dtype, device)
        attrs = {"value": 0, "shape": shape, "dtype": dtype}
        return fake(self._add(registry["fill"], (), attrs, (like,), "")[0])

    # --- Reading and writing arrays -----------------------------------------------------------------------------------

    def read(self, x: Array) -> Value:
        """Return what an array holds at this point."""
        root, offset = self._place(x)
        return root.window(x.shape, x.strides, offset)

    def write(self, x: Array, value: Value, line: str = "") -> None:
        """Record that an array now holds `value`, which has its shape and dtype."""
        root, offset = self._place(x)
        covers = offset == 0 and x.size == root.size and is_dense(x.shape, x.strides)
        if (x.shape, x.strides, offset) != (root.shape, root.strides, 0) and not covers:
            attrs = {"shape": x.shape, "strides": x.strides, "offset": offset}
            value = self._add(registry["as_strided_scatter"], (root, value), attrs, (root,), line)[0]
        if isinstance(x.storage, FakeStorage):
            x.storage.version += 1
            x.storage.value = value
            return
        index = self._slot(x)
        others = [self.captured[i][0] for i in self._slots[id(x.storage)] if i != index]
        if any(overlap(other, self.captured[index][0]) for other in others):
            raise Break("changes memory that it also reads through another view")
        self._now[index] = value

    def _place(self, x: Array) -> tuple[Value, int]:
        """Return the root value that an array views, and the offset of its first element."""
        if isinstance(x.storage, FakeStorage):
            value = x.storage.value
            assert value is not None
            return value, x.offset
        index = self._slot(x)
        return self._now[index], x.offset - self.captured[index][0].offset

    def _slot(self, x: Array) -> int:
        """Return the index of the captured array that contains `x`, which is captured if none does."""
        slots = self._slots.setdefault(id(x.storage), [])
        for index in slots:
            if contains(self.captured[index][0], x):
                return index
        owner = next((o for o in self._owners.get(id(x.storage), ()) if contains(o, x)), x)
        value = Value(owner.shape, owner.strides, owner.dtype, owner.device)
        if any(self._now[i] is not self.captured[i][1] and overlap(self.captured[i][0], owner) for i in slots):
            raise Break("changes memory that it also reads through another view")
        self.captured.append((owner, value))
        self._now.append(value)
        slots.append(len(self.captured) - 1)
        return slots[-1]

    def _add(
        self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], like: tuple[Value, ...], line: str
    ) -> tuple[Value, ...]:
        """Add a call whose outputs have the layouts of `like`."""
        call = Call(op, inputs, attrs, line=line)
        call.outputs = tuple(Value(v.shape, v.strides, v.dtype, v.device, call) for v in like)
        self.graph.calls.append(call)
        return call.outputs

    # --- The tracer ---------------------------------------------------------------------------------------------------

    def call(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Array, ...]:
        """Record a call and return arrays without memory. Raises Break for an op that a graph cannot hold."""
        if op.view is not None:
            return (as_fake(op.view(*inputs, **attrs)),)
        if out is None and (simple := decomposition(op.name, inputs, attrs)) is not None:
            with tracing(self):
                return (simple(*inputs, **attrs),)
        if op.mutates:
            raise Break(f"calls {op.name}, which changes its inputs")
        line = calling_line()
        attrs = dict(attrs)
        given = out if isinstance(out, tuple) else None if out is None else (out,)
        arrays_given = tuple(o for o in given or () if o is not None)
        chosen = attrs.pop("device", None)
        device = chosen or common_device(op.name, (*inputs, *arrays_given))
        inferred = op.infer(*inputs, **attrs)
        specs = (inferred,) if isinstance(inferred, Spec) else inferred
        values = tuple(self.read(x) if isinstance(x, Array) else x for x in inputs)
        results: list[Array] = []
        likes = [Value(s.shape, contiguous_strides(s.shape), s.dtype, device) for s in specs]
        for like, target in zip(likes, given or (), strict=False):
            fits = target is not None and target.dtype is like.dtype and target.shape == like.shape
            if fits and (op.elementwise or target.is_contiguous):
                like.strides = target.strides
        outputs = self._add(op, values, attrs, tuple(likes), line)
        for i, value in enumerate(outputs):
            target = given[i] if given is not None else None
            if target is None:
                results.append(fake(value))
                continue
            if (target.dtype, target.strides) != (value.dtype, value.strides):
                like = Value(target.shape, target.strides, target.dtype, device)
                value = self._add(registry["cast"], (value,), {"dtype": target.dtype}, (like,), line)[0]
            self.write(target, value, line)
            results.append(target)
        return tuple(results)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Trace the ops of this thread inside the block."""
        thread = get_ident()
        arrays.makers[thread] = self
        try:
            with tracing(self):
                yield
        finally:
            del arrays.makers[thread]

    def changed(self) -> list[tuple[Value, Value]]:
        """The captured arrays that the function changed, as pairs of their first and last value."""
        pairs = zip(self.captured, self._now, strict=True)
        return [(old, new.window(old.shape, old.strides, 0)) for (_, old), new in pairs if old is not new]


def _extent(x: Array) -> tuple[int, int]:
    """The first element of an array in its storage, and the one after its last."""
    return x.offset, x.offset + 1 + sum(st * (s - 1) for s, st in zip(x.shape, x.strides, strict=True))


def overlap(x: Array, y: Array) -> bool:
    """Whether the address ranges of two arrays of one storage overlap."""
    (a, b), (c, d) = _extent(x), _extent(y)
    return 0 not in x.shape and 0 not in y.shape and a < d and c < b


def contains(outer: Array, inner: Array) -> bool:
    """Whether the address range of `inner` lies in the range of `outer`, an array of the same storage and dtype."""
    if inner is outer:
        return True
    (a, b), (c, d) = _extent(outer), _extent(inner)
    return outer.dtype is inner.dtype and 0 not in inner.shape and a <= c and d <= b
