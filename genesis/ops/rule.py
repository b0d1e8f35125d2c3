"""An optimizer's update as one rule on values, the functions that a rule may call, and how numpy runs it.

A rule is two functions, written once with Python's operators and the functions below:

* `constants(lr, step, scale, *hyper, *choices)` is computed once a step, in float64: what all elements share;
* `update(p, g, *states, *constants, *choices)` is computed for each element, and gives the new p and states.

numpy runs them in blocks (`genesis.ops.optimizers`) as a `Program`: traced once, by a call with stand-ins that note
each operation, and then a list of numpy calls that write into rows. Results nobody uses are left out; every other one
is written over an operand that is not needed any more, or into a spare row, so that an update allocates nothing. Tensor
operations run them too (`foreach=False`), and one Triton kernel does (`genesis.kernels.optim.optimizers`, where the
names below stand for Triton functions). None of these look at how a value is stored, and a rule does not either:
float32 or float64, a bfloat16 weight with a 16-bit residual, bfloat16 rounded at random are their affair, as are the
gradient's dtype and steps that are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

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


# --- A rule in numpy --------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """`ufunc(*operands)`, the operands by number of the value or of the row."""

    ufunc: Callable[..., Any]
    operands: tuple[int, ...]
    result: int


class Traced:
    """A value of a rule while it is traced."""

    __slots__ = ("index", "trace")

    def __init__(self, trace: _Trace, index: int) -> None:
        self.trace, self.index = trace, index

    def __mul__(self, other: Any) -> Traced:
        return self if _is(other, 1) else self.trace.call(np.multiply, self, other)

    def __rmul__(self, other: Any) -> Traced:
        return self if _is(other, 1) else self.trace.call(np.multiply, other, self)

    def __add__(self, other: Any) -> Traced:
        return self.trace.call(np.add, self, other)

    def __radd__(self, other: Any) -> Traced:
        return self.trace.call(np.add, other, self)

    def __sub__(self, other: Any) -> Traced:
        return self.trace.call(np.subtract, self, other)

    def __rsub__(self, other: Any) -> Traced:
        return self.trace.call(np.subtract, other, self)

    def __truediv__(self, other: Any) -> Traced:
        return self if _is(other, 1) else self.trace.call(np.divide, self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return self.trace.call(np.divide, other, self)

    def sqrt(self) -> Traced:
        """√x."""
        return self.trace.call(np.sqrt, self)

    def signed(self, size: Any) -> Traced:
        """`size` with the sign of x, 8 times faster than by np.sign.

        Twice `huge` lifts the smallest number above any size; 0 and NaN stay.
        """
        huge, call = float(np.finfo(self.trace.dtype).max) ** 0.8, self.trace.call
        return call(np.maximum, call(np.minimum, self * huge * huge, size), self.trace.negative(size))


def _is(x: Any, value: float) -> bool:
    return isinstance(x, float) and x == value


class _Trace:
    """The calls of a rule. Values are numbered: operands, constants, then further scalars and results as they come."""

    def __init__(self, dtype: np.dtype, operands: int, constants: Sequence[float | None]) -> None:
        self.dtype, self.calls = dtype, list[Call]()
        self.operands = [Traced(self, i) for i in range(operands)]
        self.scalars: dict[int, Scalar] = {operands + i: Scalar(i) for i in range(len(constants))}
        self.count = operands + len(constants)
        # 0 and 1 are known to the trace: a factor of 1 costs no call
        self.constants = [Traced(self, operands + i) if c is None else c for i, c in enumerate(constants)]

    def call(self, ufunc: Callable[..., Any], *operands: Any) -> Traced:
        numbers = [x if isinstance(x, Traced) else self._scalar(Scalar(None, float(x))) for x in operands]
        self.calls.append(Call(ufunc, tuple(x.index for x in numbers), self.count))
        return self._fresh()

    def negative(self, x: Traced | float) -> Any:
        """A constant with the other sign."""
        return self._scalar(Scalar(self.scalars[x.index].constant, -1.0)) if isinstance(x, Traced) else -x

    def _scalar(self, scalar: Scalar) -> Traced:
        self.scalars[self.count] = scalar
        return self._fresh()

    def _fresh(self) -> Traced:
        self.count += 1
        return Traced(self, self.count - 1)


class Scalar(NamedTuple):
    """A number that all elements share: `factor`, times the constant of this number if one is named."""

    constant: int | None
    factor: float = 1.0


class Program(NamedTuple):
    """The calls of an update over rows: the parameter, its states, the gradient, then spare ones.

    Attributes:
        calls: with numbers of rows, and of scalars counted from the end.
        spare: rows beside the operands.
        scalars: where the values of the scalars come from.
    """

    calls: tuple[Call, ...]
    spare: int
    scalars: tuple[Scalar, ...]

    def bound(self, constants: Sequence[float], dtype: np.dtype) -> list[np.ndarray]:
        """The scalars of a step as 0-d arrays: numpy takes them faster than floats, which it converts each time."""
        return [
            np.array(s.factor if s.constant is None else s.factor * constants[s.constant], dtype) for s in self.scalars
        ]

    def run(self, rows: Sequence[np.ndarray], scalars: Sequence[np.ndarray]) -> None:
        """Update the rows."""
        values = [*rows, *scalars]
        for ufunc, operands, result in self.calls:
            if len(operands) == 2:
                ufunc(values[operands[0]], values[operands[1]], out=values[result])
            else:
                ufunc(values[operands[0]], out=values[result])


@functools.lru_cache(64)  # all parameters of a group have the same
def bound_program(
    rule: Rule, dtype: np.dtype, lr: float, step: float, scale: float, attrs: tuple[tuple[str, Any], ...]
) -> tuple[Program, list[np.ndarray]]:
    """The program of a step, and its scalars."""
    constants = rule.constants_of(lr, step, scale, dict(attrs))
    program = program_of(rule, dtype, constants, rule.choices(dict(attrs)))
    return program, program.bound(constants, dtype)


def program_of(rule: Rule, dtype: np.dtype, constants: Sequence[float], choices: tuple[bool, ...]) -> Program:
    """The program of a rule for constants of which only 0 and 1 matter."""
    return _program(rule, dtype, tuple(c if c in (0.0, 1.0) else None for c in constants), choices)


@functools.lru_cache(256)
def _program(rule: Rule, dtype: np.dtype, constants: tuple[float | None, ...], choices: tuple[bool, ...]) -> Program:
    changed = 1 + len(rule.states)
    trace = _Trace(dtype, changed + 1, constants)
    parameter, *states, gradient = trace.operands
    found = rule.update(parameter, gradient, *states, *trace.constants, *choices)
    results = [x.index for x in found]
    assert len(results) == changed, f"the update of {rule.name} gives {len(results)} values for {changed}"
    calls = _needed(trace.calls, results)
    used = [i for i in trace.scalars if any(i in c.operands for c in calls)]
    rows = {index: i - len(used) for i, index in enumerate(used)}
    placed, spare = _placed(calls, results, rows)
    return Program(tuple(placed), spare, tuple(trace.scalars[i] for i in used))


def _needed(calls: list[Call], results: list[int]) -> list[Call]:
    """The calls whose results are used."""
    needed, kept = set(results), list[Call]()
    for call in reversed(calls):
        if call.result in needed:
            needed.update(call.operands)
            kept.append(call)
    return kept[::-1]


def _placed(calls: list[Call], results: list[int], rows: dict[int, int]) -> tuple[list[Call], int]:
    """The calls with rows for values, and how many spare rows they take; the results end in the first rows.

    Args:
        rows: those of scalars.
    """
    changed, free, placed = len(results), list[int](), list[Call]()
    gradient = spare = changed
    last = {x: i for i, call in enumerate(calls) for x in call.operands} | dict.fromkeys(results, len(calls))
    rows |= {i: i for i in range(changed + 1)}
    for i, call in enumerate(calls):
        found = {rows[x] for x in call.operands if last[x] == i and 0 <= rows[x] != gradient}
        home = results.index(call.result) if call.result in results else rows[call.operands[0]]
        if not found:
            spare += not free
            found = {free.pop() if free else spare}
        row = home if home in found else min(found)
        free += sorted(found - {row})
        placed.append(Call(call.ufunc, tuple(rows[x] for x in call.operands), row))
        rows[call.result] = row
    moves = [(rows[x], home) for home, x in enumerate(results) if rows[x] != home]
    beside = {row: spare + 1 + i for i, row in enumerate(row for row, _ in moves if row < changed)}
    moves = [*beside.items(), *((beside.get(row, row), home) for row, home in moves)]
    placed += [Call(np.positive, (row,), home) for row, home in moves]
    return placed, spare - changed + len(beside)
