"""Optimizer steps, each one op that changes its parameter and states in place; also the norm of many gradients.

Every step takes `grad_scale`, a factor on the gradient (a clip scale, the inverse of a loss scale, -1 to ascend), so
that scaling costs no pass over memory. Learning rate, step count and scale are inputs and not attributes: they change
from step to step, and may be 0-d arrays. Parameters and states are float32 or float64; gradients may be narrower. The
elementwise steps give the same bits for any number of threads and for any way to cut a flat buffer into tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import parallel, scratch
from genesis.dtypes import DType, bfloat16, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Spec, op
from genesis.ops.blocks import wide
from genesis.random import philox
from genesis.shapes import Shape

__all__ = [
    "adafactor_step",
    "adafactor_vector_step",
    "adamw_step",
    "lion_step",
    "muon_step",
    "newton_schulz",
    "rounding_counters",
    "sgd_momentum_step",
    "sgd_step",
    "stochastic_round",
    "total_norm",
]

# A numpy call needs the interpreter's lock to start. With long blocks two threads rarely wait for each other, which
# matters more here than a nearer cache: for 4M elements they take 13 ms in blocks of 8K, and 6 ms like this.
BLOCK = 1 << 17
UNIT = 1 << 12  # elements; threads share the work at multiples of it
NORM_ROW = 1 << 12  # elements of which squares are added in their own type; rows are added in float64

Scalar = Any  # a Python number or a 0-d array


# --- Shapes, dtypes, blocks -----------------------------------------------------------------------------------------


def _check(name: str, param: Array, grad: Array, *states: Array) -> tuple[Spec, ...]:
    """The rule of all elementwise steps; they have no outputs."""
    if param.dtype not in (float32, float64) or any(s.dtype is not param.dtype for s in states):
        found = ", ".join(str(x.dtype) for x in (param, *states))
        raise DTypeError(
            f"{name} takes a parameter and states of one type, float32 or float64, got {found}",
            next="keep a float32 master of a narrower parameter",
        )
    if not grad.dtype.is_floating_point or grad.dtype.itemsize > param.dtype.itemsize:
        raise DTypeError(f"{name}: a {grad.dtype} gradient for a {param.dtype} parameter")
    if any(x.shape != param.shape for x in (grad, *states)):
        found = ", ".join(str(x.shape) for x in (grad, *states))
        raise ShapeError(f"{name}: the parameter has shape {param.shape}, its gradient and states have {found}")
    return ()


def _rule(name: str, states: int) -> Callable[..., tuple[Spec, ...]]:
    def infer(param: Array, grad: Array, *rest: Any, **attrs: Any) -> tuple[Spec, ...]:
        return _check(name, param, grad, *rest[:states])

    return infer


def _flops(per_element: int) -> Callable[..., int]:
    return lambda inputs, outputs, attrs: per_element * inputs[0].size


def _is_left_out(grad_scale: Scalar) -> bool:
    """Whether the step is not to be made."""
    return math.isnan(float(grad_scale))


def _constants(dtype: np.dtype, *values: float) -> list[np.ndarray]:
    """0-d arrays: numpy takes them faster than scalars, which it would convert at every call."""
    return [np.array(v, dtype) for v in values]


def _each_block(
    kernel: Callable[..., None], changed: Sequence[np.ndarray], grad: np.ndarray, temporaries: int = 1
) -> None:
    """`kernel(*blocks of changed, block of grad, *temporaries)` over all elements, in threads."""
    dtype, size = changed[0].dtype, changed[0].size
    flats = [x.reshape(-1) for x in changed]
    grads = grad.reshape(-1)
    narrow = grads.dtype != dtype

    def some(first: int, last: int) -> None:
        start, end = first * UNIT, min(last * UNIT, size)
        with scratch((temporaries + narrow, min(BLOCK, end - start)), dtype) as rows:
            for a in range(start, end, BLOCK):
                b = min(a + BLOCK, end)
                spare = [row[: b - a] for row in rows]
                g = grads[a:b]
                if narrow:
                    g = spare.pop()
                    np.copyto(g, grads[a:b])
                kernel(*(x[a:b] for x in flats), g, *spare)

    if size:
        parallel(some, -(-size // UNIT), size)
    for x, flat in zip(changed, flats, strict=True):
        if not np.may_share_memory(x, flat):  # strides that do not flatten: the work was done on a copy
            x[...] = flat.reshape(x.shape)


# --- SGD ------------------------------------------------------------------------------------------------------------


@op("sgd_step", _rule("sgd_step", 0), mutates=(0,), flops=_flops(4))
def sgd_step(
    out: tuple[()], param: np.ndarray, grad: np.ndarray, lr: Scalar, grad_scale: Scalar, *, weight_decay: float
) -> None:
    """p -= lr·(c·g + wd·p), c the `grad_scale`."""
    if _is_left_out(grad_scale):
        return
    rate = float(lr)
    keep, take = _constants(param.dtype, 1 - rate * weight_decay, rate * float(grad_scale))

    def kernel(p: np.ndarray, g: np.ndarray, s: np.ndarray) -> None:
        np.multiply(g, take, s)
        if weight_decay:
            np.multiply(p, keep, p)
        np.subtract(p, s, p)

    _each_block(kernel, (param,), grad)


@op("sgd_momentum_step", _rule("sgd_momentum_step", 1), mutates=(0, 2), flops=_flops(7))
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
) -> None:
    """With g' = c·g + wd·p: b = g' at step 1, else b = μ·b + (1-δ)·g'; p -= lr·b, or lr·(g' + μ·b) with Nesterov.

    Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), in torch's form.
    """
    if _is_left_out(grad_scale):
        return
    first = float(step) <= 1
    scale, decay, mu, damp, rate = _constants(
        param.dtype, float(grad_scale), weight_decay, momentum, 1 - dampening, float(lr)
    )

    def kernel(p: np.ndarray, b: np.ndarray, g: np.ndarray, s: np.ndarray, t: np.ndarray) -> None:
        np.multiply(g, scale, s)
        if weight_decay:
            np.multiply(p, decay, t)
            np.add(s, t, s)
        if first:
            np.copyto(b, s)
        else:
            np.multiply(b, mu, b)
            np.multiply(s, damp, t)
            np.add(b, t, b)
        if nesterov:
            np.multiply(b, mu, t)
            np.add(s, t, s)
        np.multiply(s if nesterov else b, rate, s)
        np.subtract(p, s, p)

    _each_block(kernel, (param, momentum_buffer), grad, temporaries=2)


# --- Adam, AdamW, Lion ----------------------------------------------------------------------------------------------


@op("adamw_step", _rule("adamw_step", 2), mutates=(0, 2, 3), flops=_flops(13))
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
) -> None:
    """m = β1·m + (1-β1)·c·g, v = β2·v + (1-β2)·(c·g)², p = (1 - lr·wd)·p - α·m / (√v + ε·√b2).

    b1 = 1-β1^t, b2 = 1-β2^t and α = lr·√b2/b1: the order of operations that Kingma & Ba, "Adam" (2015), give at the
    end of section 2. Decay is decoupled (Loshchilov & Hutter, 2019); without `decoupled`, wd·p is added to c·g instead.

    Args:
        step: counts from 1.
    """
    if _is_left_out(grad_scale):
        return
    rate, count, c = float(lr), float(step), float(grad_scale)
    root = math.sqrt(1 - beta2**count)
    l2 = bool(weight_decay) and not decoupled
    pre = 1.0 if l2 else c  # with L2 the gradient is scaled when the decay is added
    averages = (beta1, beta2, (1 - beta1) * pre, (1 - beta2) * pre * pre)
    update = (eps * root, rate / (1 - beta1**count) * root, 1 - rate * weight_decay)
    b1, b2, k1, k2, small, alpha, keep, scale, decay = _constants(param.dtype, *averages, *update, c, weight_decay)

    def kernel(p: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, s: np.ndarray, *more: np.ndarray) -> None:
        if l2:
            np.multiply(p, decay, more[0])
            np.multiply(g, scale, s)
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

    _each_block(kernel, (param, exp_avg, exp_avg_sq), grad, temporaries=2 if l2 else 1)


@op("lion_step", _rule("lion_step", 1), mutates=(0, 2), flops=_flops(9))
def lion_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    lr: Scalar,
    grad_scale: Scalar,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """p = (1 - lr·wd)·p - lr·sign(β1·m + (1-β1)·c·g), then m = β2·m + (1-β2)·c·g (Chen et al., 2023, algorithm 2)."""
    if _is_left_out(grad_scale):
        return
    rate, c = float(lr), float(grad_scale)
    huge = float(np.finfo(param.dtype).max) ** 0.8
    b1, b2, k1, k2, high, low, keep, up = _constants(
        param.dtype, beta1, beta2, (1 - beta1) * c, (1 - beta2) * c, rate, -rate, 1 - rate * weight_decay, huge
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

    _each_block(kernel, (param, exp_avg), grad, temporaries=2)


# --- Adafactor ------------------------------------------------------------------------------------------------------


def _adafactor_rule(param: Array, grad: Array, row_var: Array, col_var: Array, *rest: Any, **attrs: Any) -> tuple[()]:
    if param.ndim < 2:
        raise ShapeError(
            f"adafactor_step takes matrices, got shape {param.shape}", next="use adafactor_vector_step for vectors"
        )
    _check("adafactor_step", param, grad)
    rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
    if row_var.shape != rows or col_var.shape != columns:
        raise ShapeError(
            f"adafactor_step: for a parameter {param.shape} the states are {rows} and {columns},"
            f" got {row_var.shape} and {col_var.shape}"
        )
    if row_var.dtype is not param.dtype or col_var.dtype is not param.dtype:
        raise DTypeError(f"adafactor_step: {row_var.dtype} and {col_var.dtype} states for a {param.dtype} parameter")
    return ()


def _scaled(grad: np.ndarray, grad_scale: Scalar, dtype: np.dtype) -> np.ndarray:
    """c·g in the parameter's type, in fresh memory."""
    scaled: np.ndarray = np.multiply(grad, dtype.type(float(grad_scale)), dtype=dtype)
    return scaled


def _move(average: np.ndarray, value: np.ndarray, weight: float) -> None:
    """average = (1-w)·average + w·value, which loses nothing where the two differ much and w is 1."""
    average *= average.dtype.type(1 - weight)
    average += value.dtype.type(weight) * value


def _rms(x: np.ndarray) -> float:
    """√mean(x²), added up in float64; 0 for no elements."""
    return math.sqrt(_square_sum(x) / x.size) if x.size else 0.0


def _adafactor_update(
    param: np.ndarray,
    grad: np.ndarray,
    variance: np.ndarray,
    lr: Scalar,
    step: Scalar,
    eps1: float | None,
    eps2: float,
    d: float,
    weight_decay: float,
) -> None:
    """p = (1 - lr·wd)·p - a·u / max(1, rms(u)/d), u = g / √max(v, ε1²), a = max(ε2, rms(p))·min(lr, 1/√t).

    `variance` v is overwritten.
    """
    kind, rate = param.dtype.type, float(lr)
    tiny = float(np.finfo(param.dtype).eps) if eps1 is None else eps1
    alpha = max(eps2, _rms(param)) * min(rate, 1 / math.sqrt(float(step)))
    np.maximum(variance, kind(tiny * tiny), out=variance)
    np.sqrt(variance, out=variance)
    update = np.divide(grad, variance, out=variance)
    update *= kind(alpha / max(1.0, _rms(update) / d))
    if weight_decay:
        param *= kind(1 - rate * weight_decay)
    param -= update


@op("adafactor_step", _adafactor_rule, mutates=(0, 2, 3), flops=_flops(12))
def adafactor_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    row_var: np.ndarray,
    col_var: np.ndarray,
    lr: Scalar,
    step: Scalar,
    grad_scale: Scalar,
    *,
    beta2_decay: float,
    eps1: float | None,
    eps2: float,
    d: float,
    weight_decay: float,
) -> None:
    """Adafactor for matrices (the last two dimensions): the second moment v kept as means of its rows r and columns q.

    r and q move to the means of (c·g)² with weight t^`beta2_decay`; v = r·q / mean(r); then as `_adafactor_update`.
    Shazeer & Stern, "Adafactor" (2018), with means for sums and ε1 where torch.optim.Adafactor has it.

    Args:
        row_var: `[..., rows, 1]`.
        col_var: `[..., 1, columns]`.
        eps1: None means the step of the dtype at 1.
    """
    if param.size == 0 or _is_left_out(grad_scale):
        return
    g = _scaled(grad, grad_scale, param.dtype)
    square = np.square(g)
    _move(row_var, square.mean(axis=-1, keepdims=True, dtype=np.float64), float(step) ** beta2_decay)
    _move(col_var, square.mean(axis=-2, keepdims=True, dtype=np.float64), float(step) ** beta2_decay)
    tiny = float(np.finfo(param.dtype).eps) if eps1 is None else eps1
    mean = np.maximum(row_var.mean(axis=-2, keepdims=True), param.dtype.type(tiny))
    variance = np.multiply(row_var, col_var, out=square)
    variance /= mean
    _adafactor_update(param, g, variance, lr, step, eps1, eps2, d, weight_decay)


@op("adafactor_vector_step", _rule("adafactor_vector_step", 1), mutates=(0, 2), flops=_flops(12))
def adafactor_vector_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    variance: np.ndarray,
    lr: Scalar,
    step: Scalar,
    grad_scale: Scalar,
    *,
    beta2_decay: float,
    eps1: float | None,
    eps2: float,
    d: float,
    weight_decay: float,
) -> None:
    """Adafactor for vectors and numbers: the second moment is kept whole. See `adafactor_step`."""
    if param.size == 0 or _is_left_out(grad_scale):
        return
    g = _scaled(grad, grad_scale, param.dtype)
    _move(variance, np.square(g), float(step) ** beta2_decay)
    _adafactor_update(param, g, np.array(variance), lr, step, eps1, eps2, d, weight_decay)


# --- Muon -----------------------------------------------------------------------------------------------------------


def _orthogonalized(x: np.ndarray, coefficients: tuple[float, float, float], eps: float, iterations: int) -> np.ndarray:
    """`newton_schulz` on one float32 or float64 matrix, in fresh memory."""
    a, b, c = (x.dtype.type(k) for k in coefficients)
    tall = x.shape[0] > x.shape[1]  # the smaller Gram matrix is the cheaper one
    y = np.ascontiguousarray(x.T if tall else x)
    y = y * x.dtype.type(1 / max(math.sqrt(_square_sum(y)), eps))
    for _ in range(iterations):
        gram = np.matmul(y, y.T)
        inner = np.matmul(gram, gram)
        inner *= c
        inner += b * gram
        y = np.matmul(inner, y) + a * y
    result: np.ndarray = y.T if tall else y
    return result


def _matrix_rule(name: str, x: Array) -> None:
    if x.ndim != 2:
        raise ShapeError(f"{name} takes matrices, got shape {x.shape}", next="use AdamW for the other parameters")


def _newton_schulz_infer(x: Array, **attrs: Any) -> Spec:
    _matrix_rule("newton_schulz", x)
    if not x.dtype.is_floating_point:
        raise DTypeError(f"newton_schulz takes float matrices, got {x.dtype}")
    return Spec(x.shape, x.dtype)


def _newton_schulz_flops(x: Array, iterations: int) -> int:
    small, large = sorted(x.shape)
    return iterations * (4 * small * small * large + 2 * small**3)


@op(
    "newton_schulz",
    _newton_schulz_infer,
    flops=lambda inputs, outputs, attrs: _newton_schulz_flops(inputs[0], attrs["iterations"]),
)
def newton_schulz(
    out: np.ndarray, x: np.ndarray, *, coefficients: tuple[float, float, float], eps: float, iterations: int
) -> None:
    """The orthogonal factor of a matrix, roughly: singular values are moved near 1 by y = a·y + (b·yyᵀ + c·(yyᵀ)²)·y.

    y starts as x / max(‖x‖, eps). Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    Computed in float32 or wider, where torch computes in bfloat16.
    """
    out[...] = _orthogonalized(wide(x), coefficients, eps, iterations)


def _muon_rule(param: Array, grad: Array, momentum_buffer: Array, *rest: Any, **attrs: Any) -> tuple[Spec, ...]:
    _matrix_rule("muon_step", param)
    return _check("muon_step", param, grad, momentum_buffer)


@op(
    "muon_step",
    _muon_rule,
    mutates=(0, 2),
    flops=lambda inputs, outputs, attrs: 9 * inputs[0].size + _newton_schulz_flops(inputs[0], attrs["iterations"]),
)
def muon_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    momentum_buffer: np.ndarray,
    lr: Scalar,
    grad_scale: Scalar,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    lr_ratio: float,
    coefficients: tuple[float, float, float],
    eps: float,
    iterations: int,
) -> None:
    """b = μ·b + (1-μ)·c·g; p = (1 - lr·wd)·p - lr·ratio·orthogonalized(b, or (1-μ)·c·g + μ·b with Nesterov).

    See `newton_schulz`; `lr_ratio` makes up for the shape of the matrix.
    """
    if param.size == 0 or _is_left_out(grad_scale):
        return
    kind, rate = param.dtype.type, float(lr)
    step = np.multiply(grad, kind((1 - momentum) * float(grad_scale)), dtype=param.dtype)
    momentum_buffer *= kind(momentum)
    momentum_buffer += step
    direction = momentum_buffer
    if nesterov:
        step += kind(momentum) * momentum_buffer
        direction = step
    update = _orthogonalized(direction, coefficients, eps, iterations)
    if weight_decay:
        param *= kind(1 - rate * weight_decay)
    param -= kind(rate * lr_ratio) * update


# --- Gradient norm, stochastic rounding -----------------------------------------------------------------------------


def _square_sum(x: np.ndarray) -> float:
    """Σ x²: rows in float32 or wider, then the rows in float64. The cuts depend on position alone."""
    flat = np.ascontiguousarray(x).reshape(-1)
    whole = flat.size // NORM_ROW
    matrix, rest = flat[: whole * NORM_ROW].reshape(whole, NORM_ROW), wide(flat[whole * NORM_ROW :])
    sums = np.empty(whole, rest.dtype)

    def some(start: int, stop: int) -> None:
        for a in range(start, stop, BLOCK // NORM_ROW):
            rows = wide(matrix[a : min(a + BLOCK // NORM_ROW, stop)])
            np.vecdot(rows, rows, out=sums[a : a + rows.shape[0]])

    if whole:
        parallel(some, whole, flat.size // 64)  # so light a pass is worth threads only when it is long
    return float(sums.sum(dtype=np.float64)) + float(np.dot(rest, rest))


def _norm_infer(*arrays: Array, ord: float) -> Spec:
    if not ord > 0:
        raise ShapeError(f"total_norm of order {ord}: the order must be positive")
    for x in arrays:
        if not x.dtype.is_floating_point:
            raise DTypeError(f"total_norm takes float tensors, got {x.dtype}")
    return Spec((), float64 if any(x.dtype is float64 for x in arrays) else float32)


@op("total_norm", _norm_infer, flops=lambda inputs, outputs, attrs: 2 * sum(x.size for x in inputs))
def total_norm(out: np.ndarray, *arrays: np.ndarray, ord: float) -> None:
    """(Σ |x|^ord)^(1/ord) over all elements of all arrays, the largest |x| for an infinite order; 0 for no arrays."""
    arrays = tuple(x for x in arrays if x.size)
    if ord == 2:
        out[...] = math.sqrt(sum(_square_sum(x) for x in arrays))
    elif ord == math.inf:
        out[...] = np.max([np.abs(wide(x)).max() for x in arrays], initial=0)
    else:
        sums = [np.power(np.abs(wide(x)), ord).sum(dtype=np.float64) for x in arrays]
        out[...] = np.sum(sums, dtype=np.float64) ** (1 / ord)


def _rounding_infer(x: Array, *, dtype: DType, seed: int, offset: int) -> Spec:
    if x.dtype is not float32 or dtype is not bfloat16:
        raise DTypeError(f"stochastic_round goes from float32 to bfloat16, not from {x.dtype} to {dtype}")
    return Spec(x.shape, dtype)


@op("stochastic_round", _rounding_infer, flops=_flops(12))
def stochastic_round(out: np.ndarray, x: np.ndarray, *, dtype: DType, seed: int, offset: int) -> None:
    """x rounded up or down at random, with odds that make the mean exact.

    Sixteen random bits are added below bfloat16's last one and the lower half is cut off. Element i uses half-word i of
    the generator's counters from `offset` on (eight to a counter). Infinities and NaN stay.
    """
    flat = x.reshape(-1)
    rounded = np.empty(flat.size, np.uint16)

    def some(first: int, last: int) -> None:
        for a in range(first * UNIT, min(last * UNIT, flat.size), BLOCK):
            b = min(a + BLOCK, last * UNIT, flat.size)
            words = philox(seed, offset + a // 8, -(-(b - a) // 8))
            noise = words.astype("<u4", copy=False).view("<u2").reshape(-1)[: b - a]
            bits = np.ascontiguousarray(flat[a:b]).view(np.uint32)
            rounded[a:b] = (bits + noise) >> np.uint32(16)

    parallel(some, -(-flat.size // UNIT), flat.size)
    values = rounded.view(dtype.numpy)
    out[...] = np.where(np.isfinite(flat), values, flat.astype(dtype.numpy)).reshape(x.shape)


def rounding_counters(shape: Shape) -> int:
    """How many counters `stochastic_round` uses for a tensor of `shape`."""
    return -(-math.prod(shape) // 8)
