"""A user's op: what it is called with, its outputs, its reference, its gradient, and the rules of its launches.

Everything that a user gives is a plain function of the op's operands in one order, `(out, *inputs, **attrs)`; rules
about results have no `out`, a gradient has those of the outputs in its place. So nothing has to be looked up.
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
from genesis.backend import CPU
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
Operands = tuple[Any, ...]  # the output, or a tuple of them, and the inputs
Infer = Callable[..., Spec | tuple[Spec, ...]]
SAVES: dict[Saved, tuple[bool, bool]] = {"inputs": (True, False), "outputs": (False, True), "both": (True, True)}

# By name, while they live: what `genesis profile --op` finds. An op that is defined anew takes the name over.
user_ops: weakref.WeakValueDictionary[str, UserOp] = weakref.WeakValueDictionary()


def cdiv(n: int, size: int) -> int:
    """How many tiles of `size` hold `n` elements: n / size rounded up."""
    return -(-n // size)


class UserOp:
    """A kernel of a user as a function on tensors. `genesis.triton_op` and `genesis.cuda_op` make them.

    Attributes:
        name: as in profiles and errors.
        inputs: names of its tensors, in order.
        attrs: its other arguments, given by keyword, with their defaults.
        op: the record that dispatch, autograd and the profiler see.
        sample: `sample(shape, dtype)` gives inputs as numpy arrays, for the profiler and for `check_op`; None where
            values from 0.5 to 2 of that shape do.
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
        """One tensor, or a tuple of them where the op has several outputs.

        Args:
            inputs: tensors on one device, as many as the op has.
            attrs: its other arguments by keyword; those left out have their defaults.

        Raises:
            UsageError: another number of tensors, something else than tensors, or an unknown keyword.
            DeviceError: on the CPU, where the op has no reference.
        """
        return apply(self.op, *inputs, **self.checked(inputs, attrs))

    def checked(self, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of a call with defaults filled in, once all arguments are what they must be."""
        if len(inputs) != len(self.inputs):
            takes = f"{len(self.inputs)} tensor{'s' * (len(self.inputs) != 1)} ({', '.join(self.inputs)})"
            raise UsageError(f"{self.name} takes {takes}; got {len(inputs)}")
        for name, x in zip(self.inputs, inputs, strict=True):
            if not isinstance(x, TensorBase | Array):
                raise UsageError(f"{self.name}: {name} must be a tensor, not {type(x).__name__}")
        unknown = [name for name in attrs if name not in self.attrs]
        if unknown:
            has = ", ".join(self.attrs) or "none"
            raise UsageError(f"{self.name} has no argument {unknown[0]!r}", next=f"those by keyword: {has}")
        return {**self.attrs, **attrs}

    def __repr__(self) -> str:
        return f"<user op {self.name}({', '.join([*self.inputs, *(f'{k}={v!r}' for k, v in self.attrs.items())])})>"


def load_op(name: str) -> UserOp:
    """The op called "module:name", for whose sake the module is imported; the current folder is searched first.

    Raises:
        UsageError: the module does not import, or has no such op.
    """
    module_name, _, attribute = name.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module may do
        raise UsageError(f"the module {module_name} does not import: {error!r}", where=name) from error
    finally:
        sys.path.remove(folder)
    found = getattr(module, attribute, None)
    if not isinstance(found, UserOp):
        ops = [key for key, value in vars(module).items() if isinstance(value, UserOp)]
        next = f"it has {', '.join(ops)}" if ops else "make one with genesis.triton_op"
        raise UsageError(f"{module_name} has no op {attribute}", where=name, next=next)
    return found


def _check_definition(name: str, inputs: Sequence[str], saves: str, functions: dict[str, Any]) -> None:
    if not name.isidentifier():
        raise UsageError(f"{name!r} is no name for an op", next="use letters, digits and _")
    if name in registry:
        raise UsageError(f"Genesis has an op called {name}", next=f"choose another name: my_{name}")
    if isinstance(inputs, str) or not inputs or not all(str(x).isidentifier() for x in inputs):
        raise UsageError(f"{name}: inputs must be the names of its tensors, not {inputs!r}", next='inputs=("x",)')
    if saves not in SAVES:
        raise UsageError(f"{name}: saves must be one of {', '.join(SAVES)}, not {saves!r}")
    for key, function in functions.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name}: {key} must be a function, not {type(function).__name__}")


# --- The functions of a user as the record's --------------------------------------------------------------------------


def _infer(name: str, out: Rule) -> Infer:
    def infer(*inputs: Any, **attrs: Any) -> Spec | tuple[Spec, ...]:
        with UserCode(f"the rule out of {name}"):
            found = out(*[Spec(x.shape, x.dtype) for x in inputs], **attrs)
        is_several = isinstance(found, tuple | list) and not isinstance(found, Spec)
        specs = []
        for each in found if is_several else (found,):
            shape, dtype = getattr(each, "shape", None), getattr(each, "dtype", None)
            if not isinstance(shape, tuple) or dtype is None or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise UsageError(
                    f"{name}: out gave {each!r}, which is no shape with a dtype",
                    next="return one of its arguments (out=lambda x: x), or genesis.custom.Spec(shape, dtype)",
                )
            specs.append(Spec(shape, dtype))
        return tuple(specs) if is_several else specs[0]

    return infer


def _writer(name: str, reference: Rule | None) -> Callable[..., None]:
    """The reference as the CPU runs it. It sees two-byte floats as float32, and is rounded once, at the end."""

    def write(out: Any, *inputs: np.ndarray, **attrs: Any) -> None:
        if reference is None:
            raise DeviceError(
                f"{name} is a GPU kernel without a reference, and its tensors are on the {CPU}",
                next="move them with .cuda(), or give the op a numpy function: reference=",
            )
        wide = [x.astype(np.float32) if is_narrow(x.dtype) else x for x in inputs]
        with UserCode(f"the reference of {name}"):
            made = reference(*wide, **attrs)
            outs, values = (out, made) if isinstance(out, tuple) else ((out,), (made,))
            if len(outs) != len(values):
                raise ShapeError(f"the reference of {name} gave {len(values)} results, out says {len(outs)}")
            for o, value in zip(outs, values, strict=True):
                if np.shape(value) != o.shape:
                    raise ShapeError(f"the reference of {name} gave the shape {np.shape(value)}, out says {o.shape}")
                o[...] = value

    return write


def _vjp(
    name: str, vjp: Rule, infer: Infer, from_inputs: bool, from_outputs: bool, count: int
) -> Callable[..., tuple[Array | None, ...]]:
    """A gradient written with tensors as the record's, which is one of arrays."""

    def gradient(ctx: Context, *grads: Array | None) -> tuple[Array | None, ...]:
        found = infer(*ctx.input_specs, **ctx.attrs) if None in grads else ()
        specs = (found,) if isinstance(found, Spec) else found
        device = next(g.device for g in grads if g is not None)
        # the loss may not depend on some of the outputs
        given = [
            zeros(specs[i].shape, dtype=specs[i].dtype, device=device) if g is None else TensorBase.wrap(g)
            for i, g in enumerate(grads)
        ]
        saved = (ctx.inputs if from_inputs else ()) + (ctx.outputs if from_outputs else ())
        tensors = [*given, *map(TensorBase.wrap, saved)]
        with UserCode(f"the vjp of {name}"):
            with no_grad():
                made = vjp(*tensors, **ctx.attrs)
            made = made if isinstance(made, tuple | list) else (made,)
            if len(made) != count:
                raise GradientError(f"the vjp of {name} gave {len(made)} gradients for {count} inputs")
            return tuple(_fitting(name, i, g, ctx.input_specs[i]) for i, g in enumerate(made))

    return gradient


def _fitting(name: str, i: int, grad: Any, spec: Spec | None) -> Array | None:
    if grad is None:
        return None
    if not isinstance(grad, TensorBase):
        raise GradientError(f"the vjp of {name} gave a {type(grad).__name__} for input {i}", next="return a tensor")
    if spec is not None and grad.array.shape != spec.shape:
        raise GradientError(f"the vjp of {name} gave the shape {grad.array.shape} for input {i} of shape {spec.shape}")
    return grad.array


def _count(name: str, rule: Rule) -> Callable[[tuple[Any, ...], tuple[Array, ...], dict[str, Any]], int]:
    """`rule(out, *inputs, **attrs)` as the record's."""

    def count(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
        with UserCode(f"the cost of {name}"):
            return int(rule(outputs[0] if len(outputs) == 1 else outputs, *inputs, **attrs))

    return count


# --- Launching a kernel, in Triton or CUDA C++ ------------------------------------------------------------------------


@dataclass(eq=False)
class KernelLaunch:
    """The CUDA implementation of a user's op: asks the rules of `genesis.triton_op`, and launches the kernel."""

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
        """Launch the kernel. Raises: UsageError, where the kernel does not take `args`."""
        raise NotImplementedError

    def ask(self, what: str, rule: Any, operands: Operands, attrs: Attrs) -> Any:
        """What a rule of the user gives for a call, or the value that stands in its place."""
        with UserCode(f"the {what} of {self.name}"):
            return rule(*operands, **attrs) if callable(rule) else rule

    def sizes(self, what: str, value: Any, operands: Operands, attrs: Attrs) -> Grid:
        """A grid or a block in three dimensions: a size, up to three, or a rule that gives them."""
        found = self.ask(what, value, operands, attrs)
        sizes = found if isinstance(found, tuple | list) else (found,)
        if not 1 <= len(sizes) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes):
            raise UsageError(f"{self.name}: {what} must be up to three sizes, not {found!r}", next="divide with cdiv()")
        x, y, z = (*sizes, 1, 1)[:3]
        return x, y, z

    def constants_of(self, operands: Operands, attrs: Attrs) -> Attrs:
        """The constants of a call, by name."""
        found = self.ask("constants", self.constants, operands, attrs)
        with UserCode(f"the constants of {self.name}"):
            return dict(found or {})

    def _arguments(self, operands: Operands, attrs: Attrs) -> Operands:
        """A kernel's arguments: as the rule orders them, else outputs, inputs and the first output's element count."""
        if self.arguments is not None:
            found = self.ask("arguments", self.arguments, operands, attrs)
            return tuple(found) if isinstance(found, tuple | list) else (found,)
        if attrs:
            what = f"{self.name} has arguments by keyword, and nothing says where its kernel takes them"
            raise UsageError(what, where=self.name, next="arguments=lambda out, x, scale: (out, x, out.size, scale)")
        outs = _outputs(operands[0])
        return (*outs, *operands[1:], outs[0].size)


def _outputs(out: Any) -> tuple[Array, ...]:
    return out if isinstance(out, tuple) else (out,)


def _dense(x: Array) -> Array:
    """x, or a contiguous copy in memory that the running op has for itself."""
    if x.is_contiguous:
        return x
    from genesis.backend.cuda.dispatch import cuda_impl_named

    copied = empty(x.shape, x.dtype, x.device)
    cuda_impl_named("copy", "elementwise")(copied, x)
    return copied
