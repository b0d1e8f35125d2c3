"""An optimizer's update as a rule on values, and the functions that a rule may call; other modules run the rules.

A rule is two functions, written once with Python's operators and the functions below:

* `constants(lr, step, scale, *hyper, *choices)` computes, in float64 and once per step, the values that all elements
  share;
* `update(p, g, *states, *constants, *choices)` returns the new p and states of an element.

numpy runs rules in blocks (`genesis.ops.optimizers`), tensor operations run them (`foreach=False`), and one Triton
kernel does (`genesis.kernels.optim.optimizers`, where the names below are Triton functions). A rule does not depend on
how values are stored: as float32 or float64, as a bfloat16 weight with a 16-bit residual, or as randomly rounded
bfloat16. The modules that run a rule handle storage, the gradient's dtype and skipped steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Value = Any  # a float, a traced value, a tensor, or a kernel's tile
RULES: dict[str, Rule] = {}
_followers: list[Callable[[Rule], None]] = []


def for_each_rule(follow: Callable[[Rule], None]) -> None:
    """Call `follow` with every rule: with the existing ones now, with others when they are defined."""
    for each in RULES.values():
        follow(each)
    _followers.append(follow)


@dataclass(frozen=True, eq=False)
class Rule:
    """An elementwise update; its ops are `<name>_step` and `<name>_split_step`, with the docstring of `update`.

    Attributes:
        name: name of the rule, from which its ops are named.
        states: names of the state tensors, at most two; they have the parameter's shape and start at 0.
        hyper: names of the numeric hyper-parameters that `constants` takes.
        constants: computes the constants of a step, see above.
        update: computes the new values, see above.
        flops: arithmetic operations per element.
        choices: returns the bools, from the op's attributes, on which both functions branch; each combination is
            compiled separately.
    """

    name: str
    states: tuple[str, ...]
    hyper: tuple[str, ...]
    constants: Callable[..., tuple[Value, ...]]
    update: Callable[..., tuple[Value, ...]]
    flops: int
    choices: Callable[[Mapping[str, Any]], tuple[bool, ...]] = lambda attrs: ()
    is_plain = False  # an op runs the rule, not tensor operations

    def __post_init__(self) -> None:
        assert self.name not in RULES, f"two rules are called {self.name}"
        assert len(self.states) <= 2, "rounding at random has counters for the parameter and two states"
        RULES[self.name] = self
        for follow in _followers:
            follow(self)

    def constants_of(self, lr: float, step: float, scale: float, attrs: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the constants of a step."""
        hyper = (float(attrs[name]) for name in self.hyper)
        return tuple(float(c) for c in self.constants(lr, step, scale, *hyper, *self.choices(attrs)))


def sqrt(x: Value) -> Value:
    """Return √x, rounded to nearest."""
    return math.sqrt(x) if isinstance(x, float) else x.sqrt()


def power(x: Value, y: Value) -> Value:
    """Return x to the power of y; only for constants."""
    return x**y


def divide(x: Value, y: Value) -> Value:
    """Return x / y, rounded to nearest, even where a kernel's own division is not."""
    return x / y


def where(condition: Value, x: Value, y: Value) -> Value:
    """Return x or y; the condition must depend only on constants."""
    return x if condition else y


def sign(x: Value, size: Value) -> Value:
    """Return `size` with the sign of x; x itself where x is 0 or NaN."""
    return x.sign() * size if not hasattr(x, "signed") else x.signed(size)
