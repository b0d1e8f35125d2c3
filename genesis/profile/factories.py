"""Arguments of ops made from a shape: one factory for each kind of op, as `cases.py` lists them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, empty
from genesis.backend import CPU, Device, backend_for
from genesis.custom import UserOp
from genesis.dtypes import DType, as_dtype, bool_, float32, float64, int64
from genesis.errors import UsageError, UserCode
from genesis.op import Op
from genesis.shapes import Shape, normalize_axes, reduced_shape

Axes = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Request:
    """What a factory is given.

    Attributes:
        shape: what the kind's `shape` says it means.
        axes: one dimension, several, or None for all.
        dtype, device: of the floats (or integers) that are made.
        rng: gives all values of a case in order, the same for equal cases.
    """

    op: Op
    shape: Shape
    axes: Axes
    dtype: DType
    device: Device
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0), repr=False)


class Arguments(NamedTuple):
    """The arguments of an op."""

    inputs: tuple[Any, ...]
    attrs: dict[str, Any]


# --- Values -----------------------------------------------------------------------------------------------------------

VALUES = 1 << 16  # different ones; a larger array repeats them, which costs less than to make more


def _values(request: Request, shape: Shape, dtype: DType, low: float = -1.0, high: float = 1.0) -> Array:
    """Uniform floats in [low, high), integers from 1 to 7, or bools."""
    array = empty(shape, dtype, request.device)  # first, because it refuses what has no room
    rng, count = request.rng, min(array.size, VALUES)
    if dtype.is_floating_point:
        some = rng.uniform(low, high, count).astype(dtype.numpy)
    else:
        some = rng.integers(0, 2, count).astype(np.bool_) if dtype is bool_ else rng.integers(1, 8, count)
    backend_for(request.device).from_numpy(np.resize(some, shape), array)
    return array


def _placed(request: Request, values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, request.device)
    backend_for(request.device).from_numpy(values, array)
    return array


def _random(request: Request, *shape: int) -> Array:
    """Values around 0 in the requested dtype."""
    return _values(request, shape, request.dtype)


# --- Factories --------------------------------------------------------------------------------------------------------


def elementwise(request: Request) -> Arguments:
    """Values from 0.5 to 2, which logarithms, roots and quotients take."""

    def operand() -> Array:
        return _values(request, request.shape, request.dtype, 0.5, 2.0)

    match request.op.name:
        case "where":
            return Arguments((_values(request, request.shape, bool_), operand(), operand()), {})
        case "clamp":
            return Arguments((operand(), 0.75, 1.5), {})
        case "cast":
            return Arguments((operand(),), {"dtype": float64 if request.dtype is float32 else float32})
        case _:
            return Arguments(tuple(operand() for _ in range(request.op.operands)), {})


def of_user(user: UserOp, request: Request) -> Arguments:
    """What a user's op says (its `sample`), or as many arrays of the shape as it takes; its attributes' defaults."""
    if user.sample is None:
        made = [_values(request, request.shape, request.dtype, 0.5, 2.0) for _ in user.inputs]
        return Arguments(tuple(made), dict(user.attrs))
    with UserCode(f"the sample of {user.name}"):
        arrays = [np.asarray(x) for x in user.sample(request.shape, request.dtype)]
    if len(arrays) != len(user.inputs):
        raise UsageError(f"the sample of {user.name} gave {len(arrays)} arrays for {len(user.inputs)} inputs")
    return Arguments(tuple(_placed(request, x, as_dtype(x.dtype)) for x in arrays), dict(user.attrs))


def fill(request: Request) -> Arguments:
    """No inputs: shape, dtype and device are attributes."""
    attrs = {"value": 1, "shape": request.shape, "dtype": request.dtype}
    return Arguments((), {**attrs, **({} if request.device == CPU else {"device": request.device})})


def transposed(request: Request) -> Arguments:
    """A matrix `[n, m]` that is stored as `[m, n]`."""
    rows, columns = request.shape
    x = _random(request, columns, rows)
    return Arguments((x.view((rows, columns), (1, rows)),), {})


def reduction(request: Request) -> Arguments:
    """Values around 0; the axes may be several, or all."""
    extra: dict[str, dict[str, Any]] = {"var": {"correction": 1}, "std": {"correction": 1}, "norm": {"p": 2.0}}
    attrs = {"axes": request.axes, **extra.get(request.op.name, {})}
    return Arguments((_random(request, *request.shape),), attrs)


def sum_to_shape(request: Request) -> Arguments:
    """Values around 0; the axes are summed and keep size 1."""
    axes = normalize_axes(request.axes, len(request.shape))
    return Arguments((_random(request, *request.shape),), {"shape": reduced_shape(request.shape, axes, keepdim=True)})


def along_axis(request: Request) -> Arguments:
    """One axis, called as the op calls it; argmax and argmin also take all.

    Raises:
        UsageError: several were asked for, or all of an op that takes one.
    """
    name = "dim" if request.op.family == "softmax" else "axis"
    if isinstance(request.axes, tuple) or (request.axes is None and request.op.name not in ("argmax", "argmin")):
        raise UsageError(f"{request.op.name} takes one axis", where="--axis", next="give one number, such as -1")
    extra = {"k": min(8, *request.shape)} if request.op.name == "topk" else {}
    return Arguments((_random(request, *request.shape),), {name: request.axes, **extra})


def _product_sizes(shape: Shape) -> tuple[int, int, int]:
    return (*shape * 3,)[:3] if len(shape) == 1 else (shape[0], shape[1], shape[2])


def matmul(request: Request) -> Arguments:
    """`[M, K]` and `[K, N]`."""
    rows, inner, columns = _product_sizes(request.shape)
    return Arguments((_random(request, rows, inner), _random(request, inner, columns)), {})


def linear(request: Request) -> Arguments:
    """x `[M, K]` and a weight `[N, K]`, no bias."""
    rows, inner, columns = _product_sizes(request.shape)
    return Arguments((_random(request, rows, inner), _random(request, columns, inner)), {})


def norm(request: Request) -> Arguments:
    """Rows, and the weight (and bias) of their width; rows alone where they are quantised."""
    width = request.shape[-1]
    if request.op.name == "quantize_rows":
        return Arguments((_random(request, *request.shape),), {})
    parameters = [_random(request, width) for _ in range(2 if request.op.name == "layer_norm" else 1)]
    return Arguments((_random(request, *request.shape), *parameters), {"eps": 1e-6})


def attention(request: Request) -> Arguments:
    """Causal, as many key heads as query heads."""
    b, t, heads, size = request.shape
    attrs = {"scale": 1 / math.sqrt(size)}
    if request.op.name == "attention_packed":
        return Arguments((_random(request, b, t, 3 * heads, size),), {"heads": heads, "key_heads": heads, **attrs})
    return Arguments(tuple(_random(request, b, t, heads, size) for _ in range(3)), attrs)


def swiglu(request: Request) -> Arguments:
    """Gate and up, side by side where the op takes them so."""
    *lead, width = request.shape
    if request.op.name.endswith("_packed"):
        return Arguments((_random(request, *lead, 2 * width),), {})
    return Arguments((_random(request, *lead, width), _random(request, *lead, width)), {})


def rope(request: Request) -> Arguments:
    """`[B, T, heads, size]`, with tables of the usual angles."""
    b, t, heads, size = request.shape
    angles = np.outer(np.arange(t), 10000.0 ** (-np.arange(size // 2) / max(size // 2, 1)))
    tables = [_placed(request, f(angles), request.dtype) for f in (np.cos, np.sin)]
    return Arguments((_random(request, b, t, heads, size), *tables), {})


def embedding(request: Request) -> Arguments:
    """Each row of the table once, in random order: so the table's size is what is read, as the op's cost counts it."""
    rows, width = request.shape
    ids = request.rng.permutation(rows)
    return Arguments((_placed(request, ids, int64), _random(request, rows, width)), {})


def _labels(request: Request, rows: int, classes: int) -> Array:
    return _placed(request, request.rng.integers(0, classes, rows), int64)


def cross_entropy(request: Request) -> Arguments:
    """Logits and random labels."""
    rows, classes = request.shape
    attrs = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
    return Arguments((_random(request, rows, classes), _labels(request, rows, classes)), attrs)


def linear_cross_entropy(request: Request) -> Arguments:
    """Hidden states, the head's weight, as small as a model's is, and random labels; gradients come with the loss."""
    rows, width, classes = request.shape
    weight = _values(request, (classes, width), request.dtype, -(width**-0.5), width**-0.5)
    inputs = _random(request, rows, width), weight, _labels(request, rows, classes)
    return Arguments(inputs, {"ignore_index": -100, "with_grads": True, "mean": True})
