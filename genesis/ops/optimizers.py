"""Elementwise optimizer steps: of every rule two ops, which change a parameter and its states in place.

`<rule>_step(param, grad, *states, lr, step, grad_scale)` updates a parameter; `<rule>_split_step(weight, residual,
grad, ...)` the float32 master that a bfloat16 weight and its 16-bit residual are (see `rounding.py`). `grad_scale` is a
factor on the gradient (a clip scale, the inverse of a loss scale, -1 to ascend), so that scaling costs no pass over
memory; where it is NaN the step is left out. Learning rate, step count and scale are inputs and not attributes: they
change from step to step, and may be 0-d arrays.

A step computes in float32 (float64 for float64 parameters). The parameter is of that type, or bfloat16 that is rounded
at random (`noise`), or split; the states are of that type, or bfloat16 rounded at random; the gradient is of any float
type that is not wider. The same bits come for any number of threads and for any way to cut a flat buffer into tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel, scratch
from genesis.dtypes import bfloat16, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Op
from genesis.ops.blocks import BLOCK, UNIT
from genesis.ops.rounding import Noise, check_residual, flops_of, joined, rounded_at_random, split_into
from genesis.ops.rule import Rule
from genesis.ops.rule_in_numpy import bound_program

DeviceScalar = Any  # a Python number or a 0-d array


# --- Shapes and dtypes ------------------------------------------------------------------------------------------------


def check_step(name: str, param: Array, grad: Array, *states: Array, noise: Noise | None = None) -> tuple[Spec, ...]:
    """The rule of all steps; they have no outputs."""
    work = float64 if param.dtype is float64 else float32
    kept = (work,) if noise is None else (work, bfloat16)
    if param.dtype not in kept or any(s.dtype not in kept for s in states):
        found = ", ".join(str(x.dtype) for x in (param, *states))
        raise DTypeError(
            f"{name} takes a parameter and states of one type, float32 or float64, got {found}",
            next="keep a float32 master of a narrower parameter; bfloat16 is rounded at random, which needs noise",
        )
    _check_gradient(name, param, grad, states, work.itemsize)
    return ()


def _check_gradient(name: str, param: Array, grad: Array, states: Sequence[Array], widest: int) -> None:
    if not grad.dtype.is_floating_point or grad.dtype.itemsize > widest:
        raise DTypeError(f"{name}: a {grad.dtype} gradient for a {param.dtype} parameter")
    if any(x.shape != param.shape for x in (grad, *states)):
        found = ", ".join(str(x.shape) for x in (grad, *states))
        raise ShapeError(f"{name}: the parameter has shape {param.shape}, its gradient and states have {found}")


def step_rule(name: str, states: int) -> Callable[..., tuple[Spec, ...]]:
    """The shape and dtype rule of a step with so many states."""

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
            found = ", ".join(str(s.dtype) for s in rest[:states])
            raise DTypeError(f"{name} takes states of {' or '.join(map(str, kept))}, got {found}")
        _check_gradient(name, weight, grad, rest[:states], float32.itemsize)
        return ()

    return infer


def is_left_out(grad_scale: DeviceScalar) -> bool:
    """Whether the step is not to be made."""
    return math.isnan(float(grad_scale))


# --- Blocks -----------------------------------------------------------------------------------------------------------


class _Stored:
    """An array that a step changes, as its elements are stored: in the type to compute in, rounded, or split."""

    def __init__(self, array: np.ndarray, work: np.dtype, residual: np.ndarray | None, seed: int, counter: int) -> None:
        self.array, self.residual, self.seed, self.counter = array, residual, seed, counter
        self.flat = array.reshape(-1)
        self.flat_residual = None if residual is None else residual.reshape(-1)
        self.is_narrow = self.flat.dtype != work

    def read(self, a: int, b: int, spare: list[np.ndarray]) -> np.ndarray:
        """Elements [a, b) to compute on; in one of the spare rows where they are narrow."""
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
        """Write back what was done on a copy, where strides do not flatten."""
        for x, flat in ((self.array, self.flat), (self.residual, self.flat_residual)):
            if x is not None and flat is not None and not np.may_share_memory(x, flat):
                x[...] = flat.reshape(x.shape)


def _run(
    rule: Rule,
    changed: Sequence[np.ndarray],
    residual: np.ndarray | None,
    grad: np.ndarray,
    scalars: Sequence[DeviceScalar],
    noise: Noise | None,
    attrs: dict[str, Any],
) -> None:
    """Make a step on parameter and states, in threads; scalars: learning rate, step count from 1, gradient scale."""
    lr, step, scale = (float(x) for x in scalars)
    if is_left_out(scale):
        return
    work = np.dtype(np.float64 if changed[0].dtype == np.float64 else np.float32)
    program, bound = bound_program(rule, work, lr, step, scale, tuple(attrs.items()))
    stored = []
    for stream, x in enumerate(changed):
        counter = 0 if noise is None else noise.counter(step, stream)
        stored.append(_Stored(x, work, residual if stream == 0 else None, noise.seed if noise else 0, counter))
    grads, size = grad.reshape(-1), changed[0].size
    narrow = grads.dtype != work
    rows_needed = program.spare + narrow + sum(k.is_narrow for k in stored)

    def some(first: int, last: int) -> None:
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
        parallel(some, -(-size // UNIT), size)
    for k in stored:
        k.finish()


# --- The ops of a rule ------------------------------------------------------------------------------------------------


@functools.cache
def steps_of(rule: Rule) -> tuple[Op, Op]:
    """The ops `<rule>_step` and `<rule>_split_step`."""
    states, name, split = len(rule.states), f"{rule.name}_step", f"{rule.name}_split_step"

    def made(title: str, is_split: bool) -> Callable[..., None]:
        def step(out: tuple[()], param: np.ndarray, *rest: Any, noise: Noise | None = None, **attrs: Any) -> None:
            residual, grad, *others = rest if is_split else (None, *rest)
            _run(rule, (param, *others[:states]), residual, grad, others[states:], noise, attrs)

        step.__name__, step.__doc__ = title, rule.update.__doc__
        return step

    changed, family = range(2, 2 + states), __name__.rpartition(".")[2]
    return (
        Op(
            name,
            made(name, False),
            step_rule(name, states),
            mutates=(0, *changed),
            flops=flops_of(rule.flops),
            family=family,
        ),
        Op(
            split,
            made(split, True),
            _split_rule(split, states),
            mutates=(0, 1, *(i + 1 for i in changed)),
            flops=flops_of(rule.flops + 4),  # joining and splitting the master
            family=family,
        ),
    )
