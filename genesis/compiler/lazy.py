"""The lazy tier: a function with breaks runs in Python, and its ops wait until something needs their values.

A piece of waiting ops ends where a value in memory is needed (`item()`, `print`, an op that a graph cannot hold), where
memory of the caller changes, and where the function ends. It then runs as one program, which stores only the results
that something still refers to. Autograd records the ops as in eager code. A piece is compiled at its second run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from genesis.array import Array, Spec, allocated
from genesis.autograd.graph import calling_line
from genesis.backend import CPU, Device
from genesis.backend.cuda.dispatch import exact, is_value
from genesis.compiler.graph import Graph
from genesis.compiler.program import Program
from genesis.compiler.region import region_op
from genesis.compiler.trace import Lazy, Pending, Trace, active, lazy
from genesis.dtypes import DType
from genesis.op import Op, common_device, current_tracer, execute, registry, tracing
from genesis.random import default_generator
from genesis.shapes import Shape, contiguous_strides, numel

LONGEST = 256  # ops after which a piece ends
CALLS = 1 << 14  # limit of remembered calls and of remembered pieces per function; further calls do not wait
PROGRAMS = 256  # limit of compiled pieces per function
# Ops that raise errors for some values: they run at once, so that the error comes from the line that calls them.
RAISING = frozenset((
    "index_get", "index_get_backward", "index_put", "embedding", "embedding_backward", "bincount", "floor_divide",
    "remainder", "bernoulli", "multinomial", "cross_entropy", "linear_cross_entropy", "linear_token_log_probs",
))  # fmt: skip


def _is_exposed(x: Array) -> bool:
    """Whether numpy arrays outside may share the memory of an array, and change it before a waiting op reads it."""
    values, storage = x._np, x.storage
    if x.device is not CPU or storage.owner is not None:  # type: ignore[attr-defined]
        return x.device is CPU
    if values is not None and sys.getrefcount(values) > 3:
        return True
    return sys.getrefcount(storage.block) > (2 if values is None else 3)  # type: ignore[attr-defined]


class Window(NamedTuple):
    """An operand in a slot's memory; `offset` is relative to the first array of that memory that the piece uses."""

    slot: int
    offset: int
    shape: Shape
    strides: Shape
    dtype: DType

    def array(self, slots: list[Any]) -> Array:
        """The operand in memory."""
        memory = slots[self.slot]
        if memory.__class__ is Pending:
            return Array(memory.real, self.shape, self.strides, self.dtype, memory.device, self.offset)
        storage, start, x = memory
        if x.storage is storage and (x.offset - start, x.shape, x.strides, x.dtype) == self[1:]:
            return x  # type: ignore[no-any-return]
        return Array(storage, self.shape, self.strides, self.dtype, x.device, start + self.offset)


class Waiting(NamedTuple):
    """A call of an op that waits.

    Attributes:
        number: index of the call among the function's different calls.
        operands: windows and numbers.
        target: window that the op overwrites; None if it does not.
        first: slot of the first result.
        layouts: (shape, strides, dtype, bytes) of each result.
    """

    number: int
    op: Op
    operands: list[Any]
    attrs: dict[str, Any]
    target: Window | None
    first: int
    layouts: list[tuple[Any, ...]]
    device: Device

    @property
    def result_slots(self) -> range:
        """The slots of the results."""
        return range(self.first, self.first + len(self.layouts))


class Piece:
    """Waiting ops that run together.

    Attributes:
        reason: why the piece ends.
        line: file and line where the piece ends.
        program: compiled program, which runs from the second time on; None before.
    """

    def __init__(self, reason: str) -> None:
        self.reason, self.line, self.runs = reason, calling_line(), 0
        self.program: Program | None = None

    def run(self, calls: list[Waiting], slots: list[Any], kept: list[int], function: LazyFunction) -> None:
        """Run the ops, and give the storages of the slots in `kept` their memory."""
        self.runs += 1
        is_due = self.runs == function.patience and function.programs < PROGRAMS
        if is_due and (len(calls) > 1 or function.patience == 1):
            self._compile(calls, slots, kept, function)
            function.programs += 1
        if self.program is None:
            self._run_ops(calls, slots, kept)
            return
        results = self.program.launch(self.op, tuple([window.array(slots) for window in self.inputs]))
        for slot, i in zip(kept, self.order, strict=True):
            slots[slot].become(results[i].storage)

    def _run_ops(self, calls: list[Waiting], slots: list[Any], kept: list[int]) -> None:
        last = {}
        for i, call in enumerate(calls):
            used = [x.slot for x in (*call.operands, call.target) if isinstance(x, Window)]
            last.update(dict.fromkeys((*used, *call.result_slots), i))
        for i, call in enumerate(calls):
            inputs = tuple([x.array(slots) if isinstance(x, Window) else x for x in call.operands])
            out = None if call.target is None else call.target.array(slots)
            results = execute(call.op, inputs, dict(call.attrs), out)
            for slot, result in zip(call.result_slots, results, strict=False):
                slots[slot].become(result.storage)
            for slot in {slot for slot, end in last.items() if end == i} - set(kept):
                slots[slot] = None  # frees its memory
        for slot in kept:  # changes in place were counted when the ops began to wait
            slots[slot].real.version = slots[slot].changes

    def _compile(self, calls: list[Waiting], slots: list[Any], kept: list[int], function: LazyFunction) -> None:
        """Trace the ops, and compile their graph."""
        trace, traced = Trace(), dict[int, Array]()

        def operand(x: Any) -> Any:
            if not isinstance(x, Window):
                return x
            return traced[x.slot].view(x.shape, x.strides, x.offset) if x.slot in traced else x.array(slots)

        with active(trace):
            for call in calls:
                results = execute(call.op, tuple(map(operand, call.operands)), dict(call.attrs), operand(call.target))
                traced.update(zip(call.result_slots, results, strict=False))
        starts = {id(s[0]): (i, s[1]) for i, s in enumerate(slots) if s.__class__ is tuple}
        self.inputs = []
        for x, _ in trace.captured:
            slot, start = starts[id(x.storage)]
            self.inputs.append(Window(slot, x.offset - start, x.shape, x.strides, x.dtype))
        outputs = [trace.read(traced[slot]).root for slot in kept]
        graph = Graph([v for _, v in trace.captured], trace.graph.calls, outputs)
        graph = graph.without_common_calls().with_own_memory(kept).without_dead_calls()
        self.program = function.schedule(graph)
        self.op = region_op(f"{function.name} piece", self.program)
        self.order = [self.program.results.index(v.root) for v in graph.outputs]


class LazyFunction:
    """What the lazy tier remembers of one function.

    Args:
        schedule: returns the program of a graph.

    Attributes:
        calls: (op, operands, attributes) -> the call that waits.
        pieces: (numbers of the calls, slots that are needed afterwards) -> piece.
        patience: number of the run at which a piece is compiled.
        programs: number of compiled pieces.
    """

    def __init__(self, name: str, schedule: Callable[[Graph], Program]) -> None:
        self.name, self.schedule, self.patience, self.programs = name, schedule, 2, 0
        self.calls: dict[Any, Waiting] = {}
        self.pieces: dict[Any, Piece] = {}

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function, and let its ops wait."""
        recorder = Recorder(self)
        try:
            with active(recorder):
                return function()
        finally:
            recorder.flush("ends")


class Recorder:
    """The tracer (see `genesis.op.Tracer`) of one call of a function.

    Attributes:
        waiting: the calls of the piece.
        slots: the memory of the piece: a `Pending` storage, or (storage, offset of the first array, this array).
        known: slots of existing storages, by id.
    """

    def __init__(self, function: LazyFunction) -> None:
        self.function = function
        self._begin()

    def _begin(self) -> None:
        self.waiting: list[Waiting] = []
        self.slots: list[Any] = []
        self.known: dict[int, int] = {}

    # --- What the thread does besides calls of ops --------------------------------------------------------------------

    def new(self, shape: Any, dtype: Any, device: Device) -> Array:
        """Return an array with undefined contents."""
        if current_tracer() is not self:
            return allocated(shape, dtype, device)
        attrs = {"value": 0, "shape": tuple(int(s) for s in shape), "dtype": dtype, "device": device}
        return execute(registry["fill"], (), attrs)[0]

    def keep(self, x: Array, is_shared: bool) -> Array:
        """Return an array with values from the host."""
        return x

    def touch(self) -> None:
        """Run the waiting ops, because the host reads or writes memory."""
        if current_tracer() is self:
            self.flush("reads values on the host")

    # --- The tracer ---------------------------------------------------------------------------------------------------

    def call(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Array, ...]:
        """Let an op wait and return arrays without memory, or run it now if a piece cannot hold it."""
        if op.view is not None:
            return (lazy(execute(op, inputs, attrs, out)[0]),)
        may_wait = registry.get(op.name) is op and not op.mutates and op.name not in RAISING
        key = self._key(op, inputs, attrs, out) if may_wait else None
        call = None if key is None else self.function.calls.get(key) or self._new_call(key, op, inputs, attrs, out)
        if call is None:
            return self._run_now(op, inputs, attrs, out)
        if self.waiting and self.waiting[0].device is not call.device and self.waiting[0].device != call.device:
            self.flush("continues on another device")
            return self.call(op, inputs, attrs, out)
        self.waiting.append(call)
        if out is not None:
            out.storage.version += 1
            return (out,)
        results = []
        for shape, strides, dtype, nbytes in call.layouts:
            storage: Any = Pending(call.device, nbytes, len(self.slots), self)
            array = Lazy(storage, shape, strides, dtype, call.device)
            storage.arrays.append(ref(array))
            self.slots.append(storage)
            results.append(array)
        if len(self.waiting) == LONGEST:
            self.flush(f"has {LONGEST} ops")
        return tuple(results)

    def _key(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Any, ...] | None:
        """The key of a call: slots and layouts of its arrays, and its numbers. None if the op cannot wait."""
        parts: list[Any] = [op, len(self.slots)]
        for x in inputs if out is None else (*inputs, out):
            if not isinstance(x, Array):
                if not is_value(x):
                    return None
                parts.append(exact(x))
                continue
            storage: Any = (x if x.__class__ is Lazy else lazy(x)).storage
            if storage.__class__ is Pending:
                if storage.recorder is not self:
                    return None
                parts.append((storage.value, x.offset, x.shape, x.strides))
                continue
            if x is out or _is_exposed(x):
                return None
            slot = self.known.get(id(storage))
            if slot is None:
                slot = self.known[id(storage)] = len(self.slots)
                self.slots.append((storage, x.offset, x))
            device = None if x.device is CPU else x.device.index
            parts.append((slot, x.offset - self.slots[slot][1], x.shape, x.strides, x.dtype, device))
        if not all(map(is_value, attrs.values())):
            return None
        return (*parts, *attrs, *map(exact, attrs.values()))

    def _new_call(
        self, key: tuple[Any, ...], op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any
    ) -> Waiting | None:
        """Infer the results of a call. None if it fails or cannot wait."""
        if len(self.function.calls) >= CALLS or ("seed" in attrs and not default_generator.is_positioned):
            return None
        try:
            inferred = op.infer(*inputs, **{name: x for name, x in attrs.items() if name != "device"})
            device = attrs.get("device") or common_device(op.name, inputs if out is None else (*inputs, out))
        except Exception:  # the op will raise it
            return None
        specs = (inferred,) if isinstance(inferred, Spec) else inferred
        if out is not None and (specs != (out.spec,) or out.overlaps_itself()):
            return None
        windows = [
            Window(part[0], part[1], x.shape, x.strides, x.dtype) if isinstance(x, Array) else x
            for part, x in zip(key[2:], inputs if out is None else (*inputs, out), strict=False)
        ]
        target = None if out is None else windows.pop()
        layouts = [(s, contiguous_strides(s), d, numel(s) * d.itemsize) for s, d in specs] if out is None else []
        call = Waiting(len(self.function.calls), op, windows, dict(attrs), target, len(self.slots), layouts, device)
        self.function.calls[key] = call
        return call

    def _run_now(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Array, ...]:
        """Run an op, after the waiting ones if it reads their results or changes memory."""
        waits = any(isinstance(x, Array) and x.storage.__class__ is Pending for x in inputs)
        if waits or op.mutates or out is not None:
            self.flush(f"calls {op.name}")
        return execute(op, inputs, attrs, out)

    def flush(self, reason: str) -> None:
        """Run the waiting ops."""
        waiting, slots, function = self.waiting, self.slots, self.function
        self._begin()
        kept = [i for i, m in enumerate(slots) if m.__class__ is Pending and [1 for r in m.arrays if r() is not None]]
        if not kept:
            return
        key = (tuple([call.number for call in waiting]), tuple(kept))
        piece = function.pieces.get(key)
        if piece is None:
            piece = Piece(reason)
            if len(function.pieces) < CALLS:
                function.pieces[key] = piece
        with tracing(None):
            piece.run(waiting, slots, kept, function)
