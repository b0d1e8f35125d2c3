"""Elementwise optimizer steps, each one op that changes a parameter and its states in place.

Every step takes `grad_scale`, a factor on the gradient (a clip scale, the inverse of a loss scale, -1 to ascend), so
that scaling costs no pass over memory; where it is NaN the step is left out. Learning rate, step count and scale are
inputs and not attributes: they change from step to step, and may be 0-d arrays.

A step computes in float32 (float64 for float64 parameters). How values are kept is another matter:

* the parameter is of that type; or bfloat16, rounded at random (`noise`); or, in the ops named `split`, a bfloat16
  weight with 16 further bits, which together are a float32 master (see `rounding.py`);
* the states are of that type, or bfloat16, rounded at random;
* the gradient is of any float type that is not wider.

The steps give the same bits for any number of threads and for any way to cut a flat buffer into tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import parallel, scratch
from genesis.dtypes import bfloat16, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Op, Spec, op
from genesis.ops.blocks import BLOCK, UNIT
from genesis.ops.rounding import Noise, check_halves, joined, rounded_at_random, split_into

__all__ = [
    "Scalar",
    "adamw_split_step",
    "adamw_step",
    "check_step",
    "flops_of",
    "is_left_out",
    "lion_split_step",
    "lion_step",
    "sgd_momentum_split_step",
    "sgd_momentum_step",
    "sgd_split_step",
    "sgd_step",
    "split_of",
    "step_rule",
]

Scalar = Any  # a Python number or a 0-d array
Numbers = tuple[Scalar, Scalar, Scalar]  # learning rate, step count from 1, gradient scale
Kernel = Callable[..., None]  # kernel(parameter, *states, gradient, *temporaries) on blocks


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
    """The rule of a step with so many states."""

    def infer(param: Array, grad: Array, *rest: Any, noise: Noise | None = None, **attrs: Any) -> tuple[Spec, ...]:
        return check_step(name, param, grad, *rest[:states], noise=noise)

    return infer


def _split_rule(name: str, states: int) -> Callable[..., tuple[Spec, ...]]:
    def infer(
        weight: Array, low: Array, grad: Array, *rest: Any, noise: Noise | None = None, **attrs: Any
    ) -> tuple[Spec, ...]:
        check_halves(name, weight, low)
        kept = (float32,) if noise is None else (float32, bfloat16)
        if any(s.dtype not in kept for s in rest[:states]):
            found = ", ".join(str(s.dtype) for s in rest[:states])
            raise DTypeError(f"{name} takes states of {' or '.join(map(str, kept))}, got {found}")
        _check_gradient(name, weight, grad, rest[:states], float32.itemsize)
        return ()

    return infer


def flops_of(per_element: int) -> Callable[..., int]:
    """The arithmetic of a step."""
    return lambda inputs, outputs, attrs: per_element * inputs[0].size


def is_left_out(grad_scale: Scalar) -> bool:
    """Whether the step is not to be made."""
    return math.isnan(float(grad_scale))


# --- Blocks -----------------------------------------------------------------------------------------------------------


class _Kept:
    """An array that a step changes, as its elements are kept: in the type to compute in, rounded, or split."""

    def __init__(self, array: np.ndarray, work: np.dtype, low: np.ndarray | None, seed: int, counter: int) -> None:
        self.array, self.low, self.seed, self.counter = array, low, seed, counter
        self.flat = array.reshape(-1)
        self.flat_low = None if low is None else low.reshape(-1)
        self.is_narrow = self.flat.dtype != work

    def read(self, a: int, b: int, spare: list[np.ndarray]) -> np.ndarray:
        """Elements [a, b) to compute on; in one of the spare rows where they are narrow."""
        if not self.is_narrow:
            return self.flat[a:b]
        row = spare.pop()
        if self.flat_low is not None:
            return joined(self.flat[a:b], self.flat_low[a:b], row)
        np.copyto(row, self.flat[a:b])
        return row

    def write(self, a: int, b: int, values: np.ndarray) -> None:
        if self.flat_low is not None:
            split_into(self.flat[a:b], self.flat_low[a:b], values)
        elif self.is_narrow:
            self.flat[a:b] = rounded_at_random(values, self.seed, self.counter + a // 8)

    def finish(self) -> None:
        """Write back what was done on a copy, where strides do not flatten."""
        for x, flat in ((self.array, self.flat), (self.low, self.flat_low)):
            if x is not None and flat is not None and not np.may_share_memory(x, flat):
                x[...] = flat.reshape(x.shape)


def _constants(dtype: np.dtype, *values: float) -> list[np.ndarray]:
    """0-d arrays: numpy takes them faster than scalars, which it would convert at every call."""
    return [np.array(v, dtype) for v in values]


def _run(
    rule: Callable[..., tuple[Kernel, int]],
    changed: Sequence[np.ndarray],
    low: np.ndarray | None,
    grad: np.ndarray,
    numbers: Numbers,
    noise: Noise | None,
    **settings: Any,
) -> None:
    """Make a step on all elements, in threads.

    Args:
        rule: gives the kernel and how many temporaries it takes, from the type to compute in, the numbers and settings.
        changed: the parameter and its states.
        low: the further bits of a split parameter.
    """
    lr, step, scale = numbers
    if is_left_out(scale):
        return
    work = np.dtype(np.float64 if changed[0].dtype == np.float64 else np.float32)
    kernel, temporaries = rule(work, float(lr), float(step), float(scale), **settings)
    kept = []
    for stream, x in enumerate(changed):
        counter = 0 if noise is None else noise.counter(float(step), stream)
        kept.append(_Kept(x, work, low if stream == 0 else None, noise.seed if noise else 0, counter))
    grads, size = grad.reshape(-1), changed[0].size
    narrow = grads.dtype != work
    rows_needed = temporaries + narrow + sum(k.is_narrow for k in kept)

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
                values = [k.read(a, b, spare) for k in kept]
                kernel(*values, g, *spare)
                for k, v in zip(kept, values, strict=True):
                    k.write(a, b, v)

    if size:
        parallel(some, -(-size // UNIT), size)
    for k in kept:
        k.finish()


# --- SGD --------------------------------------------------------------------------------------------------------------


def _sgd(dtype: np.dtype, rate: float, step: float, scale: float, *, weight_decay: float) -> tuple[Kernel, int]:
    keep, take = _constants(dtype, 1 - rate * weight_decay, rate * scale)

    def kernel(p: np.ndarray, g: np.ndarray, s: np.ndarray) -> None:
        np.multiply(g, take, s)
        if weight_decay:
            np.multiply(p, keep, p)
        np.subtract(p, s, p)

    return kernel, 1


@op("sgd_step", step_rule("sgd_step", 0), mutates=(0,), flops=flops_of(4))
def sgd_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    lr: Scalar,
    step: Scalar,
    grad_scale: Scalar,
    *,
    weight_decay: float,
    noise: Noise | None = None,
) -> None:
    """p -= lr·(c·g + wd·p), c the `grad_scale`. The step count matters to the noise alone."""
    _run(_sgd, (param,), None, grad, (lr, step, grad_scale), noise, weight_decay=weight_decay)


def _momentum(
    dtype: np.dtype,
    rate: float,
    step: float,
    scale: float,
    *,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
) -> tuple[Kernel, int]:
    factor, decay, mu, damp, lr = _constants(dtype, scale, weight_decay, momentum, 1 - dampening, rate)

    def kernel(p: np.ndarray, b: np.ndarray, g: np.ndarray, s: np.ndarray, t: np.ndarray) -> None:
        np.multiply(g, factor, s)
        if weight_decay:
            np.multiply(p, decay, t)
            np.add(s, t, s)
        if step <= 1:
            np.copyto(b, s)
        else:
            np.multiply(b, mu, b)
            np.multiply(s, damp, t)
            np.add(b, t, b)
        if nesterov:
            np.multiply(b, mu, t)
            np.add(s, t, s)
        np.multiply(s if nesterov else b, lr, s)
        np.subtract(p, s, p)

    return kernel, 2


@op("sgd_momentum_step", step_rule("sgd_momentum_step", 1), mutates=(0, 2), flops=flops_of(7))
def sgd_momentum_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    momentum_buffer: np.ndarray,
    lr: Scalar,
    step: Scalar,
    grad_scale: Scalar,
    *,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    noise: Noise | None = None,
) -> None:
    """With g' = c·g + wd·p: b = g' at step 1, else b = μ·b + (1-δ)·g'; p -= lr·b, or lr·(g' + μ·b) with Nesterov.

    Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), in torch's form.
    """
    settings = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": weight_decay}
    _run(_momentum, (param, momentum_buffer), None, grad, (lr, step, grad_scale), noise, **settings)


# --- Adam, AdamW, Lion ------------------------------------------------------------------------------------------------


def _adamw(
    dtype: np.dtype,
    rate: float,
    step: float,
    scale: float,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[Kernel, int]:
    root = math.sqrt(1 - beta2**step)
    l2 = bool(weight_decay) and not decoupled
    pre = 1.0 if l2 else scale  # with L2 the gradient is scaled when the decay is added
    averages = (beta1, beta2, (1 - beta1) * pre, (1 - beta2) * pre * pre)
    update = (eps * root, rate / (1 - beta1**step) * root, 1 - rate * weight_decay)
    b1, b2, k1, k2, small, alpha, keep, c, decay = _constants(dtype, *averages, *update, scale, weight_decay)

    def kernel(p: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, s: np.ndarray, *more: np.ndarray) -> None:
        if l2:
            np.multiply(p, decay, more[0])
            np.multiply(g, c, s)
            g = np.add(more[0], s, more[0])
        np.multiply(g, k1, s)
        np.multiply(m, b1, m)
        np.add(m, s, m)
        np.multiply(g, g, s)
        np.multiply(s, k2, s)
        np.multiply(v, b2, v)
        np.add(v, s, v)
        np.sqrt(v, s)
        np.add(s, small, s)
        np.divide(m, s, s)
        np.multiply(s, alpha, s)
        if weight_decay and decoupled:
            np.multiply(p, keep, p)
        np.subtract(p, s, p)

    return kernel, 2 if l2 else 1


@op("adamw_step", step_rule("adamw_step", 2), mutates=(0, 2, 3), flops=flops_of(13))
def adamw_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    lr: Scalar,
    step: Scalar,
    grad_scale: Scalar,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    noise: Noise | None = None,
) -> None:
    """m = β1·m + (1-β1)·c·g, v = β2·v + (1-β2)·(c·g)², p = (1 - lr·wd)·p - α·m / (√v + ε·√b2).

    b1 = 1-β1^t, b2 = 1-β2^t and α = lr·√b2/b1: the order of operations that Kingma & Ba, "Adam" (2015), give at the
    end of section 2. Decay is decoupled (Loshchilov & Hutter, 2019); without `decoupled`, wd·p is added to c·g instead.

    Args:
        step: counts from 1.
    """
    settings = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
    _run(_adamw, (param, exp_avg, exp_avg_sq), None, grad, (lr, step, grad_scale), noise, **settings)


def _lion(
    dtype: np.dtype, rate: float, step: float, scale: float, *, beta1: float, beta2: float, weight_decay: float
) -> tuple[Kernel, int]:
    huge = float(np.finfo(dtype).max) ** 0.8
    b1, b2, k1, k2, high, low, keep, up = _constants(
        dtype, beta1, beta2, (1 - beta1) * scale, (1 - beta2) * scale, rate, -rate, 1 - rate * weight_decay, huge
    )

    def kernel(p: np.ndarray, m: np.ndarray, g: np.ndarray, s: np.ndarray, t: np.ndarray) -> None:
        np.multiply(m, b1, s)
        np.multiply(g, k1, t)
        np.add(s, t, s)
        # lr·sign(s), 8 times faster than np.sign: twice `up` lifts the smallest number above any lr; 0 and NaN stay
        np.multiply(s, up, s)
        np.multiply(s, up, s)
        np.minimum(s, high, out=s)
        np.maximum(s, low, out=s)
        if weight_decay:
            np.multiply(p, keep, p)
        np.subtract(p, s, p)
        np.multiply(m, b2, m)
        np.multiply(g, k2, t)
        np.add(m, t, m)

    return kernel, 2


@op("lion_step", step_rule("lion_step", 1), mutates=(0, 2), flops=flops_of(9))
def lion_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    lr: Scalar,
    step: Scalar,
    grad_scale: Scalar,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    noise: Noise | None = None,
) -> None:
    """p = (1 - lr·wd)·p - lr·sign(β1·m + (1-β1)·c·g), then m = β2·m + (1-β2)·c·g (Chen et al., 2023, algorithm 2).

    The step count matters to the noise alone.
    """
    settings = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay}
    _run(_lion, (param, exp_avg), None, grad, (lr, step, grad_scale), noise, **settings)


# --- The same steps on split masters ----------------------------------------------------------------------------------


@op("sgd_split_step", _split_rule("sgd_split_step", 0), mutates=(0, 1), flops=flops_of(8))
def sgd_split_step(
    out: tuple[()], weight: np.ndarray, low: np.ndarray, grad: np.ndarray, lr: Scalar, step: Scalar,
    grad_scale: Scalar, *, noise: Noise | None = None, **settings: Any,
) -> None:  # fmt: skip
    """`sgd_step` of the master that a weight and its low bits are."""
    _run(_sgd, (weight,), low, grad, (lr, step, grad_scale), noise, **settings)


@op("sgd_momentum_split_step", _split_rule("sgd_momentum_split_step", 1), mutates=(0, 1, 3), flops=flops_of(11))
def sgd_momentum_split_step(
    out: tuple[()], weight: np.ndarray, low: np.ndarray, grad: np.ndarray, momentum_buffer: np.ndarray, lr: Scalar,
    step: Scalar, grad_scale: Scalar, *, noise: Noise | None = None, **settings: Any,
) -> None:  # fmt: skip
    """`sgd_momentum_step` of the master that a weight and its low bits are."""
    _run(_momentum, (weight, momentum_buffer), low, grad, (lr, step, grad_scale), noise, **settings)


@op("adamw_split_step", _split_rule("adamw_split_step", 2), mutates=(0, 1, 3, 4), flops=flops_of(17))
def adamw_split_step(
    out: tuple[()], weight: np.ndarray, low: np.ndarray, grad: np.ndarray, exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray, lr: Scalar, step: Scalar, grad_scale: Scalar, *, noise: Noise | None = None,
    **settings: Any,
) -> None:  # fmt: skip
    """`adamw_step` of the master that a weight and its low bits are."""
    _run(_adamw, (weight, exp_avg, exp_avg_sq), low, grad, (lr, step, grad_scale), noise, **settings)


@op("lion_split_step", _split_rule("lion_split_step", 1), mutates=(0, 1, 3), flops=flops_of(13))
def lion_split_step(
    out: tuple[()], weight: np.ndarray, low: np.ndarray, grad: np.ndarray, exp_avg: np.ndarray, lr: Scalar,
    step: Scalar, grad_scale: Scalar, *, noise: Noise | None = None, **settings: Any,
) -> None:  # fmt: skip
    """`lion_step` of the master that a weight and its low bits are."""
    _run(_lion, (weight, exp_avg), low, grad, (lr, step, grad_scale), noise, **settings)


_SPLIT = {
    sgd_step: sgd_split_step,
    sgd_momentum_step: sgd_momentum_split_step,
    adamw_step: adamw_split_step,
    lion_step: lion_split_step,
}


def split_of(step: Op) -> Op:
    """The op that makes a step on split masters."""
    return _SPLIT[step]
