"""The graph of a traced function: values and the calls of ops that compute them.

Values are immutable: a change in place makes a new value with the layout of the old one. A view has no call: it
is a value that names its `root`, the value whose memory it views.

`Windows` rewrites parts of arrays, `cat` and slices, as calls over the whole shape, which fuse with their neighbours.
A kernel computes one element of each value per element of its space. So a piece of a `cat` becomes a value of the whole
shape that is defined only in its part, and `choose` selects each element from the piece that covers it. The ops that
compute a piece run on the whole shape, and their operands are loaded with a mask. A slice of a computed value is
computed again from slices of the operands, and so are a few elements that an index picks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genesis.array import Array
from genesis.backend import Device
from genesis.backend.cuda.dispatch import exact, is_value
from genesis.dtypes import DType
from genesis.op import Op, execute, registry
from genesis.shapes import Shape, broadcast_strides, contiguous_strides, numel


@dataclass(eq=False, slots=True)
class Value:
    """An array of a traced function.

    Attributes:
        root: the value whose memory this one views; the value itself if it is not a view.
        offset: the window's first element, relative to the first element of `root`.
    """

    shape: Shape
    strides: Shape
    dtype: DType
    device: Device
    base: Value | None = None
    offset: int = 0

    @classmethod
    def new(cls, shape: Shape, dtype: DType, device: Device) -> Value:
        """Return a contiguous value."""
        return cls(shape, contiguous_strides(shape), dtype, device)

    @classmethod
    def like(cls, x: Array | Value) -> Value:
        """Return a value with the layout of an array or of another value."""
        return cls(x.shape, x.strides, x.dtype, x.device)

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
        return Value(shape, strides, root.dtype, root.device, root, offset)

    def within(self, root: Array) -> Array:
        """Return the array of this value, given the array of its root."""
        if (self.shape, self.strides, self.offset) == (root.shape, root.strides, 0):
            return root
        return root.view(self.shape, self.strides, root.offset + self.offset)


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
        return "seed" in self.attrs and "offset" in self.attrs

    @property
    def operands(self) -> list[Value]:
        return [x for x in self.inputs if isinstance(x, Value)]

    @property
    def reads(self) -> list[Value]:
        return [x.root for x in self.operands]


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

    @property
    def makers(self) -> dict[Value, Call]:
        """The call that computes each value; inputs have none."""
        return {v: call for call in self.calls for v in call.outputs}

    def run_ops(self, inputs: Sequence[Array]) -> list[Array]:
        """Run the calls one by one, as eager code does; return the arrays of the outputs."""
        arrays = dict(zip(self.inputs, inputs, strict=True))
        last = {v: call for call in self.calls for v in (*call.outputs, *call.reads)}
        kept = set(self.results)
        for call in self.calls:
            operands = tuple([x.within(arrays[x.root]) if isinstance(x, Value) else x for x in call.inputs])
            attrs = dict(call.attrs) if call.reads else {**call.attrs, "device": call.outputs[0].device}
            for v, x in zip(call.outputs, execute(call.op, operands, attrs), strict=True):
                arrays[v] = x
                if x.strides != v.strides:  # the op alone stores its result in another order
                    order = sorted(range(x.ndim), key=v.strides.__getitem__, reverse=True)
                    shape, strides = (tuple(of[d] for d in order) for of in (x.shape, x.strides))
                    arrays[v] = registry["copy"](x.view(shape, strides)).view(v.shape, v.strides)
            for v in {*call.outputs, *call.reads} - kept:
                if last[v] is call:
                    del arrays[v]  # frees its memory
        return [v.within(arrays[v.root]) for v in self.outputs]

    def lines(self) -> list[str]:
        """One line for each call, and one for the results."""
        names = {v: f"in{i}" for i, v in enumerate(self.inputs)} | {v: f"v{i}" for i, v in enumerate(self.makers)}

        def text(x: Any) -> str:
            if not isinstance(x, Value):
                return repr(x)
            return names[x.root] + ("" if x.base is None else f"[{x.shape}, {x.strides}, {x.offset}]")

        lines = []
        for call in self.calls:
            results = ", ".join(f"{names[v]} {v.dtype.name} {v.shape}" for v in call.outputs)
            attrs = [f"{name}={value!r}" for name, value in call.attrs.items()]
            lines.append(f"{results} = {call.op.name}({', '.join([*map(text, call.inputs), *attrs])})")
        writes = [f"{text(old)} becomes {text(new)}" for old, new in self.writes]
        return [*lines, ", ".join([*map(text, self.outputs), *writes])]

    def calls_for(self, roots: Iterable[Value], known: Collection[Value] = ()) -> list[Call]:
        """Return the calls that compute these roots from inputs and from `known` roots, in order."""
        live, kept = {v for v in roots if v not in known}, []
        for call in reversed(self.calls):
            if not live.isdisjoint(call.outputs):
                live.update(v for v in call.reads if v not in known)
                kept.append(call)
        return kept[::-1]

    def without_dead_calls(self) -> Graph:
        return Graph(self.inputs, self.calls_for(self.results), self.outputs, self.writes)

    def with_own_memory(self, storages: Sequence[int], constants: Iterable[Value] = ()) -> Graph:
        """Return the graph with copies of those of the first `len(storages)` outputs that share a root although their
        `storages` differ, or that are constants.
        """
        first = dict.fromkeys(constants, -1)
        calls, outputs, inputs = list(self.calls), list(self.outputs), set(self.inputs)
        for i, (v, storage) in enumerate(zip(outputs, storages, strict=False)):
            x = v.root
            if (x not in inputs or x in first) and first.setdefault(x, storage) != storage:
                copied = Value.like(x)
                calls.append(Call(registry["copy"], (x,), {}, (copied,)))
                outputs[i] = copied.window(v.shape, v.strides, v.offset)
        return Graph(self.inputs, calls, outputs, self.writes)

    def without_common_calls(self) -> Graph:
        """Return the graph with one call in place of equal ones."""
        first: dict[Any, Call] = {}
        same: dict[Value, Value] = {}

        def key_of(x: Any) -> Any:
            if isinstance(x, Value):
                return (x.root, x.shape, x.strides, x.offset)
            return exact(x) if is_value(x) else id(x)

        for call in self.calls:
            inputs = tuple(renamed(x, same) for x in call.inputs)
            layouts = tuple((o.shape, o.strides, o.dtype) for o in call.outputs)
            attrs = tuple((name, key_of(value)) for name, value in call.attrs.items())
            renewed = Call(call.op, inputs, call.attrs, call.outputs)
            known = first.setdefault((call.op, tuple(map(key_of, inputs)), attrs, layouts), renewed)
            if known is not renewed:
                same.update(zip(call.outputs, known.outputs, strict=True))
        outputs = [renamed(v, same) for v in self.outputs]
        return Graph(self.inputs, list(first.values()), outputs, [(a, renamed(b, same)) for a, b in self.writes])


def renamed(x: Any, names: Mapping[Value, Value]) -> Any:
    """Return an operand with another value in place of its root, if there is one."""
    value = names.get(x.root) if isinstance(x, Value) else None
    return x if value is None else value.root.window(x.shape, x.strides, value.offset + x.offset)


# --- Parts of arrays inside a kernel ----------------------------------------------------------------------------------

DEPTH = 6  # most successive ops that run on the whole shape, or are computed again for a slice
PARTS = 8  # most parts of a cat


def _nowhere(*_: Any, **__: Any) -> Any:
    raise AssertionError("only generated kernels compute this op")


# x from `start` on in a dimension of `size` elements, and zeros elsewhere.
PLACE = Op("place", _nowhere, _nowhere, elementwise=True, family="compiled", cuda_impl=_nowhere)
# Along a dimension, the elements before ends[0] of the first part, then those before ends[1] of the second, …
CHOOSE = Op("choose", _nowhere, _nowhere, elementwise=True, family="compiled", cuda_impl=_nowhere)
# x where the coordinate in `dim` is the index, which may count from the end, and zeros elsewhere.
DEPOSIT = Op("deposit", _nowhere, _nowhere, elementwise=True, family="compiled", cuda_impl=_nowhere)


def same_strides(a: Shape, b: Shape, shape: Shape) -> bool:
    """Whether two windows of a shape address the same elements."""
    return all(x == y or s == 1 for x, y, s in zip(a, b, shape, strict=True))


def starts_of(root: Shape, root_strides: Shape, shape: Shape, strides: Shape, offset: int) -> list[int] | None:
    """The first index of a slice in each dimension of the whole; None if the window is not such a slice."""
    if not len(shape) == len(strides) == len(root) or 0 in shape or not same_strides(strides, root_strides, shape):
        return None
    if any(st <= 0 for st, s in zip(root_strides, root, strict=True) if s > 1):
        return None
    starts = [0] * len(root)
    for d in sorted(range(len(root)), key=lambda d: -root_strides[d]):
        if root[d] > 1:
            starts[d], offset = divmod(offset, root_strides[d])
    fits = all(a + s <= n for a, s, n in zip(starts, shape, root, strict=True))
    return starts if fits and offset == 0 else None


class Windows:
    """Rewrites a graph so that parts of arrays can be fused.

    Args:
        is_point: whether a kernel can hold an elementwise call.
    """

    def __init__(self, graph: Graph, is_point: Callable[[Call], bool]) -> None:
        self.calls: list[Call] = []
        self.made_by: dict[Value, Call] = {}
        self.known: dict[Any, Value] = {}
        self.kept = set(graph.results)
        self.is_point = is_point
        for call in graph.calls:
            inputs = tuple(self.narrow(x) if isinstance(x, Value) else x for x in call.inputs)
            call = self._picked(self._deposited(self._placed(Call(call.op, inputs, call.attrs, call.outputs))))
            self.calls.append(call)
            self.made_by.update(dict.fromkeys(call.outputs, call))
        self.graph = Graph(graph.inputs, self.calls, graph.outputs, graph.writes).without_dead_calls()

    def _placed(self, call: Call) -> Call:
        """Return `choose` for a cat or the scattering of a slice, and other calls unchanged."""
        out, attrs = call.outputs[0], call.attrs
        if call.op.name == "cat":
            parts = [x for x in call.inputs if x.shape != (0,)]
            dim = attrs["dim"]
            ends = list(itertools.accumulate(x.shape[dim] for x in parts))
            if len(parts) > PARTS or any(x.dtype is not out.dtype for x in parts) or not out.size:
                return call
        elif call.op.name in ("as_strided_backward", "as_strided_scatter"):
            *base, value = call.inputs
            around = base[0] if base else 0
            root = (base[0].shape, base[0].strides) if base else (attrs["source_shape"], attrs["source_strides"])
            starts = starts_of(*root, value.shape, attrs["strides"], attrs["offset"])
            smaller = [d for d, (s, n) in enumerate(zip(value.shape, root[0], strict=False)) if s != n]
            if starts is None or len(smaller) != 1 or value.dtype is not out.dtype:
                return call
            dim = smaller[0]
            parts, ends = [around, value, around], [starts[dim], starts[dim] + value.shape[dim], out.shape[dim]]
        else:
            return call
        pieces = [(x, a, b) for x, a, b in zip(parts, (0, *ends), ends, strict=False) if a < b]
        whole = tuple(
            self.extend(x, dim, start, out.shape[dim]) if isinstance(x, Value) and x.shape != out.shape else x
            for x, start, _ in pieces
        )
        return Call(CHOOSE, whole, {"dim": dim, "ends": tuple(end for _, _, end in pieces)}, call.outputs)

    def _deposited(self, call: Call) -> Call:
        """Return `deposit` for the gradient of an index that picks one element per row, and other calls unchanged."""
        if call.op.name != "index_get_backward" or not call.outputs[0].size:
            return call
        (g, *indices), dims, shape = call.inputs, call.attrs["dims"], call.attrs["shape"]
        own = [(d, index) for d, index in zip(dims, indices, strict=True) if not self._counts(index, d, g)]
        if len(own) != 1 or len(dims) != len(shape):
            return call
        (dim, index), rest = own[0], len(shape) - 1
        if dim == rest and g.shape == shape[:rest]:
            over = broadcast_strides(index.shape, index.strides, g.shape)
            g, index = (v.window((*g.shape, 1), (*st, 0), v.offset) for v, st in ((g, g.strides), (index, over)))
        is_pick = g.shape == (*shape[:dim], 1, *shape[dim + 1 :])
        return Call(DEPOSIT, (g, index), {"dim": dim, "size": shape[dim]}, call.outputs) if is_pick else call

    def _picked(self, call: Call) -> Call:
        """Return a call that computes only the few elements that an index picks, and other calls unchanged."""
        out, x = call.outputs[0], call.inputs[0] if call.inputs else call.outputs[0]
        if call.op.name != "index_get" or 8 * out.size > x.size or len(call.attrs["dims"]) != len(x.shape):
            return call
        maker = self._moves(x, DEPTH)
        if maker is None or maker.op.name == "fill":
            return call
        inputs = tuple(self._pick(v, x.shape, call, DEPTH - 1) for v in maker.inputs)
        return Call(maker.op, inputs, maker.attrs, call.outputs)

    def _pick(self, v: Any, shape: Shape, call: Call, depth: int) -> Any:
        """The elements that a call of index_get picks from an operand that is broadcast to a shape."""
        if not isinstance(v, Value):
            return v
        out, dims = call.outputs[0], call.attrs["dims"]
        x = v.window(shape, broadcast_strides(v.shape, v.strides, shape), v.offset)
        moves = {d for d, (st, n) in enumerate(zip(x.strides, shape, strict=True)) if st and n > 1}
        if moves <= {d for d, index in zip(dims, call.inputs[1:], strict=True) if self._counts(index, d, out)}:
            strides = tuple(x.strides[d] if d in moves else 0 for d in range(len(out.shape)))
            return x.window(out.shape, strides, x.offset)
        key = (x.root, x.shape, x.strides, x.offset, tuple(map(id, call.inputs[1:])))
        found = self._again(key, x, depth, out.shape, lambda v: self._pick(v, shape, call, depth - 1))
        return found or self._new(key, call.op, (x, *call.inputs[1:]), call.attrs, out.shape, x)

    def _counts(self, index: Any, dim: int, out: Value) -> bool:
        """Whether an index is 0, 1, 2, … along a dimension of the result, and constant along the others."""
        maker = self.made_by.get(index.root) if isinstance(index, Value) else None
        if maker is None or maker.op.name != "arange" or index.offset or dim >= len(out.shape):
            return False
        strides = broadcast_strides(index.shape, index.strides, out.shape)
        is_unit = all(st == (d == dim) or n == 1 for d, (st, n) in enumerate(zip(strides, out.shape, strict=True)))
        return is_unit and (maker.attrs["start"], maker.attrs["step"]) == (0, 1)

    def _moves(self, x: Value, depth: int) -> Call | None:
        """The elementwise call that computes a value and can compute it in another shape."""
        call = self.made_by.get(x)
        if call is None or depth == 0 or x in self.kept or call.op.name in ("place", "choose", "deposit", "overwrite"):
            return None
        return call if call.op.elementwise and not call.is_random and self.is_point(call) else None

    def _again(self, key: Any, x: Value, depth: int, shape: Shape, operand: Callable[[Value], Value]) -> Value | None:
        """Compute a value again in another shape, from other operands. None if that is impossible."""
        if key not in self.known and (call := self._moves(x, depth)) is not None:
            inputs = tuple(operand(v) if isinstance(v, Value) else v for v in call.inputs)
            self._new(key, call.op, inputs, call.attrs, shape, x)
        return self.known.get(key)

    def _new(
        self, key: Any, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], shape: Shape, like: Value
    ) -> Value:
        if op.name == "fill":
            attrs = {**attrs, "shape": shape}
        value = self.known[key] = Value.new(shape, like.dtype, like.device)
        call = self.made_by[value] = Call(op, inputs, attrs, (value,))
        self.calls.append(call)
        return value

    def extend(self, x: Value, dim: int, start: int, size: int, depth: int = DEPTH) -> Value:
        """Return a value of the whole shape that equals x in its part and is undefined elsewhere."""
        shape, at = (*x.shape[:dim], size, *x.shape[dim + 1 :]), dim - len(x.shape)
        if x.strides[dim] == 0:
            return x.window(shape, x.strides, x.offset)
        key = (x.root, x.shape, x.strides, x.offset, dim, start, size)

        def operand(v: Value) -> Value:
            is_cut = len(v.shape) >= -at and v.shape[at] == x.shape[at] and v.shape[at] != 1
            return self.extend(v, len(v.shape) + at, start, size, depth - 1) if is_cut else v

        found = self._again(key, x, depth, shape, operand)
        return found or self._new(key, PLACE, (x,), {"dim": dim, "start": start, "size": size}, shape, x)

    def narrow(self, x: Value, depth: int = DEPTH) -> Value:
        """A slice of a computed value, computed from slices of the operands; x itself if that is impossible."""
        root = x.root
        starts = None if root is x else starts_of(root.shape, root.strides, x.shape, x.strides, x.offset)
        if starts is None:
            return x

        def operand(v: Value) -> Value:
            skip = len(x.shape) - len(v.shape)
            whole = [n == root.shape[skip + d] for d, n in enumerate(v.shape)]
            shape = tuple(x.shape[skip + d] if w else 1 for d, w in enumerate(whole))
            first = sum(starts[skip + d] * v.strides[d] for d, w in enumerate(whole) if w)
            return self.narrow(v.window(shape, v.strides, v.offset + first), depth - 1)

        return self._again((root, x.shape, x.offset), root, depth, x.shape, operand) or x
