"""The graph of a traced function: values and the calls of ops that compute them.

Values are immutable: a change in place makes a new value with the layout of the old one. A view has no call: it
is a value that names its `root`, the value whose memory it views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genesis.backend import Device
from genesis.dtypes import DType
from genesis.op import Op, registry
from genesis.shapes import Shape, numel


@dataclass(eq=False, slots=True)
class Value:
    """An array of a traced function.

    Attributes:
        call: the call that computes the value; None for an input and for a view.
        root: the value whose memory this one views; the value itself if it is not a view.
        offset: the window's first element, relative to the first element of `root`.
    """

    shape: Shape
    strides: Shape
    dtype: DType
    device: Device
    call: Call | None = None
    base: Value | None = None
    offset: int = 0

    @property
    def root(self) -> Value:
        return self if self.base is None else self.base

    @property
    def size(self) -> int:
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def window(self, shape: Shape, strides: Shape, offset: int) -> Value:
        """Return a view of the same root; `offset` is relative to the root."""
        root = self.root
        if (shape, strides, offset) == (root.shape, root.strides, 0):
            return root
        return Value(shape, strides, root.dtype, root.device, None, root, offset)


@dataclass(eq=False, slots=True)
class Call:
    """One call of an op on values and numbers."""

    op: Op
    inputs: tuple[Any, ...]
    attrs: dict[str, Any]
    outputs: tuple[Value, ...] = ()

    @property
    def calls(self) -> tuple[Call]:
        """The call itself, as a group of calls."""
        return (self,)

    @property
    def is_random(self) -> bool:
        """Whether the call draws random numbers."""
        return "seed" in self.attrs and "offset" in self.attrs

    @property
    def reads(self) -> list[Value]:
        """The roots that the call reads."""
        return [x.root for x in self.inputs if isinstance(x, Value)]


@dataclass(eq=False, slots=True)
class Graph:
    """Calls in order, between inputs and outputs.

    Attributes:
        writes: inputs that the function changes in place, each with the value that it holds at the end.
    """

    inputs: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    writes: list[tuple[Value, Value]] = field(default_factory=list)

    @property
    def results(self) -> list[Value]:
        """The roots that are read after the last call."""
        return [v.root for v in (*self.outputs, *(new for _, new in self.writes))]

    def lines(self) -> list[str]:
        """One line for each call, and one for the results."""
        names = {v: f"in{i}" for i, v in enumerate(self.inputs)}

        def text(x: Any) -> str:
            if not isinstance(x, Value):
                return repr(x)
            window = "" if x.base is None else f"[{x.shape}, {x.strides}, {x.offset}]"
            return names[x.root] + window

        call_lines = []
        for call in self.calls:
            names.update({v: f"v{len(names) + i}" for i, v in enumerate(call.outputs)})
            results = ", ".join(f"{names[v]} {v.dtype.name} {v.shape}" for v in call.outputs)
            attrs = [f"{name}={value!r}" for name, value in call.attrs.items()]
            call_lines.append(f"{results} = {call.op.name}({', '.join([*map(text, call.inputs), *attrs])})")
        writes = [f"{text(old)} becomes {text(new)}" for old, new in self.writes]
        return [*call_lines, ", ".join([*map(text, self.outputs), *writes])]

    def without_dead_calls(self) -> Graph:
        """Return the graph without calls whose results nothing reads."""
        live, kept = set(self.results), []
        for call in reversed(self.calls):
            if any(v in live for v in call.outputs):
                live.update(call.reads)
                kept.append(call)
        return Graph(self.inputs, kept[::-1], self.outputs, self.writes)

    def with_own_memory(self, storages: Sequence[int], constants: Iterable[Value] = ()) -> Graph:
        """Return the graph with copies of those of the first `len(storages)` outputs that share a root although their
        `storages` differ, or that are constants.
        """
        first = dict.fromkeys(constants, -1)
        calls, outputs = list(self.calls), list(self.outputs)
        for i, (v, storage) in enumerate(zip(outputs, storages, strict=False)):
            x = v.root
            if (x.call is not None or x in first) and first.setdefault(x, storage) != storage:
                copied = Value(x.shape, x.strides, x.dtype, x.device)
                copied.call = Call(registry["copy"], (x,), {}, (copied,))
                calls.append(copied.call)
                outputs[i] = copied.window(v.shape, v.strides, v.offset)
        return Graph(self.inputs, calls, outputs, self.writes)

    def without_common_calls(self) -> Graph:
        """Return the graph with one call in place of equal ones."""
        from genesis.backend.cuda.dispatch import exact, is_value

        first: dict[Any, Call] = {}
        same: dict[Value, Value] = {}
        kept = []

        def renamed(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            if x.base is None:
                return same.get(x, x)
            return same[x.root].window(x.shape, x.strides, x.offset) if x.root in same else x

        def key_of(x: Any) -> Any:
            if isinstance(x, Value):
                return (x.root, x.shape, x.strides, x.offset)
            return exact(x) if is_value(x) else id(x)

        for call in self.calls:
            inputs = tuple(renamed(x) for x in call.inputs)
            layouts = tuple((o.shape, o.strides, o.dtype) for o in call.outputs)
            attrs = tuple((name, key_of(value)) for name, value in call.attrs.items())
            key = (call.op, tuple(key_of(x) for x in inputs), attrs, layouts)
            if key in first:
                same.update(zip(call.outputs, first[key].outputs, strict=True))
                continue
            renewed = Call(call.op, inputs, call.attrs, call.outputs)
            for output in call.outputs:
                output.call = renewed
            first[key] = renewed
            kept.append(renewed)
        outputs = [renamed(v) for v in self.outputs]
        return Graph(self.inputs, kept, outputs, [(a, renamed(b)) for a, b in self.writes])
