"""Flat buffers: the parameters of a group in one run of memory, their gradients in another, optimizer states in more.

The tensors become views of the buffers. An optimizer step, the gradient norm, clipping and zeroing are then one call
for the whole group, as a checkpoint's copy or a collective will be. Each tensor starts at a multiple of 64 bytes; the
few elements between two tensors stay zero in the gradients. A call of an update rule works on a shard of a buffer, or
on one parameter.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from genesis.array import Array, empty, label
from genesis.dtypes import DType, promote_types
from genesis.errors import ConfigError, GenesisError, GradientError
from genesis.op import Op, registry
from genesis.ops.gradients import total_norm
from genesis.ops.optimizers import DeviceScalar, steps_of
from genesis.ops.rounding import Noise
from genesis.ops.rule import Rule
from genesis.shapes import Shape, contiguous_strides
from genesis.tensor import Tensor

ALIGNMENT = 64  # bytes
ALIGNED_ELEMENTS = 32  # elements: 64 bytes of the narrowest float, so that all buffers of a group share their offsets


def _idle_memory(flat: weakref.ref[FlatBuffers], index: int) -> Array | None:
    """`FlatBuffers.idle_memory` while the buffers live."""
    found = flat()
    return None if found is None else found.idle_memory(index)


class Run(NamedTuple):
    """Neighbouring parameters [first, last) with the same key, at elements [start, stop) of every buffer."""

    key: Any
    first: int
    last: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Elements [start, stop) of the parameters, whose states begin at element `at` of theirs."""

    start: int
    stop: int
    at: int


class FlatBuffers:
    """The memory of several leaf tensors of one dtype and device, and of their gradients.

    The tensors are re-pointed: `param.array` becomes a view of `values`, and a first gradient is written into its slot
    in `gradients` without a pass to zero it. `param.grad` keeps torch's meaning: None until a gradient is accumulated.

    Args:
        params: distinct leaves of one float dtype on one device.
        grad_dtype: of the gradients, where it is wider than that of the parameters: so many 2-byte gradients are added
            up without losing the small ones. `param.grad` has this dtype then, which torch would not allow.

    Attributes:
        summed: the gradients that an update reads.
        state_size: elements of a state's buffer.
    """

    def __init__(self, params: Sequence[Tensor], grad_dtype: DType | None = None) -> None:
        self.params = list(params)
        self.dtype, self.device = self.params[0].array.dtype, self.params[0].array.device
        self.starts, end = [], 0
        for param in self.params:
            assert param.array.dtype is self.dtype and param.array.device == self.device, "one dtype and device"
            self.starts.append(end)
            end += -(-param.array.size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        self.size = self.state_size = end
        self.states: dict[str, Array] = {}  # optimizer states by name, as the optimizer asks for them
        self.grad_dtype = self.dtype if grad_dtype is None else promote_types(self.dtype, grad_dtype)
        self.values = self.buffer(self.dtype, "parameters")
        self.summed = self.gradients = self.buffer(self.grad_dtype, "gradients")
        for i, param in enumerate(self.params):
            values = self.view(self.values, i)
            registry["copy"](param.array, out=values)
            param.array = values
            param._gradient_buffer = self.view(self.gradients, i)
            if param._gradient_slot is not None:
                param._gradient_slot.idle_memory = functools.partial(_idle_memory, weakref.ref(self), i)
        self.collect_gradients()

    def buffer(self, dtype: DType, owner: str, size: int | None = None) -> Array:
        """Memory for one value of `dtype` per element (or `size` of them), all zero, at a multiple of 64 bytes."""
        size = self.size if size is None else size
        whole = label(empty((size + ALIGNMENT // dtype.itemsize,), dtype, self.device), owner)
        skip = -whole.data_ptr() % ALIGNMENT // dtype.itemsize
        aligned = whole.view((size,), (1,), skip)
        registry["fill"](out=aligned, value=0, shape=aligned.shape, dtype=dtype)
        return aligned

    def view(self, buffer: Array, index: int) -> Array:
        """The elements of parameter `index` in `buffer`, in the parameter's shape."""
        shape = self.params[index].array.shape
        return buffer.view(shape, contiguous_strides(shape), buffer.offset + self.starts[index])

    def idle_memory(self, index: int) -> Array | None:
        """The gradients' memory before or after parameter `index`, whichever is more, while no gradient is in it.

        None where one is, and where there are gaps between the parameters, which have to stay zero.
        """
        others = (p for i, p in enumerate(self.params) if i != index)
        if any(p.grad is not None or p._gradient_slot is None or p._gradient_slot.is_leased for p in others):
            return None
        if any(p.array.size % ALIGNED_ELEMENTS for p in self.params):
            return None
        start, stop = self.starts[index], self.starts[index] + self.params[index].array.size
        first, last = (0, start) if start >= self.size - stop else (stop, self.size)
        return self.gradients.view((last - first,), (1,), self.gradients.offset + first) if last > first else None

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What of the elements [start, stop) is updated here: all."""
        yield Piece(start, stop, start)

    def sums_at(self, piece: Piece) -> int:
        """Where the gradients of a piece begin in `summed`."""
        return piece.start

    def span(self, buffer: Array, run: Run) -> Array:
        """The elements of a run in `buffer`, `[n]`."""
        return buffer.view((run.stop - run.start,), (1,), buffer.offset + run.start)

    def runs(self, key: Callable[[Tensor], Hashable | None]) -> list[Run]:
        """Maximal runs of neighbours with equal keys; parameters whose key is None belong to no run."""
        found: list[Run] = []
        for i, param in enumerate(self.params):
            value = key(param)
            start, stop = self.starts[i], self.starts[i] + -(-param.array.size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
            if value is None:
                continue
            last = found[-1] if found else None
            if last is not None and last.last == i and last.key == value:
                found[-1] = last._replace(last=i + 1, stop=stop)
            else:
                found.append(Run(value, i, i + 1, start, stop))
        return found

    def collect_gradients(self) -> None:
        """Copy gradients that were assigned from outside into their slots.

        Raises:
            GenesisError: if a parameter was given other memory, as `Module.to` does.
        """
        for i, param in enumerate(self.params):
            slot = param._gradient_buffer
            if param.array.storage is not self.values.storage or slot is None:
                raise GenesisError(
                    f"parameter {i} of shape {param.array.shape} left its flat buffer: it was moved or cast",
                    next="move and cast the model before you make the optimizer",
                )
            grad = param.grad
            if grad is not None and (grad.array.storage is not slot.storage or grad.array.offset != slot.offset):
                param.claim_gradient_slot()  # which moves out what an op's forward pass has there under a lease
                registry["cast"](grad.array, dtype=self.grad_dtype, out=slot)
                param.grad = Tensor(slot)

    def gradient_spans(self) -> list[Array]:
        """The accumulated gradients, in as few pieces as possible."""
        self.collect_gradients()
        return [self.span(self.gradients, r) for r in self.runs(lambda p: None if p.grad is None else True)]

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all accumulated gradients: a 0-d tensor."""
        return Tensor(total_norm(*self.gradient_spans(), ord=float(norm_type)))

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply the accumulated gradients by a number or a 0-d tensor."""
        value = factor.array if isinstance(factor, Tensor) else factor
        for span in self.gradient_spans():
            registry["mul"](span, value, out=span)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or set the accumulated ones to 0."""
        if set_to_none:
            for param in self.params:
                param.grad = None
            return
        for span in self.gradient_spans():
            registry["fill"](out=span, value=0, shape=span.shape, dtype=span.dtype)


# --- What a rule works on ---------------------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """A 2-byte tensor that is written after an update, from the float32 values that the update changed."""

    target: Tensor
    wide: Tensor
    counter: int | None  # from which the rounding is random; None rounds to nearest


@dataclass(slots=True)
class Shard:
    """What one call of an update rule works on: one parameter, or a shard of a flat buffer."""

    param: Tensor  # updated in place: the parameter, its master, or an upcast copy. Of a flat shard it may be bfloat16
    grad: Tensor  # of any float type that is not wider
    state: dict[str, Tensor]  # tensors by name, updated in place; of a flat shard they may be bfloat16
    step: Any  # counts from 1; a device scalar in a fused update on a GPU
    residual: Tensor | None = None  # the 16-bit residuals of a flat shard's split fp32 masters
    noise: Noise | None = None  # of a flat shard's bfloat16 values that the op rounds at random
    rounded: tuple[Rounded, ...] = ()  # what is written afterwards


class MatrixRule(NamedTuple):
    """A rule whose elements depend on each other, so that it runs on one parameter at a time."""

    op: Op  # `op(param, grad, *states, lr, step, scale, **attrs)`
    states: Callable[[Shape], dict[str, Shape]]  # the shapes of the states by name, from the parameter's
    plain: Callable[..., None]  # `plain(param, grad, *states, lr, step, **attrs)` in tensor operations, in place


class RuleCall(NamedTuple):
    """A rule, and the attributes with which a group's parameters are updated."""

    rule: Rule | MatrixRule
    attrs: dict[str, Any]

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """The tensors kept for a parameter of this shape."""
        return dict.fromkeys(self.rule.states, shape) if isinstance(self.rule, Rule) else self.rule.states(shape)

    def plain(self, shard: Shard, lr: float, grad: Tensor) -> None:
        """Update in tensor operations; `grad` is scaled, and of the parameter's dtype."""
        rule, changed = self.rule, (shard.param, *shard.state.values())
        if isinstance(rule, MatrixRule):
            if shard.param.numel():
                rule.plain(shard.param, grad, *shard.state.values(), lr, shard.step, **self.attrs)
            return
        constants = rule.constants_of(lr, shard.step, 1.0, self.attrs)
        found = rule.update(shard.param, grad, *shard.state.values(), *constants, *rule.choices(self.attrs))
        for old, new in zip(changed, found, strict=True):
            old.copy_(new)

    def fused(self, shard: Shard, lr: DeviceScalar, scale: DeviceScalar) -> None:
        """Update in one op, which multiplies the gradient by `scale`."""
        rest = (shard.grad.array, *(x.array for x in shard.state.values()), lr, shard.step, scale)
        if isinstance(self.rule, MatrixRule):
            self.rule.op(shard.param.array, *rest, **self.attrs)
            return
        step, split_step = steps_of(self.rule)
        if shard.residual is None:
            step(shard.param.array, *rest, noise=shard.noise, **self.attrs)
        else:
            split_step(shard.param.array, shard.residual.array, *rest, noise=shard.noise, **self.attrs)


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ConfigError unless low <= value < high (or both are finite and equal `low`)."""
    try:
        is_inside = bool(low <= value < high)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}, and must be a number") from None
    if not is_inside:
        bound = f"at least {low:g}" if high == math.inf else f"at least {low:g} and below {high:g}"
        raise ConfigError(f"{name} is {value}, and must be {bound}")


def check_flags(values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ConfigError unless the named values that are given are True or False; a text would count as True."""
    for name in names:
        if name in values and values[name] not in (True, False):
            raise ConfigError(f"{name} is {values[name]!r}, and must be True or False")


def check_pair(name: str, values: Any, low: float, high: float) -> None:
    """Raise ConfigError unless `values` are two numbers in that range."""
    if not isinstance(values, Sequence) or len(values) != 2:
        raise ConfigError(f"{name} is {values!r}, and must be two numbers")
    for i, value in enumerate(values):
        check_range(f"{name}[{i}]", value, low, high)


def scale_value(scale: Tensor | float | None, maximize: bool) -> DeviceScalar:
    """The factor on gradients: a number or a 0-d array, negative to ascend."""
    value = 1.0 if scale is None else scale.array if isinstance(scale, Tensor) else float(scale)
    if isinstance(value, Array) and value.shape != ():
        raise GradientError(f"grad_scale has shape {value.shape}", next="pass a number or a 0-d tensor")
    if not maximize:
        return value
    return registry["neg"](value) if isinstance(value, Array) else -value
