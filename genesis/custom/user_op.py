"""A user's op: its inputs, outputs, reference, gradient, and the rules of its launches.

A user gives plain functions of the op's operands in one order: `(out, *inputs, **attrs)`. The functions that compute
results take no `out`, and a gradient takes the gradients of the outputs instead of `out`.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from genesis.array import Array, Spec, empty
from genesis.autograd import TensorBase, apply, no_grad
from genesis.backend import CPU, as_device
from genesis.errors import DeviceError, GradientError, ShapeError, UsageError, UserCode
from genesis.functions.create import zeros
from genesis.op import Context, Op, registry
from genesis.ops.blocks import is_narrow

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Grid

Saved = Literal["inputs", "outputs", "both"]
Rule = Callable[..., Any]
Constants = Mapping[str, Any] | Rule
Attrs = dict[str, Any]
Operands = tuple[Any, ...]  # the output, or a tuple of outputs, followed by the inputs
Infer = Callable[..., Spec | tuple[Spec, ...]]
SAVES: dict[Saved, tuple[bool, bool]] = {"inputs": (True, False), "outputs": (False, True), "both": (True, True)}

# Living ops by name, for `genesis profile --op`. A new op replaces an older one of the same name.
user_ops: weakref.WeakValueDictionary[str, UserOp] = weakref.WeakValueDictionary()


def cdiv(n: int, size: int) -> int:
    """The number of tiles of `size` that cover `n` elements: n / size rounded up."""
    return -(-n // size)


class UserOp:
    """A user's kernel as a function on tensors, made by `genesis.triton_op` or `genesis.cuda_op`.

    Attributes:
        name: the op's name in profiles and errors.
        inputs: names of the tensors that it takes, in order.
        attrs: its keyword arguments, with their defaults.
        op: the op record for dispatch, autograd and the profiler.
        sample: `sample(shape, dtype)` returns inputs as numpy arrays, for the profiler and for `check_op`; None if
            all values from 0.5 to 2 are valid.
    """

    def __init__(
        self,
        name: str,
        cuda_impl: Callable[..., None],
        *,
        inputs: Sequence[str],
        out: Rule,
        attrs: Mapping[str, Any] | None,
        vjp: Rule | None,
        saves: Saved,
        reference: Rule | None,
        sample: Rule | None,
        flops: Rule | None,
        nbytes: Rule | None,
    ) -> None:
        _check_definition(name, inputs, saves, {"out": out, "vjp": vjp, "reference": reference, "sample": sample})
        self.name, self.inputs, self.attrs = name, tuple(inputs), dict(attrs or {})
        self.sample, self.has_reference = sample, reference is not None
        (from_inputs, from_outputs), infer = SAVES[saves], _infer(name, out)
        self.op = Op(
            name,
            _writer(name, reference),
            infer,
            None if vjp is None else _vjp(name, vjp, infer, from_inputs, from_outputs, len(self.inputs)),
            saves=(*(range(len(self.inputs)) if from_inputs else ()), *(("out",) if from_outputs else ())),
            flops=None if flops is None else _count(name, flops),
            nbytes=None if nbytes is None else _count(name, nbytes),
            family="user",
            cuda_impl=cuda_impl,
        )
        user_ops[name] = self

    def __call__(self, *inputs: Any, **attrs: Any) -> Any:
        """Run the op and return a tensor, or a tuple of tensors if the op has several outputs.

        Args:
            inputs: tensors on one device, one per input of the op.
            attrs: keyword arguments of the op; missing ones have their defaults.

        Raises:
            UsageError: the number of tensors is wrong, an input is not a tensor, or a keyword is unknown.
            DeviceError: the tensors are on the CPU and the op has no reference.
        """
        return apply(self.op, *inputs, **self.checked(inputs, attrs))

    def checked(self, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Check the arguments of a call and return its attributes, with defaults filled in. Raises UsageError."""
        if len(inputs) != len(self.inputs):
            takes = f"{len(self.inputs)} tensor{'s' * (len(self.inputs) != 1)} ({', '.join(self.inputs)})"
            raise UsageError(f"{self.name} takes {takes}; got {len(inputs)}")
        for name, x in zip(self.inputs, inputs, strict=True):
            if not isinstance(x, TensorBase | Array):
                raise UsageError(f"{self.name}: {name} must be a tensor, not {type(x).__name__}")
        unknown = [name for name in attrs if name not in self.attrs]
        if unknown:
            has = ", ".join(self.attrs) or "none"
            raise UsageError(f"{self.name} has no argument {unknown[0]!r}", next=f"its keyword arguments are: {has}")
        return {**self.attrs, **attrs}

    def __repr__(self) -> str:
        return f"<user op {self.name}({', '.join([*self.inputs, *(f'{k}={v!r}' for k, v in self.attrs.items())])})>"


def load_op(name: str) -> UserOp:
    """Import a module and return its op, named as "module:name". The current folder is searched first.
    Raises UsageError if the module cannot be imported, or does not have the op.
    """
    module_name, _, attribute = name.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise UsageError(f"the module {module_name} cannot be imported: {error!r}", where=name) from error
    finally:
        sys.path.remove(folder)
    op = getattr(module, attribute, None)
    if not isinstance(op, UserOp):
        ops = [key for key, value in vars(module).items() if isinstance(value, UserOp)]
        next = f"it has {', '.join(ops)}" if ops else "make one with genesis.triton_op"
        raise UsageError(f"{module_name} has no op {attribute}", where=name, next=next)
    return op


def _check_definition(name: str, inputs: Sequence[str], saves: str, functions: dict[str, Any]) -> None:
    if not name.isidentifier():
        raise UsageError(f"{name!r} is not a valid name for an op", next="use letters, digits and _, such as my_op")
    if name in registry:
        raise UsageError(f"Genesis already has an op {name}", next=f"choose another name: my_{name}")
    if isinstance(inputs, str) or not inputs or not all(str(x).isidentifier() for x in inputs):
        raise UsageError(f"{name}: inputs must be the names of its tensors, not {inputs!r}", next='inputs=("x",)')
    if saves not in SAVES:
        raise UsageError(f"{name}: saves must be one of {', '.join(SAVES)}, not {saves!r}")
    for key, function in functions.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name}: {key} must be a function, not {type(function).__name__}")


# --- A user's functions in the form that the op record needs ----------------------------------------------------------


def _infer(name: str, out: Rule) -> Infer:
    def infer(*inputs: Any, **attrs: Any) -> Spec | tuple[Spec, ...]:
        with UserCode(f"the rule out of {name}"):
            result = out(*[Spec(x.shape, x.dtype) for x in inputs], **attrs)
        is_several = isinstance(result, tuple | list) and not isinstance(result, Spec)
        specs = []
        for each in result if is_several else (result,):
            shape, dtype = getattr(each, "shape", None), getattr(each, "dtype", None)
            if not isinstance(shape, tuple) or dtype is None or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise UsageError(
                    f"{name}: out returned {each!r}, which has no shape and dtype",
                    next="return one of its arguments (out=lambda x: x), or genesis.custom.Spec(shape, dtype)",
                )
            specs.append(Spec(shape, dtype))
        return tuple(specs) if is_several else specs[0]

    return infer


def _writer(name: str, reference: Rule | None) -> Callable[..., None]:
    """The reference for the CPU. It gets two-byte floats as float32, and its result is rounded once."""

    def write(out: Any, *inputs: np.ndarray, **attrs: Any) -> None:
        if reference is None:
            raise DeviceError(
                f"{name} has no reference for tensors on the {CPU}",
                next="move the tensors with .cuda(), or pass a numpy function as reference=",
            )
        wide = [x.astype(np.float32) if is_narrow(x.dtype) else x for x in inputs]
        with UserCode(f"the reference of {name}"):
            result = reference(*wide, **attrs)
            outs, values = (out, result) if isinstance(out, tuple) else ((out,), (result,))
            if len(outs) != len(values):
                raise ShapeError(f"the reference of {name} returned {len(values)} results; out says {len(outs)}")
            for o, value in zip(outs, values, strict=True):
                if np.shape(value) != o.shape:
                    raise ShapeError(f"the reference of {name} returned shape {np.shape(value)}; out says {o.shape}")
                o[...] = value

    return write


def _vjp(
    name: str, vjp: Rule, infer: Infer, from_inputs: bool, from_outputs: bool, count: int
) -> Callable[..., tuple[Array | None, ...]]:
    """Adapt a gradient on tensors to the op record, which works on arrays."""

    def gradient(ctx: Context, *grads: Array | None) -> tuple[Array | None, ...]:
        inferred = infer(*ctx.input_specs, **ctx.attrs) if None in grads else ()
        specs = (inferred,) if isinstance(inferred, Spec) else inferred
        device = next(g.device for g in grads if g is not None)
        # The loss may not depend on some of the outputs; their gradients are zeros.
        output_grads = [
            zeros(specs[i].shape, dtype=specs[i].dtype, device=device) if g is None else TensorBase.wrap(g)
            for i, g in enumerate(grads)
        ]
        saved = (ctx.inputs if from_inputs else ()) + (ctx.outputs if from_outputs else ())
        tensors = [*output_grads, *map(TensorBase.wrap, saved)]
        with UserCode(f"the vjp of {name}"):
            with no_grad():
                gradients = vjp(*tensors, **ctx.attrs)
            gradients = gradients if isinstance(gradients, tuple | list) else (gradients,)
            if len(gradients) != count:
                raise GradientError(f"the vjp of {name} returned {len(gradients)} gradients for {count} inputs")
            return tuple(_checked_gradient(name, i, g, ctx.input_specs[i]) for i, g in enumerate(gradients))

    return gradient


def _checked_gradient(name: str, i: int, grad: Any, spec: Spec | None) -> Array | None:
    if grad is None:
        return None
    if not isinstance(grad, TensorBase):
        raise GradientError(f"the vjp of {name} returned a {type(grad).__name__} for input {i}", next="return a tensor")
    if spec is not None and grad.array.shape != spec.shape:
        raise GradientError(f"the vjp of {name} returned shape {grad.array.shape} for input {i} of shape {spec.shape}")
    return grad.array


def _count(name: str, rule: Rule) -> Callable[[tuple[Any, ...], tuple[Array, ...], dict[str, Any]], int]:

    def count(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
        with UserCode(f"the cost of {name}"):
            return int(rule(outputs[0] if len(outputs) == 1 else outputs, *inputs, **attrs))

    return count


# --- Launching a kernel, in Triton or CUDA C++ ------------------------------------------------------------------------


def three_sizes(name: str, what: str, value: Any) -> Grid:
    """A grid or block in three dimensions. Raises UsageError, which names `name`, unless up to three are value."""
    sizes = value if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(sizes) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes):
        raise UsageError(f"{name}: {what} must be up to three sizes, not {value!r}", next="use cdiv()")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


@dataclass(eq=False)
class KernelLaunch:
    """The CUDA implementation of a user's op: evaluates the rules of `genesis.triton_op` and launches the kernel."""

    name: str
    grid: Any
    arguments: Rule | None
    constants: Constants | None
    contiguous: bool

    def __call__(self, out: Any, *inputs: Array, **attrs: Any) -> None:
        if all(o.size == 0 for o in _outputs(out)):
            return
        operands = (out, *(_dense(x) if self.contiguous else x for x in inputs))
        programs = self.sizes("grid", self.grid, operands, attrs)
        constants = self.constants_of(operands, attrs)
        self.launch(programs, self._arguments(operands, attrs), constants, operands, attrs)

    def launch(self, programs: Grid, args: Operands, constants: Attrs, operands: Operands, attrs: Attrs) -> None:
        """Launch the kernel. Raises UsageError if `args` do not fit its parameters."""
        raise NotImplementedError

    def evaluate(self, what: str, rule: Any, operands: Operands, attrs: Attrs) -> Any:
        """Evaluate a rule for a call; a value that is not a function is returned unchanged."""
        with UserCode(f"the {what} of {self.name}"):
            return rule(*operands, **attrs) if callable(rule) else rule

    def sizes(self, what: str, value: Any, operands: Operands, attrs: Attrs) -> Grid:
        """A grid or block in three dimensions, from up to three sizes or a rule that returns them."""
        return three_sizes(self.name, what, self.evaluate(what, value, operands, attrs))

    def constants_of(self, operands: Operands, attrs: Attrs) -> Attrs:
        """The constants of a call, by name."""
        constants = self.evaluate("constants", self.constants, operands, attrs)
        with UserCode(f"the constants of {self.name}"):
            return dict(constants or {})

    def _arguments(self, operands: Operands, attrs: Attrs) -> Operands:
        """The kernel's arguments from the rule, or the outputs, the inputs and the size of the first output."""
        if self.arguments is not None:
            arguments = self.evaluate("arguments", self.arguments, operands, attrs)
            return tuple(arguments) if isinstance(arguments, tuple | list) else (arguments,)
        if attrs:
            what = f"{self.name} has keyword arguments, but no rule for the kernel's arguments"
            raise UsageError(what, where=self.name, next="arguments=lambda out, x, scale: (out, x, out.size, scale)")
        outs = _outputs(operands[0])
        return (*outs, *operands[1:], outs[0].size)


def _outputs(out: Any) -> tuple[Array, ...]:
    return out if isinstance(out, tuple) else (out,)


def _dense(x: Array) -> Array:
    """x, or a contiguous copy in temporary memory of the running op."""
    if x.is_contiguous:
        return x
    from genesis.backend.cuda.dispatch import cuda_impl_named

    copied = empty(x.shape, x.dtype, x.device)
    cuda_impl_named("copy", "elementwise")(copied, x)
    return copied


def present_capability() -> tuple[int, int]:
    """The compute capability of the current device. Raises DeviceError without a GPU."""
    from genesis.backend.cuda import driver_for

    try:
        return driver_for(as_device("cuda").index).properties.capability
    except DeviceError as error:
        raise DeviceError("no GPU was found to compile for", next="pass capability=(9, 0)") from error
