"""Compiled functions: a call finds the region whose guards hold, or traces the function once more."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, cast

import numpy as np

from genesis import random
from genesis.array import Array, from_host
from genesis.autograd.autocast import autocasting, resumed, settings
from genesis.autograd.graph import Edge, _sequence
from genesis.autograd.record import AccumulateNode, TensorBase
from genesis.backend import CPU, Device, as_device, current_cuda, mode
from genesis.backend.cuda.dispatch import layout_of
from genesis.compiler.graph import Value
from genesis.compiler.lazy import LazyFunction
from genesis.compiler.program import Program
from genesis.compiler.region import Region, tape_ends
from genesis.compiler.state import ATOMS, State, tensor_facts
from genesis.compiler.trace import Break, Lazy, Trace, active
from genesis.complexes import ComplexTensor
from genesis.dtypes import default_dtype, int64
from genesis.errors import UsageError
from genesis.nn.module import Module
from genesis.op import current_tracer, registry

CACHE_LIMIT = 64  # most traces of a function; torch keeps 8, and each holds only a graph and its kernels
_SEED = 0x9E3779B97F4A7C15  # the generator's during a trace; if it differs afterwards, the function has set it
compiled_functions: weakref.WeakSet[Compiled] = weakref.WeakSet()


# --- Arguments and results --------------------------------------------------------------------------------------------


@dataclass(slots=True, unsafe_hash=True)
class Leaf:
    """A number, a string or another object of a structure; `key` compares objects by id, others by type and digits."""

    value: Any = field(compare=False)
    key: Any = field(repr=False)


def flatten(x: Any, tensors: list[TensorBase]) -> Any:
    """Append the tensors of nested containers to `tensors`; return a hashable description of the structure."""
    if isinstance(x, ComplexTensor):
        return (ComplexTensor, flatten(x.pairs, tensors))
    if isinstance(x, TensorBase):
        for i, seen in enumerate(tensors):
            if seen is x:
                return (TensorBase, i)
        tensors.append(x)
        return (TensorBase, len(tensors) - 1)
    if isinstance(x, (list, tuple)):
        return (type(x), *[flatten(each, tensors) for each in x])
    if isinstance(x, dict) or (hasattr(type(x), "__dataclass_fields__") and hasattr(x, "__dict__")):
        return (type(x), *[(k, flatten(v, tensors)) for k, v in (x if isinstance(x, dict) else vars(x)).items()])
    return Leaf(x, (type(x), repr(x)) if isinstance(x, ATOMS) else id(x))


def rebuild(described: Any, tensors: list[Any]) -> Any:
    """Return the structure that `flatten` described, with these tensors."""
    if isinstance(described, Leaf):
        return described.value
    kind = described[0]
    if kind is TensorBase:
        return tensors[described[1]]
    if issubclass(kind, dict) or hasattr(kind, "__dataclass_fields__"):
        made = kind.__new__(kind)
        (made if isinstance(made, dict) else vars(made)).update({key: rebuild(x, tensors) for key, x in described[1:]})
        return made
    parts = [rebuild(each, tensors) for each in described[1:]]
    return kind(*parts) if kind is ComplexTensor or hasattr(kind, "_fields") else kind(parts)


def layout(t: TensorBase) -> tuple[Any, ...]:
    """The facts about a tensor that a trace depends on."""
    a = t.array
    return (a.shape, a.strides, a.dtype, a.device.type, a.device.index, t.requires_grad)


_FACTS = attrgetter("array.layout", "_requires_grad", "node")


def _facts(t: TensorBase) -> tuple[Any, ...]:
    """What determines the layout of a tensor that is not a view, and can be compared fast."""
    layout_of(t.array)
    return _FACTS(t)


def settings_now() -> tuple[Any, ...]:
    """The settings of this thread on which the ops of a function depend."""
    if mode.exact:
        what = "a compiled function was called inside genesis.exact, but its fused sums have no documented order"
        raise UsageError(what, next="call the function itself, or leave genesis.exact")
    low = tuple(autocasting.low.items()) if autocasting.low else ()
    return (mode.grad, mode.fixed_weights, mode.tf32, default_dtype(), as_device(None), current_cuda.index, low)


# --- One trace --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """A region with the guards under which it may run.

    Attributes:
        captured: what the region reads besides its arguments: tensors, or arrays of constants.
        described: the structure of the result.
        outside: for each tensor of the result, the tensor or the index of the argument if it exists already.
        draws: number of counters that a run takes from the default generator; None without draws.
        device: device of the generator's position, which is an input after the arguments if there are draws.
    """

    region: Region
    state: State
    captured: list[Any]
    described: Any
    outside: list[TensorBase | int | None]
    draws: int | None
    device: Device

    def __post_init__(self) -> None:
        self.tensors = [x for x in self.captured if isinstance(x, TensorBase)]
        self.layouts = list(map(layout, self.tensors))
        self._facts: list[Any] = []  # of these tensors when their layouts were last compared

    def shares(self, tensors: list[TensorBase]) -> bool:
        """Whether arguments share memory with each other or with captured tensors."""
        storages = {id(t.array.storage) for t in tensors}
        return len(storages) < len(tensors) or any(id(t.array.storage) in storages for t in self.tensors)

    def holds(self, tensors: list[TensorBase]) -> bool:
        """Whether the guards hold now, for these arguments."""
        if not self.state.holds() or (self.region.programs[0].changed and self.shares(tensors)):
            return False
        if list(map(_FACTS, self.tensors)) == self._facts:
            return True
        if list(map(layout, self.tensors)) != self.layouts:
            return False
        self._facts = [] if any(t.base is not None for t in self.tensors) else list(map(_facts, self.tensors))
        return True

    def lines(self) -> list[str]:
        """What the region computes, for a comparison with another trace."""
        lines = [line for program in self.region.programs for line in program.graph.lines()]
        kept = [f"tensor {id(x)}" if isinstance(x, TensorBase) else repr(x.numpy().tolist()) for x in self.captured]
        return [*lines, *kept, repr(self.described)]

    def run(self, tensors: list[TensorBase]) -> Any:
        drawn = [] if self.draws is None else [_reserve_draws(self.device, self.draws)]
        results = iter(self.region.run([*tensors, *drawn, *self.captured]))
        values = [next(results) if x is None else tensors[x] if isinstance(x, int) else x for x in self.outside]
        return rebuild(self.described, values)


def _reserve_draws(device: Device, draws: int) -> Array:
    """Return offset and seed of the default generator as an array, and advance the generator by `draws` counters."""
    seed, offset, base = random.default_generator.reserve_relative(4 * draws, device)
    words = np.array((offset, seed), np.uint64).view(np.int64)
    if base is None:
        return from_host(words, int64, device)
    # During a capture, both are relative to the words in memory.
    first = base.array.offset
    parts = [registry["add"](base.array.view((1,), (1,), first + i), word) for i, word in enumerate(words.tolist())]
    return cast(Array, registry["cat"](*parts, dim=0))


def _call_with_draws(function: Callable[[], Any], trace: Trace, device: Device) -> tuple[Any, int | None]:
    """Call a traced function, whose draws start at an input. Return its result and the counters drawn; None if none."""
    generator = random.default_generator
    then, fixed = generator.state(), generator.fixed_draws
    position = TensorBase.wrap(trace.input(Value.new((2,), int64, device)))
    try:
        generator.manual_seed(_SEED)
        with generator.positioned_by(position):
            result = function()
        taken = generator.offset
        if generator.initial_seed() != _SEED:
            raise Break("seeds the random generator")
        if generator.fixed_draws != fixed:
            raise Break("draws random numbers on two devices")
    finally:
        generator.restore(then)
    is_drawn = any(trace.graph.inputs[-1] in call.reads for call in trace.graph.calls)
    if not is_drawn:
        trace.graph.inputs.pop()
    return result, taken if is_drawn else None


def trace_call(compiled: Compiled, described: Any, tensors: list[TensorBase], state: State) -> Entry:
    """Trace a function for arguments like these. Raises Break if it cannot be traced."""
    trace = Trace([t.array for t in state.tensors])
    fakes = [TensorBase.wrap(trace.input(t.array)).requires_grad_(t.requires_grad) for t in tensors]
    device = next((t.array.device for t in (*tensors, *state.tensors)), CPU)
    arguments = list(map(tensor_facts, fakes))
    began, (args, kwargs) = next(_sequence), rebuild(described, fakes)
    with active(trace), resumed(settings()):
        result, taken = _call_with_draws(lambda: compiled.function(*args, **kwargs), trace, device)
    if not state.holds() or not state.tensors_hold():
        raise Break("changes an attribute, a list, a variable, or the data or gradient of a tensor", is_transient=True)
    again, outputs = list[TensorBase](), list[TensorBase]()
    if flatten((args, kwargs), again) != described or list(map(tensor_facts, again)) != arguments:
        raise Break("changes an argument: a container, data, gradient, requires_grad, or values with a gradient")
    structure = flatten(result, outputs)
    if any(not isinstance(x, type) or hasattr(x, "default_factory") for x in _objects(structure)):
        raise Break("returns an object that is not a tensor, a number or a container of these")
    # Results that exist already are returned themselves.
    numbers, reachable = {id(t): i for i, t in enumerate(fakes)}, {id(t) for t in state.tensors}
    outside = [numbers.get(id(t), None if isinstance(t.array, Lazy) else t) for t in outputs]
    if any(isinstance(x, TensorBase) and id(x) not in reachable for x in outside):
        raise Break("returns a tensor that it reads from elsewhere")
    inner = [t for t, known in zip(outputs, outside, strict=True) if known is None]
    # The tape ends at arguments and captured parameters.
    leaves: list[tuple[Edge, TensorBase]] = []
    for edge in tape_ends(inner, began):
        if not mode.grad:
            raise Break("enables gradients inside no_grad")
        leaf = edge.node.leaf() if isinstance(edge.node, AccumulateNode) else None
        if leaf is None:
            raise Break("uses a tensor that was computed outside and is not an argument")
        if not isinstance(leaf.array, Lazy):
            trace.read(leaf.array)  # it is an input even if no op reads it
        leaves.append((edge, leaf))
    owners = {id(t.array): t for t in state.tensors}
    if any(id(x) not in owners and id(x) not in trace.constants for x, _ in trace.captured):
        raise Break("reads a tensor that no argument, attribute, global or closure holds")
    captured = [owners.get(id(x), x) for x, _ in trace.captured]
    numbers |= {id(t): len(trace.graph.inputs) + i for i, t in enumerate(captured)}
    sources = [(edge, numbers[id(leaf)]) for edge, leaf in leaves]
    region = Region(compiled.name, trace, inner, sources, compiled.schedule, compiled.replays)
    return Entry(region, state, captured, structure, outside, taken, device)


# --- The compiled function --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Compiled:
    """A function that runs compiled regions. A call that cannot be traced runs the function in Python.

    Attributes:
        entries: traces by the key of a call.
        lazy: the ops of calls that cannot be traced.
        breaks: why calls with these keys cannot be traced.
    """

    function: Callable[..., Any]
    fullgraph: bool
    schedule: Callable[..., Program]
    replays: bool = False
    verify: int = 0

    def __post_init__(self) -> None:
        self.name = getattr(self.function, "__name__", type(self.function).__name__)
        self.replayed, self.is_full = 0, False
        self._lock = threading.RLock()
        self.reset()
        functools.update_wrapper(self, self.function)
        compiled_functions.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return replace(self, function=copy.deepcopy(self.function, memo))  # without traces

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_tracer() is not None or mode.anomaly:  # an enclosing trace records the ops
            return self.function(*args, **kwargs)
        tensors: list[TensorBase] = []
        described = flatten((args, kwargs), tensors)
        key = (described, settings_now(), *[layout(t) for t in tensors])
        for entry in self.entries.get(key, ()):
            if entry.holds(tensors):
                self.replayed += 1
                if self.verify and self.replayed % self.verify == 0:
                    self._compare(entry, described, tensors)
                return entry.run(tensors)
        failed: Exception | None = None
        with self._lock:
            try:
                traced = self._new_entry(key, described, tensors)
            except RecursionError:
                raise
            except Exception as error:
                traced, failed = None, error
        if traced is not None:
            return traced.run(tensors)
        if self.fullgraph and key in self.breaks:
            raise self._refusal(self.breaks[key])
        result = self.lazy.run(lambda: self.function(*args, **kwargs))  # raises what the function itself raises
        if failed is not None:
            stop = self.breaks[key] = Break(f"cannot be compiled ({type(failed).__name__}: {failed})")
            if self.fullgraph:
                raise self._refusal(stop) from failed
            warnings.warn(f"{self.name} {stop.reason} and runs uncompiled", stacklevel=2)
        return result

    def _refusal(self, stop: Break) -> UsageError:
        what = f"{self.name} {stop.reason}, which fullgraph=True does not allow"
        return UsageError(what, where=stop.line, next="remove it, or pass fullgraph=False")

    def _compare(self, entry: Entry, described: Any, tensors: list[TensorBase]) -> None:
        """Trace the function once more and compare. Raises UsageError for another graph."""
        try:
            now = self._trace(described, tensors).lines()
        except Break as stop:
            now = [f"{stop.reason}, in {stop.line}"]
        for new, old in itertools.zip_longest(now, entry.lines(), fillvalue="nothing"):
            if new != old:
                what = f"{self.name} computes something else than when it was traced: now {new}, before {old}"
                raise UsageError(what, next="pass the change as an argument, or call genesis.compiler.reset() after it")

    def _trace(self, described: Any, tensors: list[TensorBase]) -> Entry:
        """Trace the function. Raises Break if that is impossible, after undoing what the function changed."""
        state, then = State(self.function, _objects(described)), random.default_generator.state()
        try:
            entry = trace_call(self, described, tensors, state)
            if random.default_generator.state() != then:
                raise Break("draws random numbers in its backward pass")
            if entry.region.programs[0].changed and entry.shares(tensors):
                raise Break("changes arguments that share memory with each other or what it reads", is_transient=True)
            return entry
        except (Break, Exception):
            state.restore()
            random.default_generator.restore(then)
            raise

    def _new_entry(self, key: Any, described: Any, tensors: list[TensorBase]) -> Entry | None:
        """Trace the function for new arguments or new guards. None if that is impossible, or the cache is full."""
        if key in self.breaks and not self.breaks[key].is_transient:
            return None
        if sum(map(len, self.entries.values())) >= CACHE_LIMIT:
            if not self.is_full:
                self.is_full = True
                what = f"{self.name} was traced {CACHE_LIMIT} times, so other calls run uncompiled"
                warnings.warn(f"{what}; genesis.compiler.reset() forgets the traces", stacklevel=3)
            return None
        try:
            entry = self._trace(described, tensors)
        except Break as stop:
            stop.is_transient &= key not in self.breaks  # what a first call stores, a second one may find
            self.breaks[key] = stop
            return None
        self.breaks.pop(key, None)
        self.entries.setdefault(key, []).insert(0, entry)
        return entry

    def reset(self) -> None:
        """Forget all traces."""
        self.entries: dict[Any, list[Entry]] = {}
        self.breaks: dict[Any, Break] = {}
        self.lazy = LazyFunction(self.name, self.schedule)
        self.is_full = False


class CompiledModule(Module):
    """A module whose forward is compiled. Attributes that it lacks are read from the wrapped module."""

    def __init__(self, module: Module, **options: Any) -> None:
        super().__init__()
        self._orig_mod = module
        object.__setattr__(self, "_compiled", Compiled(module, **options))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)  # which a copy in the making lacks


def _objects(described: Any) -> list[Any]:
    """The objects of a structure that are neither tensors nor numbers, and the classes of its containers."""
    if not isinstance(described, tuple):
        return [described.value] if isinstance(described, Leaf) and not isinstance(described.value, ATOMS) else []
    return [*(x for x in described[:1] if isinstance(x, type)), *(x for part in described[1:] for x in _objects(part))]
