"""Fusion: which calls of a graph run together in one pass over memory.

All calls of a group iterate over one shape, its `space`. Elementwise calls, and reductions over trailing dimensions,
exchange values in registers: a call may read a value of its own group only at the element that it computes itself
(after broadcasting). Reductions over leading dimensions, or over all, end a group: each program stores a partial
result, and the op itself reduces these. Two groups are merged where a call reads from both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from genesis.compiler.graph import Call, Graph, Value, same_strides
from genesis.dtypes import DType, float32, float64
from genesis.op import registry
from genesis.shapes import Shape, broadcast_strides, contiguous_strides, normalize_axes, numel, reduced_shape

ROW_LIMIT = 16384  # elements of a row that one program keeps in registers; it reads longer rows several times
LOOP_LIMIT = 1 << 20  # elements of the longest row of one program
LOOP_ROWS = 128  # with fewer long rows the ops' own kernels are faster: several programs share a row
REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "sum_to_shape", "var", "any", "all", "count_nonzero"))
PARTIAL = frozenset(("sum", "mean", "amax", "amin", "sum_to_shape"))  # may end a group with partial results
MAX_CALLS = 64  # most calls of a group; registers are limited
MAX_OPERANDS = 24  # most arrays of a group


def reduced_axes(call: Call) -> tuple[int, ...]:
    """The dimensions of its input over which a reduction runs."""
    x = call.inputs[0]
    if call.op.name == "sum_to_shape":
        shape = tuple(call.attrs["shape"])
        pad = len(x.shape) - len(shape)
        return (*range(pad), *(i + pad for i, s in enumerate(shape) if s == 1 and x.shape[i + pad] != 1))
    return tuple(sorted(normalize_axes(call.attrs.get("axes"), len(x.shape))))


def longest_row(rows: int) -> int:
    """The most elements of a row that a kernel of `rows` rows can process."""
    return LOOP_LIMIT if rows >= LOOP_ROWS else ROW_LIMIT


@dataclass(eq=False)
class Group:
    """Calls that run in one kernel.

    Attributes:
        space: the shape over which the kernel iterates.
        split: number of leading dimensions of `space` that count rows; the others are reduced. None for a group
            without reductions over trailing dimensions.
        places: for each value of the group, its strides over `space`: 0 in a dimension that it does not depend on.
        partial: calls that end the group with partial results.
        reads: roots in memory that the calls read, and the results of `partial`.
    """

    space: Shape
    split: int | None = None
    calls: list[Call] = field(default_factory=list)
    places: dict[Value, Shape] = field(default_factory=dict)
    partial: list[Call] = field(default_factory=list)
    reads: list[Value] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return numel(self.space[: self.split])

    @property
    def columns(self) -> int:
        return numel(self.space[self.split :])

    # --- Whether a call may join --------------------------------------------------------------------------------------

    def add(self, call: Call) -> bool:
        """Add a call if the group can hold it; return whether it did. Otherwise the group stays as it is."""
        reads = [v for v in dict.fromkeys((*self.reads, *call.reads, call.outputs[0])) if v not in self.places]
        if len(self.calls) == MAX_CALLS or len(reads) > MAX_OPERANDS:
            return False
        if not (self._place_reduction(call) if call.op.name in REDUCTIONS else self._place(call)):
            return False
        self.calls.append(call)
        self.reads = [v for v in reads if v not in self.places]
        return True

    def _place(self, call: Call) -> bool:
        lift, out = self.lift(call), call.outputs[0]
        if call.op.name == "place" and call.reads[0] in self.places:  # it reads other elements than it computes
            return False
        if lift is None or not all(self._readable(x, lift) for x in call.operands):
            return False
        self.places[out] = lift(out.shape, out.strides)
        return True

    def lift(self, call: Call) -> Callable[[Shape, Shape], Shape] | None:
        """Return a function that maps (shape, strides) of an operand of an elementwise call to strides over `space`."""
        shape = call.outputs[0].shape
        if self.split is not None and shape == self.space[: self.split]:
            rows = [v for v in call.reads if v in self.places]
            zeros = (0,) * (len(self.space) - self.split)
            if rows and not any(any(self.places[v][self.split :]) for v in rows):
                return lambda s, st: (*broadcast_strides(s, st, shape), *zeros)
        if len(shape) > len(self.space):
            return None
        padded = (1,) * (len(self.space) - len(shape)) + shape
        if any(s not in (1, n) for s, n in zip(padded, self.space, strict=True)):
            return None
        # A smaller value is fused only if it has one element per row: others would be computed repeatedly.
        if numel(shape) != numel(self.space) and (self.split is None or numel(padded[self.split :]) != 1):
            return None
        return lambda s, st: broadcast_strides(s, st, self.space)

    def _readable(self, x: Value, lift: Callable[[Shape, Shape], Shape]) -> bool:
        """Whether an operand is either in memory before the group, or in a register at the right element."""
        place = self.places.get(x.root)
        if place is None:
            return all(x.root not in c.outputs for c in self.partial)
        return x.offset == 0 and same_strides(lift(x.shape, x.strides), place, self.space)

    def _place_reduction(self, call: Call) -> bool:
        x, out = call.inputs[0], call.outputs[0]
        axes = reduced_axes(call)
        if x.shape != self.space or not axes or not self._readable(x, lambda s, st: broadcast_strides(s, st, x.shape)):
            return False
        # A reduction over trailing dimensions gives a value for each row.
        ndim, count = len(x.shape), len(axes)
        split = ndim - count
        rows, columns = numel(x.shape[:split]), numel(x.shape[split:])
        partial_axes = [len(reduced_axes(c)) for c in self.partial]
        fits = columns <= (ROW_LIMIT if self.partial else longest_row(rows)) and (rows > 1 or columns <= 4096)
        if axes == tuple(range(split, ndim)) and self.split in (None, split) and fits and ndim not in partial_axes:
            self.split = split
            self.places[out] = (*contiguous_strides(x.shape[:split]), *(0,) * count)
            return True
        # One over leading dimensions, or over all, ends the group.
        if call.op.name not in PARTIAL or axes != tuple(range(count)) or partial_axes[:1] not in ([], [count]):
            return False
        if count < ndim:
            if self.split not in (None, count) or numel(x.shape[count:]) > ROW_LIMIT:
                return False
            self.split = count
        elif self.split is not None:
            return False
        self.partial.append(call)
        return True


Unit = Group | Call  # what runs as one step


class Fusion:
    """The groups of a graph, found in one pass over its calls.

    Args:
        is_point: whether a call is elementwise and the device can fuse it.
        reductions: whether the device can fuse reductions.
    """

    def __init__(self, graph: Graph, is_point: Callable[[Call], bool], reductions: bool) -> None:
        self.unit: dict[Call, Unit] = {}
        self.made_by = graph.makers
        self.order = {call: i for i, call in enumerate(graph.calls)}
        for call in graph.calls:
            fusible = is_point(call) or (reductions and is_reduction(call))
            self.unit[call] = self._place(call) if fusible else call
        self._join_readers()

    def _place(self, call: Call) -> Unit:
        """Merge the groups from which a call reads with the call, as far as possible; return its group."""
        mine = Group((call.inputs if call.op.name in REDUCTIONS else call.outputs)[0].shape)
        if not numel(mine.space) or not mine.add(call):
            return call
        joined = self.unit[call] = mine
        neighbours = [unit for unit in self._before(mine) if isinstance(unit, Group)]
        for group in sorted(neighbours, key=lambda g: -numel(g.space)):
            joined = (self._union(group, mine) if joined is mine else self._union(joined, group)) or joined
        if joined is mine:  # no group can hold the call, but two together may
            pairs = itertools.permutations(neighbours, 2)
            joined = next(filter(None, (self._union(*pair, mine) for pair in pairs)), mine)
        return joined

    def _join_readers(self) -> None:
        """Merge groups of one space that read the same memory, which one kernel loads once."""
        done: list[Group] = []
        for group in dict.fromkeys(u for u in self.unit.values() if isinstance(u, Group)):
            for other in tuple(done):
                shared = {v for c in group.calls for v in c.reads} & {v for c in other.calls for v in c.reads}
                is_whole = group.space == other.space and any(v.size == numel(group.space) for v in shared)
                if is_whole and (merged := self._union(other, group)) is not None:
                    done.remove(other)
                    group = merged
            done.append(group)

    def _union(self, *groups: Group) -> Group | None:
        """Replace groups by one over the largest space before the last; return it, or None if that is impossible."""
        splits = {group.split for group in groups} - {None}
        merged = Group(max((group.space for group in groups[:-1]), key=numel), next(iter(splits), None))
        ordered = sorted((call for group in groups for call in group.calls), key=self.order.__getitem__)
        if len(splits) > 1 or not all(map(merged.add, ordered)) or self._has_cycle(groups):
            return None
        self.unit.update(dict.fromkeys(ordered, merged))
        return merged

    def _before(self, unit: Unit) -> list[Unit]:
        """The other units that compute what a unit reads."""
        makers = (self.made_by.get(v) for v in unit.reads)
        return list(dict.fromkeys(u for maker in makers if maker and (u := self.unit[maker]) is not unit))

    def _has_cycle(self, groups: tuple[Group, ...]) -> bool:
        """Whether a path leads from these groups through other units back into them."""
        seen: set[Unit] = set(groups)
        stack = [unit for group in groups for unit in self._before(group) if unit not in seen]
        while stack:
            unit = stack.pop()
            if unit in groups:
                return True
            if unit not in seen:
                seen.add(unit)
                stack += self._before(unit)
        return False

    def ordered(self) -> list[Unit]:
        """Return groups and single calls, each after those that it reads from."""
        order: dict[Unit, None] = {}
        for last in self.unit.values():
            stack = [last]
            while stack:
                missing = [u for u in self._before(stack[-1]) if u not in order]
                if missing:
                    stack += missing
                else:
                    order[stack.pop()] = None
        return list(order)


def is_reduction(call: Call) -> bool:
    """Whether a call is a reduction that a kernel of rows can hold."""
    x = call.inputs[0] if call.inputs else None
    return call.op.name in REDUCTIONS and isinstance(x, Value) and len(call.outputs) == 1


def split_totals(graph: Graph) -> Graph:
    """Return the graph with totals of computed floats as two reductions, the first over rows that it reduces anyway."""
    pairs = [(call.inputs[0].shape, reduced_axes(call)) for call in graph.calls if is_reduction(call)]
    rows = {s: axes for s, axes in pairs if 0 < len(axes) < len(s) and axes == tuple(range(len(s) - len(axes), len(s)))}
    calls, makers = list[Call](), graph.makers

    def add(name: str, x: Value, attrs: dict[str, Any], shape: Shape, dtype: DType) -> Value:
        v = Value.new(shape, dtype, x.device)
        calls.append(Call(registry[name], (x,), attrs, (v,)))
        return v

    for call in graph.calls:
        x: Any = call.inputs[0] if call.inputs else None
        out = call.outputs[0]
        is_total = is_reduction(call) and call.op.name in PARTIAL and out.size == 1
        if is_total and x.shape in rows and x in makers and x.dtype is out.dtype and x.dtype.is_floating_point:
            wide = float64 if x.dtype is float64 else float32
            name, axes = "sum" if call.op.name == "sum_to_shape" else call.op.name, rows[x.shape]
            y = x if x.dtype is wide else add("cast", x, {"dtype": wide}, x.shape, wide)
            y = add(name, y, {"axes": axes, "keepdim": True}, reduced_shape(x.shape, axes, True), wide)
            y = add(name, y, {"axes": None, "keepdim": True}, (1,) * len(x.shape), wide)
            call = Call(registry["cast"], (y.window(out.shape, out.strides, 0),), {"dtype": out.dtype}, call.outputs)
        calls.append(call)
    return Graph(graph.inputs, calls, graph.outputs, graph.writes)
