"""Elementwise optimizer steps: two ops per rule, which change a parameter and its states in place.

`<rule>_step(param, grad, *states, lr, step, grad_scale)` updates a parameter. `<rule>_split_step(weight, residual,
grad, ...)` updates a float32 master stored as a bfloat16 weight and its 16-bit residual (see `rounding.py`).
`grad_scale` multiplies the gradient (clip factor, inverse loss scale, -1 for ascent), so that scaling needs no pass
over memory; a scale of NaN skips the step. Learning rate, step count and scale are inputs rather than attributes,
because they change at every step and may be 0-d arrays.

A step computes in float32 (float64 for float64 parameters). The parameter is in that dtype, in bfloat16 with stochastic
rounding (`noise`), or split; states are in that dtype or in bfloat16 with stochastic rounding; the gradient is in any
float dtype that is not wider. The result has the same bits for any number of threads and for any division of a flat
buffer into tensors.

In numpy, a rule's update is a list of calls that write into rows: it is traced once, then run on every block. Tracing
calls the rule with traced values, which record each operation. Unused results are dropped. Every other result
overwrites an operand that is no longer needed, or a spare row. So an update allocates nothing, and makes the same calls
as hand-written code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel, scratch
from genesis.dtypes import bfloat16, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Op
from genesis.ops.blocks import BLOCK, UNIT
from genesis.ops.rounding import Noise, check_residual, flops_of, joined, rounded_at_random, split_into
from genesis.ops.rule import Rule

DeviceScalar = Any  # a Python number or a 0-d array


# --- Shapes and dtypes ------------------------------------------------------------------------------------------------


def check_step(name: str, param: Array, grad: Array, *states: Array, noise: Noise | None = None) -> tuple[Spec, ...]:
    """Check shapes and dtypes of a step; a step has no outputs."""
    work = float64 if param.dtype is float64 else float32
    kept = (work,) if noise is None else (work, bfloat16)
    if param.dtype not in kept or any(s.dtype not in kept for s in states):
        listed = ", ".join(str(x.dtype) for x in (param, *states))
        raise DTypeError(
            f"{name} takes a parameter and states of one type, float32 or float64, got {listed}",
            next="keep a float32 master of a narrower parameter, or pass noise to round bfloat16 stochastically",
        )
    _check_gradient(name, param, grad, states, work.itemsize)
    return ()


def _check_gradient(name: str, param: Array, grad: Array, states: Sequence[Array], widest: int) -> None:
    if not grad.dtype.is_floating_point or grad.dtype.itemsize > widest:
        raise DTypeError(f"{name}: a {grad.dtype} gradient does not fit a {param.dtype} parameter")
    if any(x.shape != param.shape for x in (grad, *states)):
        listed = ", ".join(str(x.shape) for x in (grad, *states))
        raise ShapeError(f"{name}: the parameter has shape {param.shape}, its gradient and states have {listed}")


def step_rule(name: str, states: int) -> Callable[..., tuple[Spec, ...]]:
    """Return the shape and dtype rule of a step with this many states."""

    def infer(param: Array, grad: Array, *rest: Any, noise: Noise | None = None, **attrs: Any) -> tuple[Spec, ...]:
        return check_step(name, param, grad, *rest[:states], noise=noise)

    return infer


def _split_rule(name: str, states: int) -> Callable[..., tuple[Spec, ...]]:
    def infer(
        weight: Array, residual: Array, grad: Array, *rest: Any, noise: Noise | None = None, **attrs: Any
    ) -> tuple[Spec, ...]:
        check_residual(name, weight, residual)
        kept = (float32,) if noise is None else (float32, bfloat16)
        if any(s.dtype not in kept for s in rest[:states]):
            listed = ", ".join(str(s.dtype) for s in rest[:states])
            raise DTypeError(f"{name} takes states of {' or '.join(map(str, kept))}, got {listed}")
        _check_gradient(name, weight, grad, rest[:states], float32.itemsize)
        return ()

    return infer


def is_left_out(grad_scale: DeviceScalar) -> bool:
    """Whether the step must be skipped."""
    return math.isnan(float(grad_scale))


# --- Blocks -----------------------------------------------------------------------------------------------------------


class _Stored:
    """An array that a step changes, in its storage format: the compute dtype, rounded, or split."""

    def __init__(self, array: np.ndarray, work: np.dtype, residual: np.ndarray | None, seed: int, counter: int) -> None:
        self.array, self.residual, self.seed, self.counter = array, residual, seed, counter
        self.flat = array.reshape(-1)
        self.flat_residual = None if residual is None else residual.reshape(-1)
        self.is_narrow = self.flat.dtype != work

    def read(self, a: int, b: int, spare: list[np.ndarray]) -> np.ndarray:
        """Return elements [a, b) in the compute dtype; narrow ones are converted into a spare row."""
        if not self.is_narrow:
            return self.flat[a:b]
        row = spare.pop()
        if self.flat_residual is not None:
            return joined(self.flat[a:b], self.flat_residual[a:b], row)
        np.copyto(row, self.flat[a:b])
        return row

    def write(self, a: int, b: int, values: np.ndarray) -> None:
        if self.flat_residual is not None:
            split_into(self.flat[a:b], self.flat_residual[a:b], values)
        elif self.is_narrow:
            self.flat[a:b] = rounded_at_random(values, self.seed, self.counter + a // 8)

    def finish(self) -> None:
        """Write back to arrays whose strides required a flat copy."""
        for x, flat in ((self.array, self.flat), (self.residual, self.flat_residual)):
            if x is not None and flat is not None and not np.may_share_memory(x, flat):
                x[...] = flat.reshape(x.shape)


def _run_step(
    rule: Rule,
    changed: Sequence[np.ndarray],
    residual: np.ndarray | None,
    grad: np.ndarray,
    scalars: Sequence[DeviceScalar],
    noise: Noise | None,
    attrs: dict[str, Any],
) -> None:
    """Run a step on parameter and states, in threads; scalars: learning rate, step count from 1, gradient scale."""
    lr, step, scale = (float(x) for x in scalars)
    if is_left_out(scale):
        return
    work = np.dtype(np.float64 if changed[0].dtype == np.float64 else np.float32)
    # The program of the update, and the arrays that it changes.
    program, bound = bound_program(rule, work, lr, step, scale, tuple(attrs.items()))
    stored = []
    for stream, x in enumerate(changed):
        counter = 0 if noise is None else noise.counter(step, stream)
        stored.append(_Stored(x, work, residual if stream == 0 else None, noise.seed if noise else 0, counter))
    grads, size = grad.reshape(-1), changed[0].size
    narrow = grads.dtype != work
    rows_needed = program.spare + narrow + sum(k.is_narrow for k in stored)

    # Read each block, run the program on it, write it back.
    def process_units(first: int, last: int) -> None:
        start, end = first * UNIT, min(last * UNIT, size)
        with scratch((rows_needed, min(BLOCK, end - start)), work) as rows:
            for a in range(start, end, BLOCK):
                b = min(a + BLOCK, end)
                spare = [row[: b - a] for row in rows]
                g = grads[a:b]
                if narrow:
                    g = spare.pop()
                    np.copyto(g, grads[a:b])
                values = [k.read(a, b, spare) for k in stored]
                program.run([*values, g, *spare], bound)
                for k, v in zip(stored, values, strict=True):
                    k.write(a, b, v)

    if size:
        parallel(process_units, -(-size // UNIT), size)
    for k in stored:
        k.finish()


# --- The ops of a rule ------------------------------------------------------------------------------------------------


@functools.cache
def steps_of(rule: Rule) -> tuple[Op, Op]:
    """Return the ops `<rule>_step` and `<rule>_split_step`."""
    states, name, split = len(rule.states), f"{rule.name}_step", f"{rule.name}_split_step"

    def reference(title: str, is_split: bool) -> Callable[..., None]:
        def step(out: tuple[()], param: np.ndarray, *rest: Any, noise: Noise | None = None, **attrs: Any) -> None:
            residual, grad, *others = rest if is_split else (None, *rest)
            _run_step(rule, (param, *others[:states]), residual, grad, others[states:], noise, attrs)

        step.__name__, step.__doc__ = title, rule.update.__doc__
        return step

    changed, family = range(2, 2 + states), __name__.rpartition(".")[2]
    return (
        Op(
            name,
            reference(name, False),
            step_rule(name, states),
            mutates=(0, *changed),
            flops=flops_of(rule.flops),
            family=family,
        ),
        Op(
            split,
            reference(split, True),
            _split_rule(split, states),
            mutates=(0, 1, *(i + 1 for i in changed)),
            flops=flops_of(rule.flops + 4),  # joining and splitting the master
            family=family,
        ),
    )


# --- A rule in numpy --------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call `ufunc(*operands)`; operands and result are numbers of values, or of rows once these are assigned."""

    ufunc: Callable[..., Any]
    operands: tuple[int, ...]
    result: int


class Traced:
    """A value of a rule during tracing."""

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
        """Return √x."""
        return self.trace.call(np.sqrt, self)

    def signed(self, size: Any) -> Traced:
        """Return `size` with the sign of x; 0 and NaN stay. 8 times faster than np.sign: x·huge² exceeds any size."""
        huge, call = float(np.finfo(self.trace.dtype).max) ** 0.8, self.trace.call
        return call(np.maximum, call(np.minimum, self * huge * huge, size), self.trace.negative(size))


def _is(x: Any, value: float) -> bool:
    return isinstance(x, float) and x == value


class _Trace:
    """The recorded calls of a rule. Values are numbered: operands, constants, then scalars and results in order."""

    def __init__(self, dtype: np.dtype, operands: int, constants: Sequence[float | None]) -> None:
        self.dtype, self.calls = dtype, list[Call]()
        self.operands = [Traced(self, i) for i in range(operands)]
        self.scalars: dict[int, Scalar] = {operands + i: Scalar(i) for i in range(len(constants))}
        self.count = operands + len(constants)
        # 0 and 1 are known during tracing, because a factor of 1 needs no call.
        self.constants = [Traced(self, operands + i) if c is None else c for i, c in enumerate(constants)]

    def call(self, ufunc: Callable[..., Any], *operands: Any) -> Traced:
        numbers = [x if isinstance(x, Traced) else self._scalar(Scalar(None, float(x))) for x in operands]
        self.calls.append(Call(ufunc, tuple(x.index for x in numbers), self.count))
        return self._fresh()

    def negative(self, x: Traced | float) -> Any:
        """Return a constant with the opposite sign."""
        return self._scalar(Scalar(self.scalars[x.index].constant, -1.0)) if isinstance(x, Traced) else -x

    def _scalar(self, scalar: Scalar) -> Traced:
        self.scalars[self.count] = scalar
        return self._fresh()

    def _fresh(self) -> Traced:
        self.count += 1
        return Traced(self, self.count - 1)


class Scalar(NamedTuple):
    """A number that all elements share: `factor`, times the constant with this index unless it is None."""

    constant: int | None
    factor: float = 1.0


class Program(NamedTuple):
    """The calls of an update on rows: the parameter, its states, the gradient, then spare rows.

    Attributes:
        calls: calls with row numbers; scalars are numbered from the end.
        spare: number of rows in addition to the operands.
        scalars: definitions of the scalars' values.
    """

    calls: tuple[Call, ...]
    spare: int
    scalars: tuple[Scalar, ...]

    def bound(self, constants: Sequence[float], dtype: np.dtype) -> list[np.ndarray]:
        """Return the scalars of a step as 0-d arrays; numpy converts Python floats at each call, which is slower."""
        return [
            np.array(s.factor if s.constant is None else s.factor * constants[s.constant], dtype) for s in self.scalars
        ]

    def run(self, rows: Sequence[np.ndarray], scalars: Sequence[np.ndarray]) -> None:
        """Run the calls on the rows."""
        values = [*rows, *scalars]
        for ufunc, operands, result in self.calls:
            if len(operands) == 2:
                ufunc(values[operands[0]], values[operands[1]], out=values[result])
            else:
                ufunc(values[operands[0]], out=values[result])


@functools.lru_cache(64)  # all parameters of a group share the program
def bound_program(
    rule: Rule, dtype: np.dtype, lr: float, step: float, scale: float, attrs: tuple[tuple[str, Any], ...]
) -> tuple[Program, list[np.ndarray]]:
    """Return the program of a step, and its scalars."""
    constants = rule.constants_of(lr, step, scale, dict(attrs))
    program = program_of(rule, dtype, constants, rule.choices(dict(attrs)))
    return program, program.bound(constants, dtype)


def program_of(rule: Rule, dtype: np.dtype, constants: Sequence[float], choices: tuple[bool, ...]) -> Program:
    """Return a rule's program; it depends only on which constants are 0 or 1."""
    return _program(rule, dtype, tuple(c if c in (0.0, 1.0) else None for c in constants), choices)


@functools.lru_cache(256)
def _program(rule: Rule, dtype: np.dtype, constants: tuple[float | None, ...], choices: tuple[bool, ...]) -> Program:
    changed = 1 + len(rule.states)
    trace = _Trace(dtype, changed + 1, constants)
    parameter, *states, gradient = trace.operands
    updated = rule.update(parameter, gradient, *states, *trace.constants, *choices)
    results = [x.index for x in updated]
    assert len(results) == changed, f"the update of {rule.name} gives {len(results)} values for {changed}"
    calls = _needed(trace.calls, results)
    used = [i for i in trace.scalars if any(i in c.operands for c in calls)]
    rows = {index: i - len(used) for i, index in enumerate(used)}
    assigned, spare = _assign_rows(calls, results, rows)
    return Program(tuple(assigned), spare, tuple(trace.scalars[i] for i in used))


def _needed(calls: list[Call], results: list[int]) -> list[Call]:
    needed, kept = set(results), list[Call]()
    for call in reversed(calls):
        if call.result in needed:
            needed.update(call.operands)
            kept.append(call)
    return kept[::-1]


def _assign_rows(calls: list[Call], results: list[int], rows: dict[int, int]) -> tuple[list[Call], int]:
    """Return the calls with rows instead of values, and the number of spare rows; results end in the first rows.

    `rows` maps scalars to their rows.
    """
    changed, free, assigned = len(results), list[int](), list[Call]()
    gradient = spare = changed
    last = {x: i for i, call in enumerate(calls) for x in call.operands} | dict.fromkeys(results, len(calls))
    rows |= {i: i for i in range(changed + 1)}
    for i, call in enumerate(calls):
        # Reuse the row of an operand that is not needed any more, preferably the result's final row.
        reusable = {rows[x] for x in call.operands if last[x] == i and 0 <= rows[x] != gradient}
        home = results.index(call.result) if call.result in results else rows[call.operands[0]]
        if not reusable:
            spare += not free
            reusable = {free.pop() if free else spare}
        row = home if home in reusable else min(reusable)
        free += sorted(reusable - {row})
        assigned.append(Call(call.ufunc, tuple(rows[x] for x in call.operands), row))
        rows[call.result] = row
    # Move results to their final rows, through copies where a move would overwrite another result.
    moves = [(rows[x], home) for home, x in enumerate(results) if rows[x] != home]
    copies = {row: spare + 1 + i for i, row in enumerate(row for row, _ in moves if row < changed)}
    moves = [*copies.items(), *((copies.get(row, row), home) for row, home in moves)]
    assigned += [Call(np.positive, (row,), home) for row, home in moves]
    return assigned, spare - changed + len(copies)
