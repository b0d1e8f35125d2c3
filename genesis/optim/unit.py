"""What one call of an update rule works on, and small things that all rules share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from genesis.array import Array
from genesis.errors import ConfigError, GradientError
from genesis.op import Op, registry
from genesis.ops.optimizers import split_of
from genesis.ops.rounding import Noise
from genesis.tensor import Tensor

__all__ = ["Rounded", "Scale", "Unit", "check_betas", "check_flags", "check_range", "run_step", "scale_value"]

Scale = Any  # a number, or a 0-d array


class Rounded(NamedTuple):
    """A 2-byte tensor that is written after an update, from the float32 values that the update changed.

    Attributes:
        counter: from which the rounding is random; None rounds to nearest.
    """

    target: Tensor
    wide: Tensor
    counter: int | None


@dataclass(slots=True)
class Unit:
    """What one call of an update rule works on: one parameter, or a run of a flat buffer.

    Attributes:
        param: updated in place: the parameter, its master, or a widened copy. Of a run it may be bfloat16.
        grad: of any float type that is not wider.
        state: tensors by name, updated in place; of a run they may be bfloat16.
        step: counts from 1; a 0-d array in a fused update on a device.
        low: the further bits of a run's split masters.
        noise: of a run's bfloat16 values that the op rounds at random.
        rounded: what is written afterwards.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    step: Any
    low: Tensor | None = None
    noise: Noise | None = None
    rounded: tuple[Rounded, ...] = ()


def run_step(op: Op, unit: Unit, states: Sequence[str], lr: Scale, scale: Scale, **settings: Any) -> None:
    """Run the op of an elementwise rule on a unit, in the form that fits how its values are kept."""
    rest = (unit.grad.array, *(unit.state[n].array for n in states), lr, unit.step, scale)
    if unit.low is None:
        op(unit.param.array, *rest, noise=unit.noise, **settings)
    else:
        split_of(op)(unit.param.array, unit.low.array, *rest, noise=unit.noise, **settings)


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


def check_betas(group: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the group's "betas" are two numbers of at least 0 and below 1."""
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}, and must be two numbers")
    for i, beta in enumerate(betas):
        check_range(f"betas[{i}]", beta, 0, 1)


def scale_value(scale: Tensor | float | None, maximize: bool) -> Scale:
    """The factor on gradients: a number or a 0-d array, negative to ascend."""
    value = 1.0 if scale is None else scale.array if isinstance(scale, Tensor) else float(scale)
    if isinstance(value, Array) and value.shape != ():
        raise GradientError(f"grad_scale has shape {value.shape}", next="pass a number or a 0-d tensor")
    if not maximize:
        return value
    return registry["neg"](value) if isinstance(value, Array) else -value
