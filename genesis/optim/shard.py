"""What one call of an update rule works on, how the call is made, and small checks that optimizers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from genesis.array import Array
from genesis.errors import ConfigError, GradientError
from genesis.op import Op, registry
from genesis.ops.optimizers import DeviceScalar, steps_of
from genesis.ops.rounding import Noise
from genesis.ops.rule import Rule
from genesis.shapes import Shape
from genesis.tensor import Tensor


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
