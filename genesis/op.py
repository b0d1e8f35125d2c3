"""The `Op` record, the registry of all ops, and dispatch.

An `Op` keeps everything about one operation together: the numpy reference (the CPU path and the oracle of every other
path), the shape and dtype rule, the gradient, the cost. Tests, benchmarks and the profiler iterate over `registry`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Literal, NamedTuple, Protocol

from genesis.array import Array, Spec, empty
from genesis.backend import CPU, Device, backend_for
from genesis.errors import DeviceError, DTypeError, GradientError, IndexRangeError, ShapeError
from genesis.shapes import numel

registry: dict[str, Op] = {}


class Cost(NamedTuple):
    """Counted work, not measured: arithmetic operations, and the bytes moved if each operand is touched once."""

    flops: int
    bytes: int


class Accumulated(NamedTuple):
    """The gradient that an input has accumulated so far, for a vjp that adds to it; see `Context.take_accumulated`.

    Attributes:
        array: accumulated gradient.
        is_own: True if nothing else reads `array`, so the sum may overwrite it.
    """

    array: Array
    is_own: bool


class GradientLease(Protocol):
    """The right to write into a leaf's gradient slot while the lease lives.

    Attributes:
        array: the slot.
        is_movable: True if the values may be moved elsewhere when others need the slot.
    """

    array: Array
    is_movable: bool


class BackwardStep(Protocol):
    """One node's step of a backward pass, as its vjp sees it through `Context`.

    `leases` are the leases of the gradient slots into which the node's forward wrote outputs.
    """

    leases: Mapping[int, GradientLease]

    @property
    def is_last(self) -> bool: ...
    def is_unit(self, grad: Array) -> bool: ...
    def gradient_slot(self, i: int) -> Array | None: ...
    def take_accumulated(self, i: int) -> Accumulated | None: ...


@dataclass(slots=True, eq=False)
class Context:
    """Everything a vjp may read: saved inputs and outputs, attributes, and which inputs need a gradient.

    Inputs and outputs that were not saved are None. A vjp may also request the memory for an input's gradient
    (`gradient_slot`) and the gradient accumulated so far (`take_accumulated`), which saves the engine a copy or a sum.
    Both return None outside a backward pass.

    Attributes:
        leases: leases by output index, for outputs written into a leaf's gradient slot; see `Op.gradient_outputs`.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Array | None, ...]
    attrs: dict[str, Any]
    needs: tuple[bool, ...]
    input_specs: tuple[Spec | None, ...]
    leases: Mapping[int, GradientLease] = field(default_factory=dict)
    _step: BackwardStep | None = None

    def during(self, step: BackwardStep) -> Context:
        """Return the context for one step of a backward pass; a copy, if the graph outlives the pass."""
        if not step.is_last:
            return Context(self.inputs, self.outputs, self.attrs, self.needs, self.input_specs, self.leases, step)
        self._step = step
        return self

    def gradient_slot(self, i: int) -> Array | None:
        """Return memory for the gradient of input `i`: contiguous, of its shape and dtype, contents undefined.

        The memory is the leaf's slot in a flat buffer. It is available while `.grad` is None, no other gradient was
        accumulated and no lease exists. A vjp that writes there returns this very array, which saves a copy. It may
        also ignore the slot.
        """
        return None if self._step is None else self._step.gradient_slot(i)

    def take_accumulated(self, i: int) -> Accumulated | None:
        """Return the gradient of input `i` so far: from other consumers in this pass, or a leaf's earlier `.grad`.

        A vjp that takes it must return the sum of the accumulated gradient and its own, which replaces the former: in
        `array` itself if `is_own` is set, else in memory that no other gradient shares. A kernel rounds the sum once,
        the engine after each addition; the results are equal in float32 and wider, and slightly better in two bytes.
        """
        return None if self._step is None else self._step.take_accumulated(i)

    def is_unit(self, grad: Array) -> bool:
        """Whether a gradient is the 1 with which backward starts at a loss, so nothing has to be scaled by it."""
        return self._step is not None and self._step.is_unit(grad)

    def spec(self, i: int) -> Spec:
        """Return shape and dtype of input `i`, which must be an array."""
        input_spec = self.input_specs[i]
        assert input_spec is not None
        return input_spec

    @property
    def is_last(self) -> bool:
        """Whether the vjp may overwrite outputs that nothing else reads later (no retain_graph)."""
        return self._step is not None and self._step.is_last


Out = Array | tuple[Array | None, ...] | None
Grads = tuple[Array | None, ...]
Infer = Callable[..., Spec | tuple[Spec, ...]]
Saves = tuple[int | str, ...]
Vjp = Callable[..., Grads]


@dataclass(slots=True, eq=False)
class Op:
    """One operation.

    Attributes:
        name: registry key; kernel, test, benchmark and profile row have the same name.
        reference: `reference(out, *inputs, **attrs)` writes numpy results into `out`, a tuple if there are several.
            Inputs are numpy arrays or Python numbers. The reference of a view op returns the numpy view instead.
        infer: `infer(*inputs, **attrs)` returns the output `Spec`, or several; it raises ShapeError or DTypeError.
        vjp: `vjp(ctx, *grads)` returns one gradient (or None) per input, computed with ops on arrays; None if the op
            has no gradient. The tape sums gradients of broadcast operands to the operand's shape.
        saves: values that backward reads: indices of inputs, "out" for all outputs, "out1" for output 1. Or a function
            of `needs` that returns these (a matmul with a constant saves only the constant).
        view: `view(array, **attrs) -> Array`, for ops that only change shape, strides and offset; nothing runs.
        flops: arithmetic operations per call, `flops(inputs, outputs, attrs)`; None means one per output element.
        elementwise: True if each output element depends only on the same (broadcast) element of the inputs. `out` may
            then be one of the inputs, and gradients of broadcast operands are summed to their shapes.
        auxiliary: indices of outputs without a gradient: statistics and counts for backward or the caller.
        gradient_outputs: pairs (output, input). Such an auxiliary output, which only the vjp may read, becomes the
            gradient of that input and has its shape and dtype. `apply` allocates it in the leaf's gradient slot if
            the slot is free, and moves it when others need the slot.
        join: `join(inputs, attrs)` returns the arguments of the same call with adjacent operands merged (such as
            weights in a flat buffer), or its arguments unchanged. The tape keeps the original operands.
        mutates: indices of inputs that the reference changes in place (optimizer steps). If such an op has no outputs,
            `infer` returns an empty tuple and `out` is empty, too.
        family: file that defines the op; groups rows in reports.
        nbytes: bytes touched per call, `nbytes(inputs, outputs, attrs)`. None counts each operand once, and operands
            that change in place twice.
        cuda_impl: CUDA implementation of a user's op (`genesis.custom`), which is not in the registry; the others are
            in `genesis.kernels`.
        public: public name of the function of one or two tensors that `genesis.functions.pointwise` generates from
            this record; empty if the op has no public function or a hand-written one.
        method: True if the public function is also a method of Tensor.
        in_place: True if Tensor also has the in-place method, with a trailing underscore.
        module: name of the activation module in `genesis.nn`; `nn.functional` then exports the function, too.
        autocast: dtype to which `autocast` casts float inputs. "low_precision": matmuls and ops fused with them (norm,
            activation and sums inside compute in fp32 and round once); "fp32": ops that need range or sums; "widest":
            the widest dtype of the inputs; empty: inputs stay unchanged.
        autocast_inputs: number of leading inputs that `autocast` casts; None for all.
        plain: `plain(*inputs, **attrs)` computes the outputs by other ops on arrays, without reading auxiliary outputs
            of forward, except as constants. A second backward pass differentiates it if the op has no vjp.
        formula: numpy function of an elementwise op's operands, from which its kernel is generated
            (`genesis.ops.formula`); None if the CUDA implementation is written by hand.
        swept: numpy function of the operands and `out` that the reference runs in the result's dtype
            (`genesis.ops.blocks.sweep`); None if the reference does more.
        torch: torch's name for the op with the same operands and dimensions, such as "torch.add". Empty if torch has no
            equivalent, or if `genesis.measure.torch_peer` has a call of another form.
    """

    name: str
    reference: Callable[..., Any]
    infer: Infer
    vjp: Vjp | None = None
    saves: Saves | Callable[[tuple[bool, ...]], Saves] = ()
    view: Callable[..., Array] | None = None
    flops: Callable[[tuple[Any, ...], tuple[Array, ...], dict[str, Any]], int] | None = None
    elementwise: bool = False
    auxiliary: tuple[int, ...] = ()
    gradient_outputs: tuple[tuple[int, int], ...] = ()
    join: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    mutates: tuple[int, ...] = ()
    family: str = ""
    nbytes: Callable[[tuple[Any, ...], tuple[Array, ...], dict[str, Any]], int] | None = None
    cuda_impl: Callable[..., None] | None = None
    public: str = ""
    method: bool = False
    in_place: bool = False
    module: str = ""
    autocast: Literal["", "low_precision", "fp32", "widest"] = ""
    autocast_inputs: int | None = None
    plain: Callable[..., Any] | None = None
    formula: Callable[..., Any] | None = None
    swept: Callable[..., Any] | None = None
    torch: str = ""

    def __post_init__(self) -> None:
        if self.cuda_impl is not None:
            return
        assert self.name not in registry, f"op {self.name} is registered twice"
        registry[self.name] = self

    @property
    def operands(self) -> int:
        """Number of inputs of the reference, if it is fixed."""
        return int(self.reference.__code__.co_argcount) - 1  # without `out`

    def __call__(self, *inputs: Any, out: Out = None, **attrs: Any) -> Any:
        """Run on arrays, without gradients; return an Array, or a tuple if the op has several outputs.

        Args:
            out: memory for the result. For several outputs, a tuple of contiguous arrays of the outputs' shapes and
                dtypes, with None where the call allocates.
        """
        outputs = execute(self, inputs, attrs, out)
        return outputs[0] if len(outputs) == 1 else outputs

    def cost(self, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> Cost:
        """Return FLOPs and the fewest bytes that this call can move."""
        if self.view is not None:
            return Cost(0, 0)
        flops = sum(numel(o.shape) for o in outputs) if self.flops is None else self.flops(inputs, outputs, attrs)
        if self.nbytes is not None:
            return Cost(flops, self.nbytes(inputs, outputs, attrs))
        changed = (inputs[i] for i in self.mutates if i < len(inputs))  # read and written
        return Cost(flops, sum(x.nbytes for x in (*inputs, *changed, *outputs) if isinstance(x, Array)))

    def context(
        self, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], needs: tuple[bool, ...]
    ) -> Context:
        """Return exactly what backward needs; everything else is freed early."""
        saves = self.saves(needs) if callable(self.saves) else self.saves
        # This runs for every recorded op: lists are faster than generators, which cost a call per element.
        specs = tuple([x.spec if isinstance(x, Array) else None for x in inputs])
        if not saves and None not in specs:
            kept: tuple[Any, ...] = (None,) * len(inputs)
        else:
            kept = tuple([x if i in saves or not isinstance(x, Array) else None for i, x in enumerate(inputs)])
        if "out" in saves:
            out: tuple[Array | None, ...] = outputs
        elif len(outputs) == 1:
            out = (None,)
        else:
            out = tuple([o if f"out{i}" in saves else None for i, o in enumerate(outputs)])
        return Context(kept, out, attrs, needs, specs)

    def gradient(self, ctx: Context, *grads: Array | None) -> tuple[Array | None, ...]:
        """Apply the vjp. Raises GradientError if the op has none."""
        if self.vjp is None:
            raise GradientError(f"{self.name} has no gradient", next="detach() its input, or leave it out of the loss")
        return self.vjp(ctx, *grads)


def op(name: str, infer: Infer, **rest: Any) -> Callable[[Callable[..., Any]], Op]:
    """Decorator: register an op called `name` whose reference is the decorated function."""

    def register(reference: Callable[..., Any]) -> Op:
        return Op(name, reference, infer, family=reference.__module__.rpartition(".")[2], **rest)

    return register


def gradient_like(name: str, g: Array, *outputs: Array, like: Array | Spec | None = None) -> tuple[Spec, ...]:
    """Return the specs of a backward op that computes gradients of `outputs`, the inputs of the forward op.

    `g`, the gradient of the forward op's result, must have the shape of `like` (default: the first of `outputs`).

    Raises:
        ShapeError: if it does not; names op and shapes.
    """
    expected = outputs[0] if like is None else like
    if g.shape != expected.shape:
        raise ShapeError(f"{name}: the gradient has shape {g.shape}, the result has {expected.shape}")
    return tuple(Spec(x.shape, x.dtype) for x in outputs)


def through(name: str) -> Vjp:
    """Return a vjp that calls one op with g, the saved inputs and outputs, and the attributes."""

    def vjp(ctx: Context, g: Array, *_: None) -> Grads:
        result = registry[name](g, *(x for x in (*ctx.inputs, *ctx.outputs) if x is not None), **ctx.attrs)
        grads = result if isinstance(result, tuple) else (result,)
        return (*grads, *[None] * (len(ctx.inputs) - len(grads)))

    return vjp


class Tracer(Protocol):
    """Runs every op that its thread executes on arrays, while `tracing` is active.

    The tape of a second backward pass is one (`genesis.autograd.double`); a compiler can be another.
    """

    def call(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Out) -> tuple[Array, ...]:
        """Return the outputs, as `execute` does. Ops that run inside the call are not traced."""
        ...


_tracers: dict[int, Tracer] = {}  # by thread


@contextmanager
def tracing(tracer: Tracer | None) -> Iterator[None]:
    """Let `tracer` run the ops of this thread inside the block; None suspends tracing."""
    thread = get_ident()
    outer = _tracers.pop(thread, None)
    if tracer is not None:
        _tracers[thread] = tracer
    try:
        yield
    finally:
        _tracers.pop(thread, None)
        if outer is not None:
            _tracers[thread] = outer


def current_tracer() -> Tracer | None:
    """The tracer of this thread; None inside its own calls and without one."""
    return _tracers.get(get_ident()) if _tracers else None


Observer = Callable[[Op, tuple[Any, ...], tuple[Array, ...], dict[str, Any], float], None]
_observers: list[Observer] = []
_beginnings: list[Callable[[Op], None]] = []


@contextmanager
def observe(observer: Observer, begins: Callable[[Op], None] | None = None) -> Iterator[None]:
    """Call `begins(op)` before and `observer(op, inputs, outputs, attrs, seconds)` after every op inside the block."""
    _observers.append(observer)
    if begins is not None:
        _beginnings.append(begins)
    try:
        yield
    finally:
        _observers.remove(observer)
        if begins is not None:
            _beginnings.remove(begins)


def common_device(name: str, inputs: tuple[Any, ...]) -> Device:
    """Return the device of all array inputs. Raises DeviceError, with op and devices, if they differ."""
    device: Device | None = None
    for x in inputs:
        if isinstance(x, Array):
            if device is None:
                device = x.device
            elif x.device is not device and x.device != device:
                raise DeviceError(f"{name} got tensors on {device} and on {x.device}", next="move one with .to(device)")
    return device if device is not None else CPU


def execute(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Out = None) -> tuple[Array, ...]:
    """Run one op: infer, allocate, dispatch to the backend of the inputs, report to observers.

    Adds the op's name to errors about shapes, dtypes and indices that lack it. `out` is as in a call of the op.
    """
    if _tracers and (tracer := _tracers.pop(thread := get_ident(), None)) is not None:
        try:
            return tracer.call(op, inputs, attrs, out)
        finally:
            _tracers[thread] = tracer
    # Merge adjacent operands.
    if op.join is not None:
        inputs, attrs = op.join(inputs, attrs)
    # Replay a cached launch plan of the device.
    if op.view is None and not _observers and not isinstance(out, tuple):
        for x in inputs or (out,):
            if isinstance(x, Array):
                if x.device is CPU:
                    break
                replayed = x.storage.backend.replay(op, inputs, attrs, out)
                if replayed is None:
                    break
                return replayed
    # Infer, allocate and run.
    if _beginnings:
        for begins in tuple(_beginnings):
            begins(op)
    started = time.perf_counter() if _observers else 0.0
    try:
        outputs = (op.view(*inputs, **attrs),) if op.view is not None else _compute(op, inputs, attrs, out)
    except (ShapeError, DTypeError, IndexRangeError) as error:
        if op.name in error.what:
            raise
        named = type(error)(f"{op.name}: {error.what}", where=error.where, next=error.next)
        vars(named).update(vars(error) | vars(named))  # keeps `user_code` (see `errors.of_user`)
        raise named from None
    if _observers:
        seconds = time.perf_counter() - started
        for observer in tuple(_observers):
            observer(op, inputs, outputs, attrs, seconds)
    return outputs


def _compute(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Out) -> tuple[Array, ...]:
    chosen = attrs.pop("device", None)  # creation ops have a device attribute; all others use their inputs' device
    out_arrays = () if out is None else (out if isinstance(out, tuple) else (out,))
    device = chosen or common_device(op.name, (*inputs, *out_arrays) if out_arrays else inputs)
    if device is CPU:
        outputs = _run(op, inputs, attrs, out, device)
    else:
        with backend_for(device).owned_by(op.name):
            outputs = _run(op, inputs, attrs, out, device)
    for i in op.mutates:
        inputs[i].storage.version += 1
    return outputs


def _run(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Out, device: Device) -> tuple[Array, ...]:
    inferred = op.infer(*inputs, **attrs)
    specs = (inferred,) if isinstance(inferred, Spec) else inferred
    if out is None:
        outputs = tuple(empty(s.shape, s.dtype, device) for s in specs)
        backend_for(device).run(op, outputs, inputs, attrs)
        return outputs
    # Check the caller's memory.
    if isinstance(out, tuple):
        destinations = out
        for o, s in zip(out, specs, strict=True):
            assert o is None or (o.spec == s and o.is_contiguous), f"{op.name}: out has {o}, the result is {s}"
    else:
        if len(specs) != 1:
            raise ShapeError(f"{op.name} has {len(specs)} outputs and takes no out=")
        if out.shape != specs[0].shape:
            raise ShapeError(f"{op.name}: the result has shape {specs[0].shape}, out has {out.shape}")
        if specs[0].dtype.category > out.dtype.category:
            raise DTypeError(f"{op.name}: a {specs[0].dtype} result does not fit into {out.dtype}")
        if out.overlaps_itself():
            what = f"{op.name}: out is an expanded view; several of its elements share memory"
            raise ShapeError(what, next="call .contiguous()")
        destinations = (out,)
    # Compute into `out` where possible, else into a temporary array that is copied. References other than elementwise
    # ones may assume that the memory they write is contiguous.
    targets = []
    for o, s in zip(destinations, specs, strict=True):
        fits = o is not None and o.dtype is s.dtype and (op.elementwise or o.is_contiguous)
        targets.append(o if o is not None and fits and not _aliases(op, o, inputs) else empty(s.shape, s.dtype, device))
    backend_for(device).run(op, tuple(targets), inputs, attrs)
    for o, target in zip(destinations, targets, strict=True):
        if o is not None:
            if o is not target:
                backend_for(device).run(registry["copy"], (o,), (target,), {})
            o.storage.version += 1
    return tuple([t if o is None else o for o, t in zip(destinations, targets, strict=True)])


def _aliases(op: Op, out: Array, inputs: tuple[Any, ...]) -> bool:
    """Whether writing `out` could overwrite input elements that are still to be read."""
    return any(
        isinstance(x, Array)
        and x.storage is out.storage
        and not (op.elementwise and (x.offset, x.shape, x.strides) == (out.offset, out.shape, out.strides))
        for x in inputs
    )
