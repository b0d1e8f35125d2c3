"""The lazy tier: a function with breaks runs in Python, and its ops wait until something needs their values.

A piece of waiting ops ends where a value in memory is needed (`item()`, `print`, an op that a graph cannot hold), where
memory of the caller changes, and where the function ends. It then runs as one program, which stores only the results
that something still refers to. Autograd records the ops as in eager code. A piece is compiled at its second run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from genesis.array import Array, allocated
from genesis.autograd.graph import calling_line
from genesis.autograd.modes import Switch, fixed_weights
from genesis.autograd.modes import exact as exact_sums
from genesis.backend import CPU, Device, mode
from genesis.backend.cuda.dispatch import exact, is_value
from genesis.compiler.graph import Call, Graph, Value
from genesis.compiler.program import Program
from genesis.compiler.trace import Lazy, Pending, Trace, active, decomposed, inferred, lazy, settings_of_sums
from genesis.op import Op, current_tracer, execute, registry, tracing
from genesis.random import default_generator

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

    def run(self, graph: Graph, inputs: tuple[Array, ...], function: LazyFunction) -> Sequence[Array]:
        """Run the ops of a graph; return the arrays whose memory its outputs have."""
        self.runs += 1
        is_due = self.program is None and self.runs == function.patience and function.programs < PROGRAMS
        if is_due and (len(graph.calls) > 1 or function.patience == 1):
            graph = decomposed(graph).without_common_calls()
            graph = graph.with_own_memory(range(len(graph.outputs))).without_dead_calls()
            self.program = function.schedule(f"{function.name} piece", graph)
            function.programs += 1
        if self.program is None:
            return graph.with_own_memory(range(len(graph.outputs))).run_ops(inputs)
        return self.program.outputs(inputs, self.program.launch(inputs))


class LazyFunction:
    """What the lazy tier remembers of one function.

    Args:
        schedule: returns the program of a name and a graph.

    Attributes:
        inputs: (index, layout) -> the value of an array in memory.
        calls: (op, operands, attributes) -> calls of the graph, and values of the results. Equal calls on equal values
            share them, so the graphs of equal pieces consist of the same objects.
        pieces: (calls, results that are needed afterwards, inputs) -> piece.
        patience: number of the run at which a piece is compiled.
        programs: number of compiled pieces.
    """

    def __init__(self, name: str, schedule: Callable[[str, Graph], Program]) -> None:
        self.name, self.schedule, self.patience, self.programs = name, schedule, 2, 0
        self.inputs: dict[Any, Value] = {}
        self.calls: dict[Any, tuple[list[Call], list[Value]]] = {}
        self.pieces: dict[Any, Piece] = {}

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function, and let its ops wait."""
        recorder = Recorder(self)
        try:
            with active(recorder):
                return function()
        finally:
            recorder.flush("ends")


class Recorder(Trace):
    """The tracer of one call of a function. It writes a graph until something needs a value, and then runs it.

    Attributes:
        made: storages without memory.
        is_recorded: whether an op of the graph may be recorded for a backward pass.
    """

    is_functional = False

    def __init__(self, function: LazyFunction) -> None:
        self.function = function
        self._begin()

    def _begin(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.is_recorded = False

    # --- What the thread does besides calls of ops --------------------------------------------------------------------

    def new(self, shape: Any, dtype: Any, device: Device) -> Array:
        if current_tracer() is not self:
            return allocated(shape, dtype, device)
        return super().new(shape, dtype, device)

    def keep(self, x: Array, is_shared: bool) -> Array:
        return x

    def touch(self) -> None:
        """Run the waiting ops, because the host reads or writes memory."""
        if current_tracer() is self:
            self.flush("reads values on the host")

    def value_of(self, x: Array) -> Value:
        """Return the value of an array in memory: the same one for the same layout at this place."""
        values, key = self.function.inputs, (len(self.captured), x.shape, x.strides, x.dtype, x.device)
        value = values.get(key) or Value.like(x)
        return values.setdefault(key, value) if len(values) < CALLS else value

    def fake(self, value: Value) -> Array:
        """Return an array that gets its memory when the piece runs."""
        array = super().fake(value)
        storage: Any = array.storage
        storage.recorder = self
        storage.arrays.append(ref(array))
        self.made.append(storage)
        return array

    # --- The tracer ---------------------------------------------------------------------------------------------------

    def call(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Array, ...]:
        """Let an op wait and return arrays without memory, or run it now if a piece cannot hold it."""
        if op.view is not None:
            return (lazy(execute(op, inputs, attrs, out)[0]),)
        if settings_of_sums() != self.settings:
            self.flush("changes settings")
        out = None if out.__class__ is tuple and not any(x is not None for x in out) else out
        key = self._key(op, inputs, attrs, out)
        known = None if key is None else self.function.calls.get(key) or self._new_call(key, op, inputs, attrs, out)
        if known is None:  # it runs now, after the waiting ops if it reads their results or changes memory
            waits = any(isinstance(x, Array) and x.storage.__class__ is Pending for x in inputs)
            if waits or op.mutates or out is not None:
                self.flush(f"calls {op.name}")
            return execute(op, inputs, attrs, out)
        calls, values = known
        if self.graph.calls and values[0].device != self.graph.calls[0].outputs[0].device:
            self.flush("continues on another device")
            return self.call(op, inputs, attrs, out)
        self.graph.calls += calls
        self.is_recorded |= mode.grad
        results = self.put(values, out)
        if len(self.graph.calls) >= LONGEST:
            self.flush(f"has {LONGEST} ops")
        return results

    def _key(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Any, ...] | None:
        """The key of a call: values and windows of its arrays, and its numbers. None if the op cannot wait."""
        if registry.get(op.name) is not op or op.mutates or op.name in RAISING or mode.exact:
            return None
        parts: list[Any] = [op]
        for x in inputs if out is None else (*inputs, out):
            if isinstance(x, Array):
                storage: Any = (x if x.__class__ is Lazy else lazy(x)).storage
                if storage.recorder is not self if storage.__class__ is Pending else x is out or _is_exposed(x):
                    return None
                parts.append((*self._place(x), x.shape, x.strides))
            elif is_value(x):
                parts.append(exact(x))
            else:
                return None
        if not all(map(is_value, attrs.values())):
            return None
        return (*parts, *attrs, *map(exact, attrs.values()))

    def _new_call(
        self, key: tuple[Any, ...], op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any
    ) -> tuple[list[Call], list[Value]] | None:
        """Return the calls and the results of an op. None if it fails or cannot wait."""
        if len(self.function.calls) >= CALLS or ("seed" in attrs and not default_generator.is_positioned):
            return None
        try:
            specs, device = inferred(op, inputs, attrs, out)
        except Exception:  # the op will raise it
            return None
        if out is not None and (specs != (out.spec,) or out.overlaps_itself()):
            return None
        return self.function.calls.setdefault(key, self.planned(op, inputs, attrs, out, specs, device))

    def flush(self, reason: str) -> None:
        """Run the waiting ops."""
        graph, captured, made, function = self.graph, self.captured, self.made, self.function
        recorded, (_, fixed, tf32) = self.is_recorded, self.settings
        self._begin()
        kept = [i for i, m in enumerate(made) if [1 for r in m.arrays if r() is not None]]
        if not kept:
            return
        graph.inputs, graph.outputs = [value for _, value in captured], [made[i].value for i in kept]
        key = (*graph.calls, *kept, *graph.inputs)
        piece = function.pieces.get(key) or Piece(reason)
        if len(function.pieces) < CALLS:
            function.pieces[key] = piece
        graph.calls = list(dict.fromkeys(graph.calls))
        # Launch kernels under the settings under which the ops were called; none waits in `exact`.
        mode.tf32 = tf32
        try:
            with tracing(None), Switch(recorded), exact_sums(False), fixed_weights(fixed):
                results = piece.run(graph, tuple([x for x, _ in captured]), function)
        finally:
            del mode.tf32
        for i, result in zip(kept, results, strict=True):
            made[i].become(result.storage)
