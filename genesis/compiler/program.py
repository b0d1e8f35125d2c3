"""A program: the calls of a graph as steps that run on arrays, with one block of memory for the values between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from genesis.array import Array, Spec, empty
from genesis.backend import CPU
from genesis.backend.cpu import parallel
from genesis.compiler.fuse import Group
from genesis.compiler.graph import Call, Graph, Value
from genesis.dtypes import uint8
from genesis.op import Op, execute, registry
from genesis.ops.blocks import as_type, is_narrow
from genesis.ops.shape import extent
from genesis.shapes import is_contiguous, numel

ALIGNMENT = 256  # bytes
WARM_UP = 2  # calls before the capture, which compile kernels and show which inputs stay at their addresses

Arrays = dict[Value, Array]


class Step:
    """A part of a program: calls of its graph that run together. By itself, one call that runs the op's own kernel.

    Attributes:
        reads: the roots that it reads.
        results: the roots that it stores.
        source: the generated source; empty if the ops' own implementations run.
    """

    source = ""

    def __init__(self, calls: Sequence[Call], reads: Iterable[Value], results: Iterable[Value]) -> None:
        self.calls, self.reads, self.results = calls, list(dict.fromkeys(reads)), list(results)

    def run(self, array_of: Callable[[Value], Array]) -> None:
        """Compute the results, whose arrays exist already."""
        (call,) = self.calls
        inputs = tuple([array_of(x) if isinstance(x, Value) else x for x in call.inputs])
        outputs = tuple([array_of(v) for v in call.outputs])
        run_op(call.op, outputs, inputs, call.attrs)


def run_op(op: Op, outputs: tuple[Array, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
    """Run the implementation of an op, without dispatch, inside another op's implementation."""
    if outputs[0].device.type == "cpu":
        outputs[0].storage.backend.run(op, outputs, inputs, attrs)
        return
    from genesis.backend.cuda.dispatch import cuda_impl_of

    cuda_impl_of(op)(outputs[0] if len(outputs) == 1 else outputs, *inputs, **attrs)


# --- Groups of elementwise calls on the CPU ---------------------------------------------------------------------------

BLOCK = 1 << 17  # elements; with fewer, the calls of numpy cost more than the cache saves


class BlockStep(Step):
    """A group as a step of a program. Threads run the numpy references of its ops, block by block."""

    def __init__(self, group: Group, stored: list[Value]) -> None:
        loaded = [x for c in group.calls for x in c.operands if x.root not in group.places]
        super().__init__(group.calls, [x.root for x in loaded], stored)
        # Memory has the shape of the group's space, or one dimension if possible; a single element has none.
        space, known = group.space or (1,), list(dict.fromkeys((*loaded, *stored)))
        if all(v.size in (1, numel(space)) and is_contiguous(v.shape, v.strides) for v in known):
            space = (numel(space),)
        self.space, self.shapes = space, {v: () if v.size == 1 and v not in group.places else space for v in known}
        self.row, self.step = (row := numel(space[1:])), max(1, BLOCK // max(1, row))
        self.plan: list[tuple[Callable[..., Any], list[Any], Value]] = []
        for c in group.calls:
            function, operands = _block_function(c)
            # Values of the group are the roots themselves; what lies in memory may be a window.
            operands = [x.root if isinstance(x, Value) and x.root in group.places else x for x in operands]
            self.plan.append((function, operands, c.outputs[0]))
        inner = {c.outputs[0]: c.outputs[0].dtype.itemsize for c in group.calls if c.outputs[0] not in stored}
        self.places, self.nbytes = places_of([(c.reads, c.outputs) for c in group.calls], inner, in_place=True)

    def run(self, array_of: Callable[[Value], Array]) -> None:
        space, row, step, memory = self.space, self.row, self.step, {}
        for v, shape in self.shapes.items():
            memory[v] = a = array_of(v).view_np()
            if a.shape != shape:
                memory[v] = a.reshape(shape) if len(shape) < 2 or v in self.results else np.broadcast_to(a, shape)

        def work(start: int, stop: int) -> None:
            most = min(step, stop - start)
            size = -(-most * row // ALIGNMENT) * ALIGNMENT  # elements of a block
            scratch, shape = np.empty(self.nbytes * size, np.uint8), (most, *space[1:])
            blocks = {v: np.ndarray(shape, v.dtype.numpy, scratch, at * size) for v, at in self.places.items()}
            values = memory | blocks
            for first in range(start, stop, step):
                if most < space[0]:
                    part = slice(first, min(first + step, stop))
                    values = {v: a[part] if a.ndim else a for v, a in memory.items()}
                    values |= {v: a[: part.stop - first] for v, a in blocks.items()}
                for function, operands, result in self.plan:
                    function(*[values[x] if isinstance(x, Value) else x for x in operands], out=values[result])

        parallel(work, space[0], space[0] * row * len(self.calls))


def _block_function(call: Call) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return `f(*operands, out=)`, which computes a block of a call, and its operands.

    If no operand needs a cast, it is the function that the op's reference sweeps. The reference takes up to 20 us more,
    because each pass of numpy drops the interpreter from the cache.
    """
    op, dtype = call.op, call.outputs[0].dtype
    if op.swept is None or is_narrow(dtype.numpy) or any(v.dtype is not dtype for v in call.operands):
        return lambda *operands, out: op.reference(out, *operands, **call.attrs), call.inputs
    return op.swept, [x if isinstance(x, Value) else as_type(x, dtype.numpy) for x in call.inputs]


def places_of(
    uses: Sequence[tuple[Sequence[Value], Sequence[Value]]], sizes: Mapping[Value, int], last: Iterable[Value] = (),
    in_place: bool = False,
) -> tuple[dict[Value, int], int]:  # fmt: skip
    """Return the places of values in one block of memory, and its size. Values that live at once do not overlap.

    `uses` are the roots that each step reads and makes; `last` are read after all steps. A step overwrites a value of
    the same dtype that no later step reads only with `in_place`, because it may otherwise broadcast an operand.
    """
    ends = {v: i for i, (reads, _) in enumerate(uses) for v in reads} | dict.fromkeys(last, len(uses))
    live: list[tuple[int, int, int]] = []  # (start, end, last step that reads the value)
    places: dict[Value, int] = {}
    for i, (reads, made) in enumerate(uses):
        for v in made:
            if v not in sizes or v in places:
                continue
            live, at = sorted(each for each in live if each[2] >= i), 0
            for start, end, _ in live:
                if start - at >= sizes[v]:
                    break
                at = max(at, end)
            over = [places[u] for u in reads if in_place and u in places and u.dtype is v.dtype and ends[u] == i]
            at = min(over, default=at)
            live.append((at, at + sizes[v], ends.get(v, i)))
            places[v] = at
    return places, max((place + sizes[v] for v, place in places.items()), default=0)


# --- Programs ---------------------------------------------------------------------------------------------------------


class Program:
    """Steps with their memory, and the op outside the registry that runs them.

    Attributes:
        inputs: values of the arrays that the op takes.
        results: roots that the op stores, each into memory that is flat and of the root's `extent` if it is strided.
        changed: indices of inputs that change in place.
        in_place: new values of inputs that a step stores over the old ones.
    """

    def __init__(self, name: str, graph: Graph, steps: Sequence[Step]) -> None:
        self.graph, self.steps, self.inputs = graph, list(steps), graph.inputs
        own = set(graph.inputs)
        # A new value of an input is stored into the input itself at the end, unless it is also a result.
        self.results = list(dict.fromkeys(v.root for v in graph.outputs if v.root not in own))
        self.device = next((v.device for v in (*self.results, *(new for _, new in graph.writes))), CPU)
        self.changed = tuple(graph.inputs.index(old) for old, _ in graph.writes)
        self.in_place = {new: old for old, new in graph.writes if self._may_overwrite(old, new)}
        kept = {*self.inputs, *self.results, *self.in_place}
        sizes = {
            v: -(-max(extent(v.shape, v.strides) * v.dtype.itemsize, 1) // ALIGNMENT) * ALIGNMENT
            for step in self.steps
            for v in step.results
            if v not in kept
        }
        self.offsets, self.nbytes = places_of([(s.reads, s.results) for s in self.steps], sizes, graph.results)
        specs = tuple([
            Spec(v.shape if is_contiguous(v.shape, v.strides) else (extent(v.shape, v.strides),), v.dtype)
            for v in self.results
        ])  # fmt: skip
        self.op = Op(name, self._run, lambda *_: specs, mutates=self.changed, family="compiled", cuda_impl=self._run)

    def launch(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Run the op; return the arrays of `results`."""
        if not (self.results or self.changed):
            return ()
        device = self.device
        elsewhere = [x for x in inputs if x.device is not device and x.device != device]  # arguments without use
        return execute(self.op, tuple(inputs), {"device": device} if elsewhere or not inputs else {})

    def outputs(self, inputs: Sequence[Array], results: Sequence[Array]) -> list[Array]:
        """The arrays of the graph's outputs, given those of the inputs and of `results`."""
        roots = dict(zip((*self.results, *self.inputs), (*results, *inputs), strict=True))
        return [v.within(roots[v.root]) for v in self.graph.outputs]

    def _run(self, out: Any, *inputs: Any) -> None:
        """The op's implementation, which gets arrays, also on the CPU."""
        roots: Arrays = {}
        given = (*(out if isinstance(out, tuple) else (out,)), *inputs)
        for v, x in zip((*self.results, *self.inputs), given, strict=True):
            # Strided results are flat, and so are inputs of backward that forward stored.
            roots[v] = x if x.shape == v.shape else x.view(v.shape, v.strides)
        roots.update({new: roots[old] for new, old in self.in_place.items()})
        if self.nbytes:
            memory = empty((self.nbytes,), uint8, self.device)
            for value, place in self.offsets.items():
                roots[value] = Array(
                    memory.storage, value.shape, value.strides, value.dtype, value.device, place // value.dtype.itemsize
                )

        def array_of(value: Value) -> Array:
            return roots[value] if value.base is None else value.within(roots[value.base])

        for step in self.steps:
            step.run(array_of)
        for old, new in self.graph.writes:
            if new.root is not old and new not in self.in_place:
                run_op(registry["copy"], (roots[old],), (array_of(new),), {})

    def _may_overwrite(self, old: Value, new: Value) -> bool:
        """Whether a step may store a new value of an input over the old one: no later call reads the old one, and the
        step reads it only at the elements that it computes.
        """
        makers = [i for i, step in enumerate(self.steps) if new in step.results]
        if not makers or new in self.results or (new.shape, new.strides) != (old.shape, old.strides):
            return False
        calls = list(self.steps[makers[0]].calls)
        readers = [call for call in calls if old in call.reads]
        return (
            not any(old in step.reads for step in self.steps[makers[0] + 1 :])
            and not any(new in call.outputs for call in (calls[: calls.index(readers[-1])] if readers else ()))
            and all(c.op.elementwise or (c.op.name == "index_put" and old not in c.reads[1:]) for c in readers)
            and all(x is old and x.shape == c.outputs[0].shape for c in readers for x in c.operands if x.root is old)
        )


# --- mode="reduce-overhead" -------------------------------------------------------------------------------------------


class Replayed:
    """Runs a program, after some calls as a CUDA graph.

    A graph reads and writes fixed addresses. Inputs whose addresses change between calls, such as activations, are
    first copied to fixed addresses; parameters are read in place. Results are copied out, so that the next call does
    not overwrite them. A program runs without a graph if it has so few steps that the copies outweigh them, if it
    changes its inputs, and inside another capture.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.calls = program, 0
        self.is_profitable = len(program.steps) > len(program.results) + 1 and not program.changed
        self.copied: set[int] = set()  # indices of inputs that are copied
        self.inputs: list[Array] = []  # what the graph reads; before the capture, the inputs of the last call
        self.results: tuple[Array, ...] = ()
        self.graph: Any = None
        self.lock = threading.Lock()  # calls share the graph's memory

    def launch(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        backend = inputs[0].storage.backend if self.is_profitable and inputs else None
        if backend is None or inputs[0].device.type == "cpu" or backend.is_capturing:
            return self.program.launch(inputs)
        with self.lock:
            return self._run(inputs)

    def _run(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        moved = {i for i, (x, y) in enumerate(zip(inputs, self.inputs, strict=False)) if x.data_ptr() != y.data_ptr()}
        self.calls += 1
        if self.calls <= WARM_UP or moved - self.copied:
            self.copied |= moved
            self.graph, self.inputs, self.calls = None, list(inputs), min(self.calls, WARM_UP)
            return self.program.launch(inputs)
        if self.graph is None:
            from genesis.cuda import CUDAGraph, graph

            self.inputs = [empty(*x.spec, x.device) if i in self.copied else x for i, x in enumerate(inputs)]
            self.graph = CUDAGraph()
            with graph(self.graph):
                self.results = self.program.launch(self.inputs)
        copy = registry["copy"]
        for i in self.copied:
            copy(inputs[i], out=self.inputs[i])
        self.graph.replay()
        return tuple([copy(x) for x in self.results])
