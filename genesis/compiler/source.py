"""Generated kernels: a group of calls as the source of one Triton kernel.

The source calls the same functions of one tile as the hand-written kernels (`genesis.kernels.pointwise`), so every op
has one definition. Values stay in float32 between the ops of a kernel, where separate kernels would round to the type
of the result. A kernel of a group without reductions works on tiles [BLOCK] of elements in memory order. With
reductions it works on tiles [R, C]: R rows, and all columns of the row, rounded up to a power of two. Where that would
add many idle columns, the row is cut into up to three pieces of C, C_1 and C_2 columns, each with its own lines.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.launch import launch
from genesis.compiler.fuse import REDUCTIONS, ROW_LIMIT, Group, reduced_axes
from genesis.compiler.graph import Call, Value
from genesis.compiler.program import Step, run_op
from genesis.dtypes import DType, bool_, float32, int32, int64
from genesis.kernels import maths
from genesis.kernels.elements import (
    TRITON,
    collapse,
    converted,
    in_order,
    needs_int64,
    offsets,
    offsets_after,
    work_type,
)
from genesis.kernels.formulas import jit_source, literal, tile_function
from genesis.kernels.pointwise import random
from genesis.kernels.pointwise.elementwise import Expression, expression, identity, scalar_argument
from genesis.op import registry
from genesis.shapes import Shape, broadcast_strides, contiguous_strides, numel

WRITTEN = ("dropout", "place", "choose", "deposit")  # ops for which `_Writer` has a method

# --- Expressions ------------------------------------------------------------------------------------------------------


def expression_of(call: Call) -> Expression | None:
    """Return the expression of an elementwise call, with values as operands; None for an op without a formula."""
    out, name = call.outputs[0], call.op.name
    if name in ("copy", "cast", "overwrite", "fill", *WRITTEN):
        x = call.attrs["value"] if name == "fill" else call.inputs[name == "overwrite"]
        work = work_type(x.dtype if isinstance(x, Value) else out.dtype)
        return Expression(identity, (x,), work, work)
    return None if call.op.formula is None else expression(call.op, out.dtype, *call.inputs)


# --- The kernel of a group --------------------------------------------------------------------------------------------


class GroupStep(Step):
    """A group as a step of a program: a kernel, and the ops that reduce its partial results.

    Attributes:
        source: the Triton source.
        operands: windows, in the order of the kernel's pointers.
        strides: strides over the space of stored values, operands and indices.
        tile: R, C and the sizes of further pieces; or BLOCK, 0.
    """

    def __init__(self, group: Group, stored: list[Value]) -> None:
        self.group, self.stored = group, [v for v in stored if v in group.places]
        writer = _Writer(group, self.stored)
        if group.split is None and not group.partial and (split := _rows(group.space, writer.strides)) is not None:
            group.split = split  # then addresses need no division of element numbers
            writer = _Writer(group, self.stored)
        self.operands, self.strides, self.order = writer.operands, writer.strides, writer.order
        results = [*self.stored, *(call.outputs[0] for call in group.partial)]
        super().__init__(group.calls, [v.root for v in self.operands], results)
        # The name depends on nothing but the source, so that another process finds the machine code in the cache.
        source = writer.source("kernel", len(self.stored))
        digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        title = "_".join([*(call.op.name for call in group.calls[:4]), digest])
        self.source = source.replace("def kernel(", f"def {title}(", 1)
        self.kernel = jit_source(self.source, title, writer.globals, "genesis.compiler.generated")
        self.tile, self.tiles = self._tiling(writer)

    def _tiling(self, writer: _Writer) -> tuple[tuple[int, ...], int]:
        """The tile of a program, and the number of tiles."""
        group = self.group
        if group.split is None:
            return (1024, 0), -(-numel(group.space) // 1024)
        if not writer.is_blocked:
            return (writer.rows, *writer.pieces), -(-group.rows // writer.rows)
        columns = min((1024, 512, 256, 128, 64, 32), key=lambda c: -(-group.columns // c) * c)
        rows = 1024 // columns
        if _is_transposed(group.space, group.split, self.strides):  # 64 bytes or more along both contiguous dimensions
            rows = columns = 32 if max(v.dtype.itemsize for v in (*self.stored, *self.operands)) > 2 else 64
        return (rows, columns), -(-group.rows // rows) * -(-group.columns // columns)

    def run(self, array_of: Callable[[Value], Array]) -> None:
        # With partial results there are at most as many programs as run at once.
        backend: Any = array_of(self.results[0]).storage.backend
        resident = backend.persistent_programs(32 // warps(self.tile))
        programs = min(self.tiles, resident) if self.group.partial else self.tiles
        totals = [array_of(call.outputs[0]) for call in self.group.partial]
        pairs = zip(self.group.partial, totals, strict=True)
        partials = [empty((programs, x.size), accumulator(call), x.device) for call, x in pairs]
        self._launch(programs, [*map(array_of, self.stored), *partials], list(map(array_of, self.operands)))
        for call, out, partial in zip(self.group.partial, totals, partials, strict=True):
            flat = out.view((out.size,), (1,), out.offset)
            name = "sum" if call.op.name in ("sum", "mean", "sum_to_shape") else call.op.name
            run_op(registry[name], (flat,), (partial,), {"axes": (0,), "keepdim": False})

    def _launch(self, programs: int, stores: list[Array], loads: list[Array]) -> None:
        group, space, strides = self.group, self.group.space, self.strides
        if group.split is None:
            sizes, *merged = collapse(*(tuple(each[d] for d in self.order) for each in (space, *strides)))
            block, width = self.tile[0], sizes[-1]
            wraps = (width + block - 2) // width if len(sizes) == 2 and width >= block // 4 else 0
            layout: Any = (numel(space), programs, sizes, *(in_order(sizes, each) for each in merged))
            constants = {"INT64": needs_int64(sizes, *merged), "WRAPS": wraps, "BLOCK": block}
        else:
            k = group.split
            rows, *row_strides = collapse(*(each[:k] for each in (space, *strides)))
            columns, *column_strides = collapse(*(each[k:] for each in (space, *strides)))
            both = [(*r, *c) for r, c in zip(row_strides, column_strides, strict=True)]
            layout = (group.rows, group.columns, programs, rows, columns, *row_strides, *column_strides)
            tile = dict(zip(("R", *(f"C{end}" for end in PIECES)), self.tile, strict=False))
            constants = {"INT64": needs_int64((*rows, *columns), *both), **tile}
        launch(self.kernel, programs, *stores, *loads, *layout, num_warps=warps(self.tile), **constants)


LOOP_TILE = 4096  # columns of a long row that a program holds at a time
PIECES = ("", "_1", "_2")  # suffixes of the names of a row's pieces; the writer's lines have $ in their place


def pieces_of(columns: int) -> list[int]:
    """The sizes of the pieces that cover a row: powers of two."""
    found: list[int] = []
    while (rest := columns - sum(found)) > 0:
        cover = max(16, triton.next_power_of_2(rest))
        found.append(cover if cover <= max(256, rest) or len(found) == len(PIECES) - 1 else cover // 2)
    whole: int = triton.next_power_of_2(columns)
    return found if sum(found) < 0.9 * whole else [whole]


def memory_order(space: Shape, strides: Shape) -> list[int]:
    """The dimensions from the one with the widest stride to the one with the narrowest."""
    return sorted(range(len(space)), key=lambda d: -strides[d])


def warps(tile: tuple[int, ...]) -> int:
    """Return the warps of a program. Rows in pieces load element by element, so more programs of 4 warps win."""
    elements, most = tile[0] * max(1, sum(tile[1:])), 4096 if len(tile) == 2 else 9216
    return 4 if elements < most else 8 if elements < 2 * most else 16


def accumulator(call: Call) -> DType:
    """The type in which a reduction accumulates."""
    if call.op.name in ("any", "all"):
        return bool_
    dtype: DType = call.inputs[0].dtype
    return work_type(dtype) if dtype.is_floating_point or call.op.name in ("amax", "amin") else int64


class _Writer:
    """The source of a group's kernel.

    Attributes:
        lines: the statements between loads and stores, for one tile.
        after: statements after the loop over tiles, which store partial results.
        stored: values that the kernel stores.
        operands: windows that the kernel loads, in the order of its pointers a0, a1, …
        windows: strides of the operands over the space.
        indices: strides over the space of the element numbers e0, e1, … that calls read.
        globals: the names that the source uses.
    """

    def __init__(self, group: Group, stored: list[Value]) -> None:
        self.group, self.stored = group, stored
        # Dimensions of the space, the widest stride of the first result first.
        widest = group.places[stored[0]] if stored else contiguous_strides(group.space)
        self.order = memory_order(group.space, widest)
        self.windows: list[Shape] = []
        self.indices: list[Shape] = []
        # Without reductions a tile holds a part of the columns.
        self.is_blocked = group.split is not None and not any(c.op.name in REDUCTIONS for c in group.calls)
        self.is_looped = group.split is not None and group.columns > ROW_LIMIT and not self.is_blocked
        self.rows, self.pieces = (1, [LOOP_TILE]) if self.is_looped else (0, [0])
        if group.split is not None and not self.is_looped and not self.is_blocked:  # a tile holds whole rows
            most = 2048 // int(triton.next_power_of_2(group.columns))
            self.rows = max(1, min(most, int(triton.next_power_of_2(group.rows))))
            self.pieces = pieces_of(group.columns)
        self.lines: list[tuple[int, str]] = []  # (level, line): a level counts the reductions before the line
        self.level = 0  # level of the current call
        self.levels: dict[str, int] = {}  # levels of registers
        self.sums: list[tuple[int, str, str]] = []  # reductions of a looped row: level, first line, line in the loop
        self.after: list[str] = []
        self.stores: list[str] = []  # stores of a looped row, in its last loop
        self.operands: list[Value] = []
        self.names: dict[Value, str] = {}  # registers of the group's values
        self.loaded: dict[tuple[Any, ...], str] = {}  # registers of operands from memory
        self.shapes: dict[str, str] = {}  # tile shapes of registers
        self.globals: dict[str, Any] = {"tl": tl, **{f.__name__: f for f in (converted, offsets, offsets_after)}}
        for call in group.calls:
            registers = [self.names[v] for v in call.reads if v in self.names]
            self.level = max((self.levels[name] for name in registers), default=0)
            if call in group.partial:
                self.total(group.partial.index(call), call)
            elif call.op.name in REDUCTIONS:
                self.reduction(call)
            else:
                getattr(self, call.op.name if call.op.name in WRITTEN else "point")(call)
        for j, v in enumerate(stored):
            self.store(j, v)

    @property
    def strides(self) -> list[Shape]:
        """Strides over the space of stored values, operands and indices."""
        return [*(self.group.places[v] for v in self.stored), *self.windows, *self.indices]

    @property
    def tile(self) -> str:
        return "[BLOCK]" if self.group.split is None else "[R, C$]"

    def function(self, function: Any) -> str:
        """The name by which the source refers to a function of tiles."""
        name: str = function.__name__
        assert self.globals.setdefault(name, function) is function, f"two functions are called {name}"
        return name

    def shape_of(self, strides: Shape) -> str:
        """The tile shape of a value with these strides over the space."""
        k = self.group.split
        if k is None:
            return "[BLOCK]"
        moves = [st != 0 and s > 1 for st, s in zip(strides, self.group.space, strict=True)]
        return f"[{'R' if any(moves[:k]) else '1'}, {'C' if any(moves[k:]) else '1'}]"

    def address(self, name: str, shape: str) -> tuple[str, str]:
        """The offsets of an array's tile, and their mask."""
        if shape == "[BLOCK]":
            return f"offsets_after(tile * BLOCK, i, sizes, s{name}, WRAPS)", "m"
        row, column = f"offsets(r, rows, r{name})", f"offsets(c$, columns, c{name})"
        return {
            "[R, C]": (f"{row} + {column}", "m & k$"),
            "[R, 1]": (row, "m"),
            "[1, C]": (column, "k$"),
            "[1, 1]": ("r * 0", "r == 0"),
        }[shape]

    def load(self, v: Value, strides: Shape, more: tuple[str, int] = ("", 0)) -> str:
        """The register that holds an operand from memory, in its work type.

        Args:
            more: an additional condition of the load, and an offset of its addresses.
        """
        key = (v.root, v.offset, strides, more)
        if key not in self.loaded:
            name = f"a{len(self.operands)}"
            self.operands.append(v)
            self.windows.append(strides)
            shape = self.shape_of(strides)
            where, mask = self.address(name, shape)
            if more[0]:
                where, mask = f"{where} - {more[1]}", f"{mask} & {more[0]}"
            elif shape == "[1, 1]":
                where, mask = "tl.full([1, 1], 0, tl.int32)", "None"
            register = f"x{name}{'$' if 'C' in shape else ''}"
            text = f"converted(tl.load({name} + {where}, mask={mask}), {_WORDS[work_type(v.dtype).name]})"
            self.lines.append((0, f"{register} = {text}  # {shape}"))
            self.loaded[key], self.shapes[register] = register, shape
        return self.loaded[key]

    def operand(self, x: Any, call: Call, work: DType) -> str:
        """An operand as an expression in the work type of an op."""
        if not isinstance(x, Value):
            shape = "[1]" if self.group.split is None else "[1, 1]"
            return f"tl.full({shape}, {literal(scalar_argument(x, work))}, {_WORDS[work.name]})"
        if x.root in self.names:
            name = self.names[x.root]
        else:
            lift = None if call.op.name in REDUCTIONS else self.group.lift(call)
            over = broadcast_strides(x.shape, x.strides, self.group.space) if lift is None else lift(x.shape, x.strides)
            name = self.load(x, over)
        return name if work_type(x.dtype) is work else f"converted({name}, {_WORDS[work.name]})"

    def keep(self, call: Call, text: str, work: DType | None = None, shape: str = "") -> None:
        """Name the result of a call, which `text` computes in the type `work`: by default the result's work type."""
        out, kind = call.outputs[0], work_type(call.outputs[0].dtype)
        work, shape = work or kind, shape or self.shape_of(self.group.places[out])
        name = f"v{len(self.names)}{'$' if 'C' in shape[-2:-1] else ''}"
        if call.op.name == "cast" and out.dtype is not kind:  # the user asks for the rounding
            text = f"converted({text}, {_WORDS[out.dtype.name]})"
            work = out.dtype
        if work is not kind or kind is bool_:
            text = f"converted({text}, {_WORDS[kind.name]})"
        self.emit(f"{name} = {text}  # {call.op.name}, {shape}")
        self.names[out], self.shapes[name], self.levels[name] = name, shape, self.level

    def point(self, call: Call) -> None:
        found = expression_of(call)
        assert found is not None
        works = [found.condition_type, *[found.work] * (len(found.operands) - 1)]
        arguments = [self.operand(x, call, work) for x, work in zip(found.operands, works, strict=True)]
        text, function = arguments[0], found.function
        shape = self.shape_of(self.group.places[call.outputs[0]])
        if call.op.name == "div" and found.work is float32:
            y = found.operands[1]
            if not isinstance(y, Value) and 1e-30 < abs(y) < 1e30:
                text = f"{text} * {self.operand(1 / y, call, float32)}"
            else:
                text = self.quotient(arguments[0], arguments[1], shape)
        elif function is not identity:
            narrow = call.outputs[0].dtype.itemsize < 4  # the result is rounded to 2 bytes at the end
            if call.op.name in ("sigmoid", "exp", "tanh"):
                function = tile_function(call.op.name, "fast" if narrow else "quick")
            text = f"{self.function(function)}({', '.join(arguments)})"
        self.keep(call, text, found.work, shape)

    def quotient(self, x: str, y: str, shape: str) -> str:
        """x / y with an error of up to two ulps; one reciprocal for all elements of a row."""
        if self.shapes.get(y, shape) == shape:
            return f"{x} / {y}"
        name = f"{y}_inverse"
        if name not in self.shapes:
            divide = self.function(maths.divide)
            self.emit(f"{name} = {divide}(tl.full({y}.shape, 1, tl.float32), {y})", self.levels.get(y, 0))
            self.shapes[name] = self.shapes[y]
        return f"{x} * {name}"

    def index(self, strides: Shape) -> str:
        """The name of an index that has these strides over the space."""
        if strides not in self.indices:
            self.indices.append(strides)
        return f"e{self.indices.index(strides)}"

    def coordinate(self, call: Call) -> str:
        """The coordinate of the elements of a tile in the dimension of a call, as an expression."""
        out, dim = call.outputs[0], call.attrs["dim"]
        place = broadcast_strides(out.shape, tuple(int(d == dim) for d in range(len(out.shape))), self.group.space)
        return self.address(self.index(place), self.shape_of(place))[0]

    def place(self, call: Call) -> None:
        (x,), out, dim, start = call.inputs, call.outputs[0], call.attrs["dim"], call.attrs["start"]
        at = self.coordinate(call)
        inside = f"({at} >= {start}) & ({at} < {start + x.shape[dim]})"
        strides = broadcast_strides(out.shape, x.strides, self.group.space)
        value = self.load(x, strides, (inside, start * x.strides[dim]))
        text = f"tl.where({inside}, {value}, tl.zeros_like({value}))"
        self.keep(call, text, shape=self.shape_of(strides))

    def choose(self, call: Call) -> None:
        out, at = call.outputs[0], self.coordinate(call)
        work = work_type(out.dtype)
        *first, text = [self.operand(x, call, work) for x in call.inputs]
        for value, end in reversed(list(zip(first, call.attrs["ends"], strict=False))):
            text = f"tl.where({at} < {end}, {value}, {text})"
        self.keep(call, text)

    def deposit(self, call: Call) -> None:
        (x, index), out, at = call.inputs, call.outputs[0], self.coordinate(call)
        work, i = work_type(out.dtype), self.operand(index, call, int64)
        value, i = self.operand(x, call, work), f"tl.where({i} < 0, {i} + {call.attrs['size']}, {i})"
        self.keep(call, f"tl.where({at} == {i}, {value}, tl.zeros_like({value}))")

    def dropout(self, call: Call) -> None:
        """Write a dropout. The four words of a counter decide on four neighbours in row-major order."""
        (x, position), out, space, k = call.inputs, call.outputs[0], self.group.space, self.group.split
        work, p = work_type(out.dtype), call.attrs["p"]
        lift = self.group.lift(call)
        assert lift is not None
        strides, place = lift(out.shape, contiguous_strides(out.shape)), self.group.places[out]
        e, pointer = self.index(strides), f"a{len(self.operands)}"
        self.operands.append(position)
        self.windows.append((0,) * len(space))
        attrs = f"{call.attrs['offset']}, {min(int(p * 2.0**32), 0xFFFFFFFF)}"
        shape, value = self.shape_of(place), self.operand(x, call, work)
        if k is None:
            fours = collapse(*(tuple(each[d] for d in self.order) for each in (space, strides)))[1] == (1,)
            where, aligned = "tile * BLOCK + tl.arange(0, BLOCK // 4) * 4", True
        else:
            fours = shape[-2] == "C" and self.group.columns > 2 and collapse(space[k:], strides[k:])[1] == (1,)
            where = f"offsets(r, rows, r{e}) + first$ + tl.arange(0, C$ // 4)[None, :] * 4"
            aligned = all(st % 4 == 0 for st in strides[:k])
        if fours:
            keeps = f"{self.function(random.kept_fours)}({pointer}, {where}, {attrs}, {aligned})"
        else:
            where = self.address(e, shape)[0]
            keeps = f"{self.function(random.kept)}({pointer}, {where}, {attrs})"
        scale = literal(float(1 / (1 - p) if p < 1 else 0))
        word = _WORDS[work.name]
        text = f"tl.where({keeps}, tl.full([1] * {shape.count(',') + 1}, {scale}, {word}), 0.0) * {value}"
        self.keep(call, text, work, shape)

    def masked(self, text: str, other: Any) -> str:
        """Return `text` with `other` in the columns beyond the row's end."""
        columns = self.group.columns
        text = f"tl.broadcast_to({text}, [R, C$])"
        return text if columns & (columns - 1) == 0 else f"tl.where(k$, {text}, {other})"

    def reduce_row(self, value: str, op: str, work: DType) -> str:
        """Return the reduction of a value over its row."""
        neutral, join, form = self.joined(op, work)
        value = self.masked(value, neutral)
        if not self.is_looped:
            pieces = [form.format(value, 1).replace("$", end) for end in PIECES[: len(self.pieces)]]
            if self.rows == 1 and len(pieces) > 1:  # a scalar: Triton 3.6 broadcasts a sum of sums in a bad layout
                pieces = [form.format(piece, 0) for piece in pieces]
                return f"tl.full([1, 1], {functools.reduce(join.format, pieces)}, {_WORDS[work.name]})"
            return f"({functools.reduce(join.format, pieces)})[:, None]"
        name = f"s{len(self.sums)}"
        first = f"{name} = tl.full([R, C], {neutral}, {_WORDS[work.name]})"
        self.sums.append((self.level, first, f"{name} = {join.format(name, value)}"))
        self.level += 1
        return f"{form.format(name, 1)}[:, None]"

    def joined(self, op: str, work: DType) -> tuple[str, str, str]:
        """The neutral value of a reduction, the reduction of two values, and the reduction of a dimension of a tile."""
        if op in ("amax", "amin"):
            combine = self.function(maths.maximum if op == "amax" else maths.minimum)
            return _extreme(work, op), combine + "({}, {})", f"tl.reduce({{}}, {{}}, {combine})"
        if op in ("any", "all"):
            name, neutral = ("max", "0") if op == "any" else ("min", "1")
            return neutral, f"tl.{name}imum({{}}, {{}})", f"tl.{name}({{}}, {{}})"
        return "0", "{} + {}", "tl.sum({}, {})"

    def reduction(self, call: Call) -> None:
        """Write a reduction over the columns of the tile."""
        op, x, columns = call.op.name, call.inputs[0], float(self.group.columns)
        work = accumulator(call)
        value = self.operand(x, call, work)
        if op == "count_nonzero":
            value = f"converted(converted({self.operand(x, call, work_type(x.dtype))}, tl.int1), tl.int64)"
        if op == "var":  # in two passes over the row
            name = f"v{len(self.names)}"
            self.emit(f"{name}_sum = {self.reduce_row(value, op, work)}")
            self.emit(f"{name}_far$ = {self.masked(f'{value} - {name}_sum / {columns}', 0)}  # [R, C]")
            count = f"tl.full([1, 1], {max(columns - call.attrs.get('correction', 1), 0.0)}, {_WORDS[work.name]})"
            text = f"({self.reduce_row(f'{name}_far$ * {name}_far$', op, work)}) / {count}"
        elif op in ("any", "all"):
            text = self.reduce_row(f"{value}.to(tl.int32)", op, int32) + " != 0"
        else:
            text = self.reduce_row(value, op, work)
            text = f"({text}) / {columns}" if op == "mean" else text
        self.keep(call, text, work, "[R, 1]")

    def total(self, j: int, call: Call) -> None:
        """Write a reduction over rows or over all elements. Each program stores the partial result of its tiles."""
        op, work = call.op.name, accumulator(call)
        value = self.operand(call.inputs[0], call, work)
        whole = len(reduced_axes(call)) == len(self.group.space)
        mask, name = ("m", f"t{j}") if self.group.split is None else ("m & k$", f"t{j}$")
        neutral, join, form = self.joined(op, work)
        tile = f"tl.where({mask}, tl.broadcast_to({value}, {self.tile}), {neutral})"
        self.emit(f"{name} = {join.format(name, tile)}")
        text = form.format(name, 0)
        if op == "mean":
            text = f"{text} / {float(numel([self.group.space[a] for a in reduced_axes(call)]))}"
        if whole:
            self.after.append(f"tl.store(p{j} + tl.program_id(0), {text})")
        else:
            at = "first$ + tl.arange(0, C$)"
            where = f"p{j} + tl.program_id(0) * columns_count + {at}"
            self.after.append(f"tl.store({where}, {text}, mask={at} < columns_count)")

    def store(self, j: int, v: Value) -> None:
        """Write the store of a value of the group."""
        shape = self.shape_of(self.group.places[v])
        where, mask = self.address(f"o{j}", shape)
        tile = "[R, 1]" if shape == "[1, 1]" else shape.replace("C", "C$")
        text = f"converted({self.names[v]}, o{j}.dtype.element_ty)"
        line = f"tl.store(o{j} + {where}, tl.broadcast_to({text}, {tile}), mask={mask})"
        if self.is_looped:
            (self.stores if "$" in line else self.after).append(line)
        else:
            self.emit(line)

    def loops(self, head: list[str]) -> list[str]:
        """Return the loops over a long row: one per level, for its reductions. The last one also stores."""
        last = max((level for level, line in self.lines if "$" in line), default=0) if self.stores else 0
        last, code = max([last, *(level for level, _, _ in self.sums)]), []
        for level in range(last + 2):
            code += [line for n, line in self.lines if n == level and "$" not in line]
            sums = [each for each in self.sums if each[0] == level]
            stores = self.stores if level == last else []
            if not sums and not stores:
                continue
            elements = [line for n, line in self.lines if n <= level and "$" in line]
            inside = [*head[1:], *elements, *(step for _, _, step in sums), *stores]
            loop = ["for first$ in range(0, columns_count, C):", *(f"    {line}" for line in inside)]
            code += [
                *(first for _, first, _ in sums),
                *(line.replace("C$", "C").replace("$", f"_{level}") for line in loop),
            ]
        return code

    def emit(self, line: str, level: int | None = None) -> None:
        self.lines.append((self.level if level is None else level, line))

    def lines_of_pieces(self, line: str) -> list[str]:
        """Return the line for each piece of the row, or only once if it contains no $."""
        ends = PIECES[: len(self.pieces)] if "$" in line else PIECES[:1]
        return [line.replace("$", end).replace(", C]", f", C{end}]") for end in ends]

    def source(self, title: str, stores: int) -> str:
        """Return the source of the kernel."""
        totals = self.group.partial
        loads = [f"a{i}" for i in range(len(self.operands))]
        each = [*(f"o{j}" for j in range(stores)), *loads, *(f"e{i}" for i in range(len(self.indices)))]
        pointers = [*each[:stores], *(f"p{j}" for j in range(len(totals))), *loads]
        if self.group.split is None:
            arguments = [*pointers, "n", "programs", "sizes", *(f"s{e}" for e in each)]
            constants, count, head = "WRAPS: tl.constexpr, BLOCK: tl.constexpr", "tl.cdiv(n, BLOCK)", []
            tile = ["i = tile * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]", "m = i < n  # [BLOCK]"]
        else:
            sizes = ["rows_count", "columns_count", "programs", "rows", "columns"]
            arguments = [*pointers, *sizes, *(f"r{e}" for e in each), *(f"c{e}" for e in each)]
            ends = PIECES[: len(self.pieces)]
            constants = ", ".join(["R: tl.constexpr", *(f"C{end}: tl.constexpr" for end in ends)])
            count = "tl.cdiv(rows_count, R)"
            head = ["c$ = (first$ + tl.arange(0, C$))[None, :]  # [1, C]", "k$ = c$ < columns_count  # [1, C]"]
            tile = ["r = (tile * R + tl.arange(0, R))[:, None]  # [R, 1]", "m = r < rows_count  # [R, 1]"]
            if self.is_blocked:
                parts = "tl.cdiv(columns_count, C)"
                head, tile = [], [f"first = tile % {parts} * C", f"tile = tile // {parts}", *head, *tile]
            else:
                starts = [" + ".join(["0", *(f"C{end}" for end in ends[:i])]) for i in range(len(ends))]
                head = [*(f"first{end} = {start}" for end, start in zip(ends, starts, strict=True)), *head]
        for j, call in enumerate(totals):
            start = self.joined(call.op.name, accumulator(call))[0]
            name = f"t{j}" if self.group.split is None else f"t{j}$"
            head.append(f"{name} = tl.full({self.tile}, {start}, {_WORDS[accumulator(call).name]})")
        pad, lines = " " * 4, [line for _, line in self.lines]
        body = ["if INT64:", "    tile = tile.to(tl.int64)", *tile]
        if self.group.split is None:  # masks of lengths that are not multiples of 16 would prevent wide loads
            whole = [line.replace(", mask=m)", ")") for line in lines]
            body += ["if tile * BLOCK + BLOCK <= n:", *(pad + line for line in whole), "else:"]
            body += [pad + line for line in lines]
        else:
            body += self.loops(head) if self.is_looped else lines
            head = [] if self.is_looped else head
        loop = ["tile = tl.program_id(0)"]
        if totals:
            loop, body = [f"for tile in range(tl.program_id(0), {count}, programs):"], [pad + line for line in body]
        text = [piece for line in (*head, *loop, *body, *self.after) for piece in self.lines_of_pieces(line)]
        signature = f"def {title}({', '.join(arguments)}, INT64: tl.constexpr, {constants}):"
        return "\n".join([signature, *(pad + line for line in text)]) + "\n"


# A type as the source names it.
_WORDS = {name: next(f"tl.{n}" for n in dir(tl) if getattr(tl, n) is kind) for name, kind in TRITON.items()}


def _extreme(work: DType, op: str) -> str:
    """The neutral value of amax or amin."""
    if work.is_floating_point:
        return literal(-math.inf if op == "amax" else math.inf)
    limits = (0, 1) if work is bool_ else (np.iinfo(work.numpy).min, np.iinfo(work.numpy).max)
    return literal(limits[op == "amin"])


def _rows(space: Shape, strides: list[Shape]) -> int | None:
    """Return the split of a space that does not merge into one dimension, if its rows load as vectors.

    Rows load as vectors if they have 32 or more columns, a multiple of 16. Otherwise contiguous operands load as
    vectors of all elements. An operand that is contiguous along the rows needs tiles in any case.
    """
    if len(collapse(space, *strides)[0]) == 1 or memory_order(space, strides[0]) != list(range(len(space))):
        return None
    k = next(k for k in range(len(space)) if len(collapse(space[k:], *(each[k:] for each in strides))[0]) == 1)
    is_even = numel(space[k:]) >= 32 and numel(space[k:]) % 16 == 0
    return k if k and (is_even or _is_transposed(space, k, strides)) else None


def _is_transposed(space: Shape, k: int, strides: list[Shape]) -> bool:
    """Whether an operand is contiguous along the last dimension of the rows, and not along the columns."""
    wide = [d for d, n in enumerate(space) if n > 1]
    row, column = max((d for d in wide if d < k), default=0), max(d for d in wide if d >= k)
    return min(space[row], numel(space[k:])) >= 16 and any(st[row] == 1 and st[column] > 1 for st in strides)
