"""What an op is, the registry of all ops, and dispatch.

An `Op` keeps everything about one operation together: the numpy reference (the CPU path and the oracle of every other
path), the shape and dtype rule, the gradient, the cost. Tests, benchmarks and the profiler are generic over `registry`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from genesis.array import Array, Spec, empty
from genesis.backend import CPU, Device, backend_for
from genesis.errors import DeviceError, DTypeError, GradientError, IndexRangeError, ShapeError
from genesis.shapes import numel

registry: dict[str, Op] = {}


class Cost(NamedTuple):
    """Work counted, not measured: arithmetic operations, and bytes when each operand is touched once."""

    flops: int
    bytes: int


class Accumulated(NamedTuple):
    """The gradient that an input has accumulated so far, for a vjp that adds to it: see `Context.take_accumulated`.

    `is_own`: the sum may be written over it (into this very array), because nobody else reads it.
    """

    array: Array
    is_own: bool


class GradientLease(Protocol):
    """The right to write into the gradient slot of a leaf, while it lives.

    `is_movable`: the values may be moved elsewhere when others need the slot.
    """

    array: Array
    is_movable: bool


class BackwardStep(Protocol):
    """One node's step of a backward pass, as its vjp sees it; `Context` passes the questions on.

    `leases` are of the gradient slots that the node's forward wrote outputs into.
    """

    leases: Mapping[int, GradientLease]

    @property
    def is_last(self) -> bool: ...
    @property
    def is_total(self) -> bool: ...
    def is_unit(self, grad: Array) -> bool: ...
    def gradient_slot(self, i: int) -> Array | None: ...
    def take_accumulated(self, i: int) -> Accumulated | None: ...


@dataclass(slots=True, eq=False)
class Context:
    """What a vjp may read: saved inputs and outputs (None where not saved), the attributes, who needs a gradient.

    A vjp may also ask for the memory of an input's gradient (`gradient_slot`) and for what has accumulated there
    (`take_accumulated`), to save the engine a copy or a sum. Outside of a backward pass both give None.

    Attributes:
        leases: by index, outputs that were made in the gradient slot of a leaf; see `Op.gradient_outputs`.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Array | None, ...]
    attrs: dict[str, Any]
    needs: tuple[bool, ...]
    input_specs: tuple[Spec | None, ...]
    leases: Mapping[int, GradientLease] = field(default_factory=dict)
    _step: BackwardStep | None = None

    def during(self, step: BackwardStep) -> Context:
        """The same for one step of a backward pass; a copy, because the pass must not live as long as the graph."""
        return Context(self.inputs, self.outputs, self.attrs, self.needs, self.input_specs, self.leases, step)

    def gradient_slot(self, i: int) -> Array | None:
        """Memory for the gradient of input `i`: contiguous, of its shape and dtype, contents undefined.

        It is the leaf's slot in a flat buffer, while `.grad` is None and no other gradient was accumulated or has a
        lease of it. A vjp that writes there returns this very array, and nothing is copied; it need not use it.
        """
        return None if self._step is None else self._step.gradient_slot(i)

    def take_accumulated(self, i: int) -> Accumulated | None:
        """The gradient of input `i` so far: from other consumers in this pass, or a leaf's `.grad` of passes before.

        A vjp that takes it promises to return the sum of it and its own gradient, which replaces what was taken: in
        `array` itself where `is_own` is set, or in memory that no other gradient shares. Sums inside a kernel are
        rounded once, those of the engine one by one: equal in float32 and wider, a little better in two bytes.
        """
        return None if self._step is None else self._step.take_accumulated(i)

    def is_unit(self, grad: Array) -> bool:
        """Whether a gradient is the 1 with which backward starts at a loss, so that nothing need be scaled by it."""
        return self._step is not None and self._step.is_unit(grad)

    def spec(self, i: int) -> Spec:
        """Shape and dtype of input `i`, an array."""
        found = self.input_specs[i]
        assert found is not None
        return found

    @property
    def is_last(self) -> bool:
        """Whether the vjp may write over outputs that only it can reach: nothing reads them later (no retain_graph)."""
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
        name: registry key; the kernel, test, benchmark and profile row carry the same.
        reference: `reference(out, *inputs, **attrs)` writes numpy results into `out` (a tuple where there are several).
            Inputs are numpy arrays or Python numbers. For a view op it returns the numpy view instead.
        infer: `infer(*inputs, **attrs)` gives the output `Spec`, or several, and raises ShapeError or DTypeError.
        vjp: `vjp(ctx, *grads)` gives one gradient (or None) per input, computed with ops on arrays; None when the op
            has no gradient. The tape sums gradients of broadcast operands to the operand's shape.
        saves: what backward reads: indices of inputs, "out" for all outputs, "out1" for the one of index 1; or a
            function of which inputs need a gradient (a matmul with a constant keeps only the constant).
        view: for ops that only re-describe memory: `view(array, **attrs) -> Array`, instead of running anything.
        flops: arithmetic per call, `flops(inputs, outputs, attrs)`; None means one per output element.
        elementwise: each output element depends on the same (broadcast) element of the inputs, so that `out` may be one
            of them, and gradients are summed to the shape of broadcast operands.
        auxiliary: indices of outputs that carry no gradient: statistics and counts that backward or the caller reads.
        gradient_outputs: pairs (output, input): an auxiliary output, which only the vjp may read, becomes the gradient
            of that input and is of its shape and dtype. `apply` makes it in the leaf's gradient slot if that is free,
            and moves it when others need the slot.
        join: `join(inputs, attrs)` gives the same call on fewer operands where some are next to each other in memory
            (as weights do in a flat buffer), else its arguments; the tape keeps the operands as they were.
        mutates: indices of inputs that the reference changes in place (optimizer steps). Where such an op has no
            outputs, `infer` returns an empty tuple and `out` is one too.
        family: the file that defines it; groups rows in reports.
        nbytes: memory touched per call, `nbytes(inputs, outputs, attrs)`; None means that each operand is touched once,
            and what is changed in place twice.
        cuda_impl: the CUDA side of a user's op (`genesis.custom`), which is not in the registry; others have theirs in
            `genesis.kernels`.
        public: users find the op under this name as a function of one or two tensors, made of this record alone
            (`genesis.functions.pointwise`). Empty where there is none, or where it is written by hand.
        method, in_place: the public function is also a method of Tensor, and one with a trailing underscore.
        module: the name of the activation module in `genesis.nn`; `nn.functional` has the function, too.
        autocast: what inputs of float types are cast to inside `autocast`. "low_precision": matmuls, and what is fused
            with them (norm, activation and sums in it are fp32 inside, and rounded once); "fp32": what needs range or
            sums; "widest": the widest type of the inputs; empty: they stay as they are.
        autocast_inputs: how many leading inputs that means; None for all.
        torch: what torch calls the op, on the same operands (and dimensions): "torch.add". Empty where torch has
            nothing like it, or where a call of another form is in `genesis.measure.peers.torch_ops`.
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
    torch: str = ""

    def __post_init__(self) -> None:
        if self.cuda_impl is not None:
            return
        assert self.name not in registry, f"op {self.name} is registered twice"
        registry[self.name] = self

    @property
    def operands(self) -> int:
        """How many inputs the reference takes, where their number is fixed."""
        return int(self.reference.__code__.co_argcount) - 1  # without `out`

    def __call__(self, *inputs: Any, out: Out = None, **attrs: Any) -> Any:
        """Run on arrays, without gradients; one Array, or a tuple where the op has several outputs.

        Args:
            out: memory for the result; for several outputs a tuple of None (memory is taken) and of contiguous arrays
                of the outputs' shapes and dtypes.
        """
        outputs = execute(self, inputs, attrs, out)
        return outputs[0] if len(outputs) == 1 else outputs

    def cost(self, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> Cost:
        """FLOPs and the fewest bytes that this call can move."""
        if self.view is not None:
            return Cost(0, 0)
        flops = sum(numel(o.shape) for o in outputs) if self.flops is None else self.flops(inputs, outputs, attrs)
        if self.nbytes is not None:
            return Cost(flops, self.nbytes(inputs, outputs, attrs))
        changed = (inputs[i] for i in self.mutates if i < len(inputs))  # these are read and written
        return Cost(flops, sum(x.nbytes for x in (*inputs, *changed, *outputs) if isinstance(x, Array)))

    def context(
        self, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], needs: tuple[bool, ...]
    ) -> Context:
        """What backward will need, and nothing more, so that memory is freed early."""
        saves = self.saves(needs) if callable(self.saves) else self.saves
        # Lists, not generators, which cost a call for each element: this runs for every recorded op.
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
        """Apply the vjp. Raises: GradientError, if the op has none."""
        if self.vjp is None:
            raise GradientError(f"{self.name} has no gradient", next="detach() its input, or leave it out of the loss")
        return self.vjp(ctx, *grads)


def op(name: str, infer: Infer, **rest: Any) -> Callable[[Callable[..., Any]], Op]:
    """Decorator: the function below is the reference of a new op called `name`."""

    def register(reference: Callable[..., Any]) -> Op:
        return Op(name, reference, infer, family=reference.__module__.rpartition(".")[2], **rest)

    return register


def gradient_like(name: str, g: Array, *outputs: Array, like: Array | Spec | None = None) -> tuple[Spec, ...]:
    """The shape and dtype rule of a backward op with gradients of `outputs`, the inputs that get them.

    `g`, the gradient of the forward op's result, has the shape of `like`, which is the first output unless given.

    Raises:
        ShapeError: naming op and shapes.
    """
    expected = outputs[0] if like is None else like
    if g.shape != expected.shape:
        raise ShapeError(f"{name}: the gradient has shape {g.shape}, the result has {expected.shape}")
    return tuple(Spec(x.shape, x.dtype) for x in outputs)


def through(name: str) -> Vjp:
    """The vjp that is one op, which takes g, what was saved of inputs and outputs, and the attributes."""

    def vjp(ctx: Context, g: Array, *_: None) -> Grads:
        found = registry[name](g, *(x for x in (*ctx.inputs, *ctx.outputs) if x is not None), **ctx.attrs)
        grads = found if isinstance(found, tuple) else (found,)
        return (*grads, *[None] * (len(ctx.inputs) - len(grads)))

    return vjp


Observer = Callable[[Op, tuple[Any, ...], tuple[Array, ...], dict[str, Any], float], None]
_observers: list[Observer] = []
_beginnings: list[Callable[[Op], None]] = []


@contextmanager
def observe(observer: Observer, begins: Callable[[Op], None] | None = None) -> Iterator[None]:
    """Call `observer(op, inputs, outputs, attrs, seconds)` after every op run inside the block, `begins(op)` before."""
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
    """The one device of all array inputs. Raises: DeviceError, naming the op and the devices when they differ."""
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

    Errors about shapes, dtypes and indices are given the op's name where they lack it. `out` is as in a call of the op.
    """
    if op.join is not None:
        inputs, attrs = op.join(inputs, attrs)
    if op.view is None and not _observers and not isinstance(out, tuple):
        for x in inputs:
            if isinstance(x, Array):
                if x.device is CPU:
                    break
                replayed = x.storage.backend.replay(op, inputs, attrs, out)
                if replayed is None:
                    break
                return replayed
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
        vars(named).update(vars(error) | vars(named))  # whose code raised it stays known (`errors.of_user`)
        raise named from None
    if _observers:
        seconds = time.perf_counter() - started
        for observer in tuple(_observers):
            observer(op, inputs, outputs, attrs, seconds)
    return outputs


def _compute(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Out) -> tuple[Array, ...]:
    chosen = attrs.pop("device", None)  # creation ops name their device; all others follow their inputs
    given = () if out is None else (out if isinstance(out, tuple) else (out,))
    device = chosen or common_device(op.name, (*inputs, *given) if given else inputs)
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
    if isinstance(out, tuple):
        given = out
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
        given = (out,)
    targets = []
    for o, s in zip(given, specs, strict=True):
        # References of other ops may assume that the memory they write is contiguous.
        fits = o is not None and o.dtype is s.dtype and (op.elementwise or o.is_contiguous)
        targets.append(o if o is not None and fits and not _aliases(op, o, inputs) else empty(s.shape, s.dtype, device))
    backend_for(device).run(op, tuple(targets), inputs, attrs)
    for o, target in zip(given, targets, strict=True):
        if o is not None:
            if o is not target:
                backend_for(device).run(registry["copy"], (o,), (target,), {})
            o.storage.version += 1
    return tuple([t if o is None else o for o, t in zip(given, targets, strict=True)])


def _aliases(op: Op, out: Array, inputs: tuple[Any, ...]) -> bool:
    """Whether writing `out` could hit input elements that are still to be read."""
    return any(
        isinstance(x, Array)
        and x.storage is out.storage
        and not (op.elementwise and (x.offset, x.shape, x.strides) == (out.offset, out.shape, out.strides))
        for x in inputs
    )
