"""A rule's update as a list of numpy calls that write into rows: traced once, then run on every block.

Tracing calls the rule with stand-ins, which note each operation. Results nobody uses are left out; every other one is
written over an operand that is not needed any more, or into a spare row. So an update allocates nothing, and makes the
calls that one would write by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.ops.rule import Rule


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
        """`size` with the sign of x, 8 times faster than by np.sign; twice `huge` is above any size. 0 and NaN stay."""
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
    """The calls of an update over rows: the parameter, its states, the gradient, then spare ones."""

    calls: tuple[Call, ...]  # with numbers of rows, and of scalars counted from the end
    spare: int  # rows beside the operands
    scalars: tuple[Scalar, ...]  # where the values of the scalars come from

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
    """The calls with rows for values, and how many spare rows they take; the results end in the first rows. `rows` are
    those of scalars.
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
