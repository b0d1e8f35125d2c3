"""Flat buffers: one for the parameters of a group, one for their gradients, and one for each of their optimizer states.

The tensors become views of the buffers. An optimizer step, the gradient norm, clipping and zeroing then take one call
for the whole group, and so does a collective. Each tensor starts at a multiple of 64 bytes, and the padding between two
tensors is always zero in the gradients. A call of an update rule works on a shard of a buffer or on one parameter.
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
    """Return `FlatBuffers.idle_memory`, or None if the buffers are freed."""
    buffers = flat()
    return None if buffers is None else buffers.idle_memory(index)


class Run(NamedTuple):
    """Neighbouring parameters [first, last) with equal keys, at elements [start, stop) of every buffer."""

    key: Any
    first: int
    last: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Elements [start, stop) of the parameters. Their states start at element `at` of the state buffers."""

    start: int
    stop: int
    at: int


class FlatBuffers:
    """The memory of several leaf tensors of one dtype and device, and of their gradients.

    `param.array` becomes a view of `values`. The first gradient is written straight into its slot in `gradients`,
    without zeroing it first. `param.grad` is None until a gradient is accumulated, as in torch.

    Args:
        params: distinct leaves of one float dtype on one device.
        grad_dtype: dtype of the gradients if wider than the parameters', so that sums of 2-byte gradients keep small
            ones. `param.grad` then has this dtype, which torch does not allow.

    Attributes:
        summed: gradients that an update reads.
        state_size: number of elements of a state buffer.
    """

    def __init__(self, params: Sequence[Tensor], grad_dtype: DType | None = None) -> None:
        self.params = list(params)
        self.dtype, self.device = self.params[0].array.dtype, self.params[0].array.device
        # Assign each parameter its elements.
        self.starts, end = [], 0
        for param in self.params:
            assert param.array.dtype is self.dtype and param.array.device == self.device, "one dtype and device"
            self.starts.append(end)
            end += -(-param.array.size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        self.size = self.state_size = end
        self.states: dict[str, Array] = {}  # optimizer states by name, allocated by the optimizer
        # Allocate the buffers, and make the parameters and their gradient slots views of them.
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
        """Allocate a zeroed buffer of `size` elements (one per parameter element by default), aligned to 64 bytes."""
        size = self.size if size is None else size
        memory = label(empty((size + ALIGNMENT // dtype.itemsize,), dtype, self.device), owner)
        skip = -memory.data_ptr() % ALIGNMENT // dtype.itemsize
        aligned = memory.view((size,), (1,), skip)
        registry["fill"](out=aligned, value=0, shape=aligned.shape, dtype=dtype)
        return aligned

    def view(self, buffer: Array, index: int) -> Array:
        """The elements of parameter `index` in `buffer`, in the parameter's shape."""
        shape = self.params[index].array.shape
        return buffer.view(shape, contiguous_strides(shape), buffer.offset + self.starts[index])

    def idle_memory(self, index: int) -> Array | None:
        """The larger part of the gradient buffer before or after parameter `index`, for temporaries.

        None if another parameter has a gradient, or if the buffer has padding, which must remain zero.
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
        """The pieces of the elements [start, stop) that this rank updates: all of them."""
        yield Piece(start, stop, start)

    def sums_at(self, piece: Piece) -> int:
        """The first element of a piece's gradients in `summed`."""
        return piece.start

    def span(self, buffer: Array, run: Run) -> Array:
        """The elements of a run in `buffer`, `[n]`."""
        return buffer.view((run.stop - run.start,), (1,), buffer.offset + run.start)

    def runs(self, key: Callable[[Tensor], Hashable | None]) -> list[Run]:
        """Maximal runs of neighbours with equal keys. Parameters with the key None are left out."""
        runs: list[Run] = []
        for i, param in enumerate(self.params):
            value = key(param)
            start, stop = self.starts[i], self.starts[i] + -(-param.array.size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
            if value is None:
                continue
            last = runs[-1] if runs else None
            if last is not None and last.last == i and last.key == value:
                runs[-1] = last._replace(last=i + 1, stop=stop)
            else:
                runs.append(Run(value, i, i + 1, start, stop))
        return runs

    def collect_gradients(self) -> None:
        """Copy gradients that users assigned to `.grad` into their slots, and values assigned to `.data` likewise.

        Raises:
            GenesisError: if a parameter has new memory, for example after `Module.to`.
        """
        self._take_back()
        for param in self.params:
            slot = param._gradient_buffer
            assert slot is not None
            grad = param.grad
            if grad is not None and (grad.array.storage is not slot.storage or grad.array.offset != slot.offset):
                param.claim_gradient_slot()  # moves out the values that an op's forward keeps there under a lease
                registry["cast"](grad.array, dtype=self.grad_dtype, out=slot)
                param.grad = Tensor(slot)

    def _take_back(self) -> None:
        """Copy values of parameters whose memory `p.data = …` replaced into the buffer, which they use again."""
        at, storage = self.values.offset, self.values.storage
        moved = [i for i, p in enumerate(self.params)
                 if p.array.storage is not storage or p.array.offset != at + self.starts[i]]  # fmt: skip
        for i in moved:
            param, slot = self.params[i], self.params[i]._gradient_buffer
            spec = (param.array.shape, param.array.dtype, param.array.device)
            if slot is None or spec != (slot.shape, self.dtype, self.device):
                raise GenesisError(
                    f"parameter {i} of shape {param.array.shape} left its flat buffer: it was moved or cast",
                    next="move and cast the model before building the optimizer",
                )
        for i, values in [(i, registry["copy"](self.params[i].array)) for i in moved]:
            param = self.params[i]
            param.array = registry["copy"](values, out=self.view(self.values, i))

    def gradient_spans(self) -> list[Array]:
        """The accumulated gradients, in as few spans as possible."""
        self.collect_gradients()
        return [self.span(self.gradients, r) for r in self.runs(lambda p: None if p.grad is None else True)]

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all accumulated gradients, a 0-d tensor."""
        return Tensor(total_norm(*self.gradient_spans(), ord=float(norm_type)))

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply the accumulated gradients by a number or a 0-d tensor."""
        value = factor.array if isinstance(factor, Tensor) else factor
        for span in self.gradient_spans():
            registry["mul"](span, value, out=span)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set the accumulated ones to 0."""
        if set_to_none:
            for param in self.params:
                param.grad = None
            return
        for span in self.gradient_spans():
            registry["fill"](out=span, value=0, shape=span.shape, dtype=span.dtype)


# --- Shards and rules -------------------------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """A 2-byte tensor to be written after an update, by rounding the float32 values `wide` that it changed."""

    target: Tensor
    wide: Tensor
    counter: int | None  # first counter of stochastic rounding; None rounds to nearest


@dataclass(slots=True)
class Shard:
    """The operands of one call of an update rule: one parameter, or a shard of a flat buffer."""

    param: Tensor  # updated in place: the parameter, its master, or an upcast copy; bfloat16 only in a flat shard
    grad: Tensor  # a float type that is not wider than param's
    state: dict[str, Tensor]  # tensors by name, updated in place; bfloat16 only in a flat shard
    step: Any  # counts from 1; a device scalar in a fused update on a GPU
    residual: Tensor | None = None  # the 16-bit residuals of a flat shard's split fp32 masters
    noise: Noise | None = None  # for bfloat16 values of a flat shard, which the op rounds stochastically
    rounded: tuple[Rounded, ...] = ()  # tensors to write after the update


class MatrixRule(NamedTuple):
    """A rule that mixes the elements of a parameter, and therefore runs on one parameter at a time."""

    op: Op | None  # `op(param, grad, *states, lr, step, scale, **attrs)`; None runs `plain` only
    states: Callable[[Shape], dict[str, Shape]]  # maps the parameter's shape to the shapes of the states by name
    plain: Callable[..., None]  # `plain(param, grad, *states, lr, step, **attrs)` in tensor operations, in place

    @property
    def is_plain(self) -> bool:
        return self.op is None


class RuleCall(NamedTuple):
    """A rule, and the attributes with which it updates a group's parameters."""

    rule: Rule | MatrixRule
    attrs: dict[str, Any]
    initial: Mapping[str, float] = {}  # first values of states other than 0

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shapes of the states of a parameter with this shape, by name."""
        return dict.fromkeys(self.rule.states, shape) if isinstance(self.rule, Rule) else self.rule.states(shape)

    def plain(self, shard: Shard, lr: float, grad: Tensor) -> None:
        """Update by tensor operations. `grad` is already scaled and has the parameter's dtype."""
        rule, changed = self.rule, (shard.param, *shard.state.values())
        if isinstance(rule, MatrixRule):
            if shard.param.numel():
                rule.plain(shard.param, grad, *shard.state.values(), lr, shard.step, **self.attrs)
            return
        constants = rule.constants_of(lr, shard.step, 1.0, self.attrs)
        updated = rule.update(shard.param, grad, *shard.state.values(), *constants, *rule.choices(self.attrs))
        for old, new in zip(changed, updated, strict=True):
            old.copy_(new)

    def fused(self, shard: Shard, lr: DeviceScalar, scale: DeviceScalar) -> None:
        """Update by one op, which multiplies the gradient by `scale`."""
        inputs = (shard.grad.array, *(x.array for x in shard.state.values()), lr, shard.step, scale)
        if isinstance(self.rule, MatrixRule):
            assert self.rule.op is not None, "a rule without an op runs `plain`"
            self.rule.op(shard.param.array, *inputs, **self.attrs)
            return
        step, split_step = steps_of(self.rule)
        if shard.residual is None:
            step(shard.param.array, *inputs, noise=shard.noise, **self.attrs)
        else:
            split_step(shard.param.array, shard.residual.array, *inputs, noise=shard.noise, **self.attrs)


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ConfigError unless low <= value < high."""
    try:
        is_inside = bool(low <= value < high)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}, and must be a number") from None
    if not is_inside:
        bound = f"at least {low:g}" if high == math.inf else f"at least {low:g} and below {high:g}"
        raise ConfigError(f"{name} is {value}, and must be {bound}")


def check_flags(values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ConfigError if one of the named values is neither True nor False; a text would count as True."""
    for name in names:
        if name in values and values[name] not in (True, False):
            raise ConfigError(f"{name} is {values[name]!r}, and must be True or False")


def check_pair(name: str, values: Any, low: float, high: float) -> None:
    """Raise ConfigError unless `values` are two numbers with low <= value < high."""
    if not isinstance(values, Sequence) or len(values) != 2:
        raise ConfigError(f"{name} is {values!r}, and must be two numbers")
    for i, value in enumerate(values):
        check_range(f"{name}[{i}]", value, low, high)


def scale_value(scale: Tensor | float | None, maximize: bool) -> DeviceScalar:
    """Return the factor on gradients, a number or a 0-d array. `maximize` flips its sign."""
    value = 1.0 if scale is None else scale.array if isinstance(scale, Tensor) else float(scale)
    if isinstance(value, Array) and value.shape != ():
        raise GradientError(f"grad_scale has shape {value.shape}", next="pass a number or a 0-d tensor")
    if not maximize:
        return value
    return registry["neg"](value) if isinstance(value, Array) else -value
