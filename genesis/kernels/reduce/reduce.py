"""The reductions and the state that each accumulates. `reduction.py` has their kernels, and `scan.py` running sums.

Reference: `genesis/ops/reduce.py`, under the same names.

Sums accumulate in float32 (float64 for float64), and integers in int64. Each result is rounded once, at the store.
The functions of states get tiles [BK, BR] or [BR, BK] of elements, see `reduction.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import DType, float32, float64, int32, int64
from genesis.kernels import maths
from genesis.kernels.elements import collapse, converted, needs_int64, offsets, work_type
from genesis.kernels.formulas import tile_function
from genesis.kernels.maths import maximum, minimum
from genesis.kernels.pointwise.elementwise import copy, elementwise, positions
from genesis.kernels.reduce.plan import column_tiles, reduction_layout, row_tiles
from genesis.kernels.reduce.reduction import ReduceSpec, column_min_max, load_type, reduce_into, row_min_max
from genesis.kernels.reduce.scan import scan_into
from genesis.shapes import Shape, normalize_axes, normalize_axis, numel

Axes = int | tuple[int, ...] | None


# --- States of one tile -----------------------------------------------------------------------------------------------


@triton.jit
def take_nonzero(x, TYPE: tl.constexpr, argument):
    return (x != 0).to(TYPE)


@triton.jit
def take_size(x, TYPE: tl.constexpr, argument):
    return tl.abs(x)


@triton.jit
def take_square(x, TYPE: tl.constexpr, argument):
    x = converted(x, TYPE)
    return x * x


@triton.jit
def take_power(x, TYPE: tl.constexpr, argument):
    x = tl.abs(converted(x, TYPE))
    return maths.power(x, tl.full(x.shape, argument, x.dtype))


@triton.jit
def finish_mean(state, argument):
    return maths.divide(state[0], tl.full(state[0].shape, argument, state[0].dtype))


@triton.jit
def finish_root(state, argument):
    return maths.root(state[0])


@triton.jit
def finish_p_root(state, argument):
    order = tl.full(state[0].shape, argument, state[0].dtype)
    return maths.power(state[0], maths.divide(order * 0 + 1, order))


ADD, MULTIPLY = ReduceSpec(tile_function("add"), 0), ReduceSpec(tile_function("mul"), 1)
NONZERO = ADD._replace(take=take_nonzero)


def in_type(spec: ReduceSpec, work: DType) -> ReduceSpec:
    """Return `spec` for states of the type `work`. For integers an infinite identity becomes the type's limit."""
    if work.is_floating_point or not math.isinf(spec.identity):
        return spec
    bits = 8 * work.itemsize - 1
    return spec._replace(identity=-(1 << bits) if spec.identity < 0 else (1 << bits) - 1)


# --- Value and index --------------------------------------------------------------------------------------------------


@triton.jit
def init_argmax(z, r):
    return (z, z.to(r.dtype) * 0 + r)


@triton.jit
def step_argmax(state, x, r, chunk, argument):
    """Replace the state where x is larger or the first NaN. Indices rise, so an equal x does not replace it."""
    best, at = state  # [BK, BR] or [BR, BK] each
    wins = ((x <= best) == 0) & (best == best)
    return (tl.where(wins, x, best), tl.where(wins, r, at))


@triton.jit
def step_argmin(state, x, r, chunk, argument):
    best, at = state
    wins = ((x >= best) == 0) & (best == best)
    return (tl.where(wins, x, best), tl.where(wins, r, at))


@triton.jit
def merge_argmax(x, i, y, j):
    ties = (y == x) | ((y != y) & (x != x))
    wins = (y > x) | ((y != y) & (x == x)) | (ties & (j < i))
    return tl.where(wins, y, x), tl.where(wins, j, i)


@triton.jit
def merge_argmin(x, i, y, j):
    ties = (y == x) | ((y != y) & (x != x))
    wins = (y < x) | ((y != y) & (x == x)) | (ties & (j < i))
    return tl.where(wins, y, x), tl.where(wins, j, i)


ARGMAX = ReduceSpec(merge_argmax, -math.inf, init=init_argmax, step=step_argmax, states=2)
ARGMIN = ReduceSpec(merge_argmin, math.inf, init=init_argmax, step=step_argmin, states=2)


# --- Variance and logsumexp -------------------------------------------------------------------------------------------


@triton.jit
def init_welford(z, r):
    return (z, z, z)


@triton.jit
def step_welford(state, x, r, chunk, argument):
    """Update count, mean and sum of squared deviations, after `chunk` elements so far (Welford, 1962)."""
    n, mean, m2 = state  # [BK, BR] or [BR, BK] each
    x = converted(x, n.dtype)
    d = x - mean
    mean += d * maths.divide(tl.full((1, 1), 1, n.dtype), tl.full((1, 1), 1, n.dtype) + chunk)
    return (n + 1, mean, m2 + d * (x - mean))


@triton.jit
def merge_welford(n, mean, m2, n2, mean2, m2_2):
    """Merge two states (Chan, Golub and LeVeque, 1979)."""
    total = n + n2
    share = tl.where(total > 0, n2 / tl.where(total > 0, total, 1), 0)
    d = mean2 - mean
    return total, mean + d * share, m2 + m2_2 + d * d * n * share


@triton.jit
def finish_var(state, argument):
    return maths.divide(state[2], tl.full(state[2].shape, argument, state[2].dtype))


@triton.jit
def finish_std(state, argument):
    return maths.root(finish_var(state, argument))


@triton.jit
def init_logsumexp(z, r):
    return (z, tl.zeros_like(z))


@triton.jit
def step_logsumexp(state, x, r, chunk, argument):
    """Update the maximum and the sum of e^(x - maximum), with one exponential per element and none for the first."""
    top, total = state  # [BK, BR] or [BR, BK] each
    x = converted(x, top.dtype)
    if chunk == 0:
        top, total = x, tl.full(x.shape, 1, x.dtype)
    else:
        d = tl.where(x == top, tl.zeros_like(x), x - top)  # 0 also if both are infinite
        e = maths.exp(-tl.abs(d))
        top, total = tl.where(d > 0, x, top), tl.where(d > 0, total * e + 1, total + e)
    return (top, total)


@triton.jit
def merge_logsumexp(top, total, top2, total2):
    d = tl.where(top == top2, tl.zeros_like(top), top2 - top)
    e = maths.exp(-tl.abs(d))
    return tl.where(d > 0, top2, top), tl.where(d > 0, total * e + total2, total + total2 * e)


@triton.jit
def reduce_logsumexp(state, AXIS: tl.constexpr):
    """Return the state reduced along AXIS, with one exponential per element."""
    top, total = state
    best = tl.max(top, AXIS)
    wide = tl.expand_dims(best, AXIS)
    d = tl.where(top == wide, tl.zeros_like(top), top - wide)
    return best, tl.sum(maths.rounded_product(total, maths.exp(d)), AXIS)


@triton.jit
def finish_logsumexp(state, argument):
    return maths.log(state[1]) + state[0]


WELFORD = ReduceSpec(merge_welford, 0, finish=finish_var, init=init_welford, step=step_welford, states=3)
LOGSUMEXP = ReduceSpec(
    merge_logsumexp, -math.inf, finish=finish_logsumexp, init=init_logsumexp, step=step_logsumexp, states=2,
    reduce_axis=reduce_logsumexp,
)  # fmt: skip


# --- The CUDA implementations -----------------------------------------------------------------------------------------


def reduce_axes(spec: ReduceSpec, out: Array, x: Array, axes: Axes, work: DType, argument: float = 0.0) -> None:
    """Reduce the dimensions `axes` of `x` with a state of type `work`."""
    layout = reduction_layout(x.shape, x.strides, normalize_axes(axes, x.ndim))
    reduce_into(spec, out, x, layout, work, argument=argument)


def _sum_type(dtype: DType) -> DType:
    return work_type(dtype) if dtype.is_floating_point else int64


@cuda_impl("sum_to_shape")
def sum_to_shape(out: Array, x: Array, shape: Shape) -> None:
    pad = x.ndim - len(shape)
    axes = (*range(pad), *(i + pad for i, s in enumerate(shape) if s == 1 and x.shape[i + pad] != 1))
    reduce_axes(ADD, out, x, axes, _sum_type(x.dtype))


def _no_argument(n: int) -> float:
    return 0.0


def _degrees_of_freedom(n: int, correction: float) -> float:
    """Return n - correction, at least 0, or NaN without elements."""
    return max(n - correction, 0) if n else math.nan


# For each op: the reduction, the type of its state given the input's, and the argument of its `step` and `finish` given
# the number of elements and the op's attributes.
REDUCTIONS: dict[str, tuple[ReduceSpec, Callable[[DType], DType], Callable[..., float]]] = {
    "sum": (ADD, _sum_type, _no_argument),
    "mean": (ADD._replace(finish=finish_mean), work_type, float),
    "count_nonzero": (NONZERO, lambda dtype: int64, _no_argument),
    "prod": (MULTIPLY, _sum_type, _no_argument),
    "var": (WELFORD, work_type, _degrees_of_freedom),
    # The squares of float32's and bfloat16's values can exceed float32's range, as in `norm`.
    "std": (WELFORD._replace(finish=finish_std), lambda dtype: float64, _degrees_of_freedom),
    "amax": (ReduceSpec(maximum, -math.inf), load_type, _no_argument),
    "amin": (ReduceSpec(minimum, math.inf), load_type, _no_argument),
    "any": (ReduceSpec(tile_function("bitwise_or"), 0, take_nonzero), lambda dtype: int32, _no_argument),
    "all": (ReduceSpec(tile_function("bitwise_and"), 1, take_nonzero), lambda dtype: int32, _no_argument),
    "logsumexp": (LOGSUMEXP, lambda dtype: work_type(dtype) if dtype.is_floating_point else float32, _no_argument),
}


def _reduce(name: str, out: Array, x: Array, axes: Axes = None, keepdim: bool = False, **attrs: float) -> None:
    """Compute the reduction `name` over `axes`, in one pass."""
    spec, type_of, argument = REDUCTIONS[name]
    work, count = type_of(x.dtype), numel([x.shape[i] for i in normalize_axes(axes, x.ndim)])
    reduce_axes(in_type(spec, work), out, x, axes, work, argument(count, **attrs))


for _name in REDUCTIONS:
    cuda_impl(_name)(functools.partial(_reduce, _name))


def _arg_min_max(
    largest: bool, out: Array | tuple[Array, Array], x: Array, axis: int | None = None, keepdim: bool = False
) -> None:
    """Store the index of the largest or smallest element, and with two outputs also its value, as the first one. The
    first of equal elements wins, and NaN beats all others.
    """
    values, indices = out if isinstance(out, tuple) else (None, out)
    work, merge = load_type(x.dtype), maximum if largest else minimum
    spec = in_type(ARGMAX if largest else ARGMIN, work)
    layout = reduction_layout(x.shape, x.strides, normalize_axes(axis, x.ndim), ordered=True)
    if (cut := row_tiles(layout, x.dtype.itemsize)) is not None:
        row_min_max(merge, spec.identity, values, indices, x, layout, cut)
    elif (cut := column_tiles(layout, x.dtype.itemsize)) is not None:
        column_min_max(spec, merge, values, indices, x, layout, cut)
    else:
        reduce_into(spec, values, x, layout, work, indices=indices)


cuda_impl("argmax", "max_with_indices")(functools.partial(_arg_min_max, True))
cuda_impl("argmin", "min_with_indices")(functools.partial(_arg_min_max, False))


@cuda_impl("norm")
def norm(out: Array, x: Array, axes: Axes = None, keepdim: bool = False, *, p: float) -> None:
    """Compute (Σ |x|^p)^(1/p) over `axes`. Powers can exceed float32's range, so they are added in float64."""
    work = work_type(x.dtype)
    if math.isinf(p):
        spec = ReduceSpec(maximum if p > 0 else minimum, -p, take_size)
    elif p in (0, 1):
        spec = ADD._replace(take=take_nonzero if p == 0 else take_size)
    else:
        work = float64
        take, finish = (take_square, finish_root) if p == 2 else (take_power, finish_p_root)
        spec = ADD._replace(take=take, finish=finish)
    reduce_axes(spec, out, x, axes, work, p)


# --- Running sums and products ----------------------------------------------------------------------------------------


@cuda_impl("cumsum")
def cumsum(out: Array, x: Array, axis: int, reverse: bool = False) -> None:
    axes = normalize_axes(axis, x.ndim)
    work = float64 if out.dtype.is_floating_point else int64
    scan_into(ADD, out, x, axes, work, reverse=reverse)


@triton.jit
def product(left, right, g):
    return left * right * g


@cuda_impl("prod_backward")
def prod_backward(out: Array, g: Array, x: Array, axes: Axes = None) -> None:
    reduced, work = normalize_axes(axes, x.ndim), _sum_type(x.dtype)
    left, right = empty(x.shape, work, x.device), empty(x.shape, work, x.device)
    scan_into(MULTIPLY, left, x, reduced, work, exclusive=True)
    scan_into(MULTIPLY, right, x, reduced, work, exclusive=True, reverse=True)
    elementwise(product, out, left, right, g, work=work)


# --- Scatter along an axis --------------------------------------------------------------------------------------------


@triton.jit
def put_along_axis_kernel(p_o, p_v, p_i, n, size, stride, sizes, so, sv, si, INT64: tl.constexpr, BLOCK: tl.constexpr):
    i, m = positions(n, BLOCK, INT64)  # [BLOCK] each
    at = tl.load(p_i + offsets(i, sizes, si), mask=m, other=0)  # [BLOCK]
    at = tl.where(at < 0, at + size, at)  # [BLOCK]
    v = tl.load(p_v + offsets(i, sizes, sv), mask=m)  # [BLOCK]
    tl.store(p_o + offsets(i, sizes, so) + at * stride, v, mask=m & (at >= 0) & (at < size))


@cuda_impl("put_along_axis")
def put_along_axis(out: Array, values: Array, indices: Array, axis: int, size: int) -> None:
    """Store zeros, and `values` at `indices` along `axis`. Indices out of range are ignored."""
    if values.ndim == 0:
        copy(out, values)
        return
    clear(out)
    axis = normalize_axis(axis, values.ndim)
    stride = out.strides[axis]
    steps = (*out.strides[:axis], 0, *out.strides[axis + 1 :])
    sizes, so, sv, si = collapse(values.shape, steps, values.strides, indices.strides)
    launch(
        put_along_axis_kernel, triton.cdiv(values.size, 512), out, values, indices, values.size, size, stride, sizes,
        so, sv, si, INT64=needs_int64(sizes, so, sv, si) or out.size > 1 << 31, BLOCK=512,
    )  # fmt: skip
