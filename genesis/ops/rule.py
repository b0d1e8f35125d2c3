"""An optimizer's update as one rule on values, and the functions that a rule may call. What runs it is elsewhere.

A rule is two functions, written once with Python's operators and the functions below:

* `constants(lr, step, scale, *hyper, *choices)` is computed once a step, in float64: what all elements share;
* `update(p, g, *states, *constants, *choices)` is computed for each element, and gives the new p and states.

numpy runs them in blocks (`genesis.ops.optimizers`), tensor operations run them (`foreach=False`), and one Triton
kernel does (`genesis.kernels.optim.optimizers`, where the names below stand for Triton functions). None of these look
at how a value is stored, and a rule does not either: float32 or float64, a bfloat16 weight with a 16-bit residual,
bfloat16 rounded at random are their affair, as are the gradient's dtype and steps that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Value = Any  # a float, a traced value, a tensor, or a tile of a kernel
RULES: dict[str, Rule] = {}
_followers: list[Callable[[Rule], None]] = []


def for_each_rule(follow: Callable[[Rule], None]) -> None:
    """Call `follow` with every rule: now with those that there are, later with each that is written."""
    for each in RULES.values():
        follow(each)
    _followers.append(follow)


@dataclass(frozen=True, eq=False)
class Rule:
    """An elementwise update, whose ops are `<name>_step` and `<name>_split_step`; the docstring of `update` is theirs.

    Attributes:
        name: of its ops.
        states: names of the tensors that it keeps, at most two, of the parameter's shape and 0 at first.
        hyper: names of the hyper-parameters that `constants` takes, which are numbers.
        constants, update: see above.
        flops: arithmetic for each element.
        choices: bools that both functions branch on, from the ops' attributes: code is compiled for each combination.
    """

    name: str
    states: tuple[str, ...]
    hyper: tuple[str, ...]
    constants: Callable[..., tuple[Value, ...]]
    update: Callable[..., tuple[Value, ...]]
    flops: int
    choices: Callable[[Mapping[str, Any]], tuple[bool, ...]] = lambda attrs: ()

    def __post_init__(self) -> None:
        assert self.name not in RULES, f"two rules are called {self.name}"
        assert len(self.states) <= 2, "rounding at random has counters for the parameter and two states"
        RULES[self.name] = self
        for follow in _followers:
            follow(self)

    def constants_of(self, lr: float, step: float, scale: float, attrs: Mapping[str, Any]) -> tuple[float, ...]:
        """The constants of a step."""
        hyper = (float(attrs[name]) for name in self.hyper)
        return tuple(float(c) for c in self.constants(lr, step, scale, *hyper, *self.choices(attrs)))


def sqrt(x: Value) -> Value:
    """√x, rounded to nearest."""
    return math.sqrt(x) if isinstance(x, float) else x.sqrt()


def power(x: Value, y: Value) -> Value:
    """x to the power of y; of constants."""
    return x**y


def divide(x: Value, y: Value) -> Value:
    """x / y, rounded to nearest, where a kernel's own division is not."""
    return x / y


def where(condition: Value, x: Value, y: Value) -> Value:
    """x or y; the condition is one of constants."""
    return x if condition else y


def sign(x: Value, size: Value) -> Value:
    """`size` with the sign of x; where x is 0 or NaN, x."""
    return x.sign() * size if not hasattr(x, "signed") else x.signed(size)
