"""Random tensors, with torch's names and semantics; the values are Genesis's own (see `genesis.ops.random`).

Every function draws from `generator` and advances it; the default is the generator that `genesis.manual_seed` seeds.
"""

from __future__ import annotations

from typing import Any

from genesis.autograd.modes import is_grad_enabled
from genesis.autograd.record import TensorBase, apply, apply_
from genesis.backend import Device, as_device
from genesis.dtypes import BOOL, DType, as_dtype, bool_, default_dtype, finfo, float64, iinfo, int64, uint8
from genesis.errors import UsageError
from genesis.functions import pointwise as pw
from genesis.functions.create import full_like, kind_and_place
from genesis.functions.elementwise import add, copy_, to_dtype
from genesis.functions.shape import expand
from genesis.functions.surface import (
    DeviceLike,
    DTypeLike,
    Operand,
    Sizes,
    Tensor,
    array_of,
    integer,
    number,
    public,
    sizes_of,
)
from genesis.op import Op
from genesis.ops import elementwise
from genesis.ops import random as ops
from genesis.random import Generator, default_generator
from genesis.shapes import Shape, broadcast_shapes, numel

Draw = tuple[tuple[Any, ...], dict[str, Any]]  # the last inputs and the attributes of an op


def _reserve(generator: Generator | None, words: int, device: Device) -> Draw:
    """Return the position (see `Generator.positioned_by`) if there is one, and seed and offset of the next `words`
    32-bit words.
    """
    chosen = default_generator if generator is None else generator
    seed, offset, position = chosen.reserve_relative(words, device)
    return () if position is None else (position,), {"seed": seed, "offset": offset}


def _draw(op: Op, generator: Generator | None, shape: Shape, dtype: DType, device: Device, **attrs: Any) -> Draw:
    """Return the operands of an op that draws a tensor; invalid ones raise before the generator advances."""
    attrs |= {"shape": shape, "dtype": dtype}
    op.infer(seed=0, offset=0, **attrs)
    words = 2 * numel(shape) if op is ops.randint else ops.words_for(dtype, shape)
    position, start = _reserve(generator, words, device)
    return position, attrs | start


def _create(
    op: Op, shape: Shape, generator: Generator | None, dtype: Any, device: Any, requires_grad: bool, **attrs: Any
) -> Any:
    kind = default_dtype() if dtype is None else as_dtype(dtype)
    place = as_device(device)
    position, attrs = _draw(op, generator, shape, kind, place, **attrs)
    drawn = apply(op, *position, **attrs, device=place)
    return drawn.requires_grad_() if requires_grad else drawn


def _overwrite(op: Op, x: Any, generator: Generator | None, **attrs: Any) -> Any:
    array = array_of(x, op.name + "_")
    position, attrs = _draw(op, generator, array.shape, array.dtype, array.device, **attrs)
    if is_grad_enabled() and x.requires_grad:  # copy_ records that x's old value has no gradient
        return copy_(x, apply(op, *position, **attrs, device=array.device))
    return apply_(op, x, *position, **attrs)


def _drawn(name: str, what: str, op: Op, **attrs: Any) -> tuple[Any, Any]:
    """Return the functions that draw a tensor of a given shape, and of the shape of another tensor."""

    def new(
        *size: Sizes,
        generator: Generator | None = None,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
    ) -> Tensor:
        return _create(op, sizes_of(size, name), generator, dtype, device, requires_grad, **attrs)

    def like(
        x: Tensor,
        *,
        generator: Generator | None = None,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
    ) -> Tensor:
        kind, place = kind_and_place(x, name + "_like", dtype, device)
        return _create(op, x.array.shape, generator, kind, place, requires_grad, **attrs)

    new.__name__, new.__doc__ = name, f"Return {what}, of shape `size`."
    like.__name__, like.__doc__ = f"{name}_like", f"Compute `{name}` with x's shape, dtype and device by default."
    return public(method=False, out=True, pin_memory=True)(new), public(method=False, pin_memory=True)(like)


rand, rand_like = _drawn("rand", "uniform values in [0, 1)", ops.uniform, low=0.0, high=1.0)
randn, randn_like = _drawn("randn", "standard normal values", ops.normal, mean=0.0, std=1.0)


@public(method=False, out=True, pin_memory=True)
def normal(
    mean: Tensor | float = 0.0,
    std: Tensor | float = 1.0,
    size: Sizes | None = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Draw normal values: of shape `size`, or one for each element of `mean` and `std` if one of these is a tensor."""
    given = [v for v in (mean, std) if isinstance(v, TensorBase)]
    if given:
        shape = broadcast_shapes(*(v.array.shape for v in given))
        kind, place = kind_and_place(given[0], "normal", dtype, device)
        drawn = randn(shape, generator=generator, dtype=kind, device=place)
        return add(pw.mul(drawn, std), mean)
    if size is None:
        raise UsageError("normal: mean and std are numbers", next="pass size, or a tensor of means")
    mean, std = number(mean, "normal", "mean"), number(std, "normal", "std")
    return _create(ops.normal, sizes_of((size,), "normal"), generator, dtype, device, requires_grad, mean=mean, std=std)


@public(method=False, out=True, pin_memory=True)
def randint(
    low: Any,
    high: Any = None,
    size: Sizes | None = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return integers in [low, high), of shape `size`; `randint(high, size)` starts at 0."""
    if size is None:
        low, high, size = 0, low, high
    if high is None or size is None:
        raise UsageError("randint needs an upper bound and a size", next="call randint(low, high, size)")
    low, high = integer(low, "randint", "low"), integer(high, "randint", "high")
    kind = int64 if dtype is None else as_dtype(dtype)
    drawn = uint8 if kind is bool_ else kind
    made = _create(
        ops.randint, sizes_of((size,), "randint"), generator, drawn, device, requires_grad, low=low, high=high
    )
    return made if drawn is kind else to_dtype(made, kind)


@public(method=False, out=True, pin_memory=True)
def randperm(
    n: int,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return 0 … n-1 in random order, as int64 unless `dtype` is given."""
    attrs: dict[str, Any] = {"n": n, "dtype": int64 if dtype is None else as_dtype(dtype)}
    ops.randperm.infer(seed=0, offset=0, **attrs)
    place = as_device(device)
    position, start = _reserve(generator, 2 * n, place)
    drawn = apply(ops.randperm, *position, **start, **attrs, device=place)
    return drawn.requires_grad_() if requires_grad else drawn


@public(method=False, pin_memory=True)
def randint_like(
    x: Tensor,
    low: int,
    high: int | None = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Compute `randint` with x's shape, dtype and device by default."""
    kind, place = kind_and_place(x, "randint_like", dtype, device)
    low, high = (0, low) if high is None else (low, high)
    return randint(low, high, x.array.shape, generator=generator, dtype=kind, device=place, requires_grad=requires_grad)


# --- In place ---------------------------------------------------------------------------------------------------------

_ENDS = {"from": "low", "from_": "low", "to": "high"}


def _largest(dtype: DType) -> int:
    """Return the largest default value of `random_`: the largest integer, or for floats 2^(mantissa bits + 1)."""
    if dtype.is_floating_point:
        return int(2 / finfo(dtype).eps)
    return 1 if dtype.category == BOOL else iinfo(dtype).max


@public(keywords=_ENDS)
def uniform_(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with uniform values in [low, high)."""
    return _overwrite(ops.uniform, x, generator, low=low, high=high)


@public
def normal_(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with normal values."""
    return _overwrite(ops.normal, x, generator, mean=mean, std=std)


@public(keywords=_ENDS)
def random_(x: Tensor, low: int = 0, high: int | None = None, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with integers in [low, high); `random_(high)` starts at 0.

    The default range ends at the largest integer of x's dtype; for floats, it is the range in which the dtype
    represents every integer.
    """
    if high is None:
        low, high = (0, low) if low else (0, _largest(array_of(x, "random_").dtype) + 1)
    return _overwrite(ops.randint, x, generator, low=low, high=high)


@public
def bernoulli_(x: Tensor, p: Operand = 0.5, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with 1 with probability `p` (a number, or a tensor that broadcasts to x), else 0."""
    array = array_of(x, "bernoulli_")
    if not isinstance(p, TensorBase):
        p = apply(elementwise.fill, value=number(p, "bernoulli_", "p"), shape=(), dtype=float64, device=array.device)
    return copy_(x, bernoulli(expand(p, array.shape), generator=generator))


# --- Sampling with given probabilities --------------------------------------------------------------------------------


@public(out=True)
def bernoulli(x: Tensor, p: float | None = None, *, generator: Generator | None = None) -> Tensor:
    """Return 1 with the probabilities in x, or with probability `p` for each element, else 0."""
    array = array_of(x, "bernoulli")
    if p is not None:
        x = full_like(x, p)
    ops.bernoulli.infer(array, seed=0, offset=0)
    position, start = _reserve(generator, array.size, array.device)
    return apply(ops.bernoulli, x, *position, **start)


@public(out=True)
def multinomial(
    x: Tensor, num_samples: int, replacement: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Return `num_samples` categories for each row of weights x, `[n]` or `[rows, n]`, as int64.

    Raises:
        NumericError: for weights that are negative, infinite or NaN, and for too few weights above 0.
    """
    array = array_of(x, "multinomial")
    attrs: dict[str, Any] = {"num_samples": num_samples, "replacement": replacement}
    ops.multinomial.infer(array, seed=0, offset=0, **attrs)
    by_position = replacement or num_samples == 1
    words = 2 * num_samples * numel(array.shape[:-1]) if by_position else array.size
    position, start = _reserve(generator, words, array.device)
    return apply(ops.multinomial, x, *position, **attrs, **start)


@public(method=False, nn=True, keywords={"train": "training"})
def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Return x with elements set to 0 with probability `p` and the others divided by 1 - p; x itself if not training.

    No mask is saved: backward draws the same values again.
    """
    array = array_of(x, "dropout")
    if not training or p == 0:
        return x
    ops.dropout.infer(array, p=p, seed=0, offset=0)
    position, start = _reserve(generator, array.size, array.device)
    y = apply(ops.dropout, x, *position, p=p, **start)
    return copy_(x, y) if inplace else y
