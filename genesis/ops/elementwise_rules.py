"""Shape and dtype rules of elementwise ops: operands broadcast, and results follow torch's rule by category of type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import BOOL, INTEGER, as_dtype, bool_, float32, int64, result_type
from genesis.errors import DTypeError
from genesis.shapes import Shape, broadcast_shapes


def shape_of(inputs: tuple[Any, ...]) -> Shape:
    """The broadcast shape of the tensors among the operands. Raises: DTypeError: there are none."""
    shapes = [x.shape for x in inputs if isinstance(x, Array)]
    if not shapes:
        raise DTypeError("at least one operand must be a tensor", next="wrap a number with genesis.tensor()")
    return broadcast_shapes(*shapes)


def common(*inputs: Any, **attrs: Any) -> Spec:
    """Result in the operands' common type."""
    dtype = result_type(inputs)
    return Spec(shape_of(inputs), dtype)


def floating(*inputs: Any, **attrs: Any) -> Spec:
    """Result in a float type; integers and bools compute in float32."""
    dtype = result_type(inputs)
    return Spec(shape_of(inputs), dtype if dtype.is_floating_point else float32)


def predicate(*inputs: Any, **attrs: Any) -> Spec:
    """Result of bools, for operands of types that meet."""
    result_type(inputs)
    return Spec(shape_of(inputs), bool_)


def restricted(name: str, lowest: int, highest: int, hint: str) -> Callable[..., Spec]:
    """As `common`, for dtypes of certain categories only."""

    def infer(*inputs: Any, **attrs: Any) -> Spec:
        spec = common(*inputs)
        if not lowest <= spec.dtype.category <= highest:
            raise DTypeError(f"{name} does not take {spec.dtype.name} tensors", next=hint)
        return spec

    return infer


def numeric(name: str) -> Callable[..., Spec]:
    """As `common`, for integers and floats."""
    return restricted(name, INTEGER, 2, "use logical ops, or cast with .to(...)")


def integral(name: str) -> Callable[..., Spec]:
    """As `common`, for bools and integers."""
    return restricted(name, BOOL, INTEGER, "cast to an integer type with .to(...)")


def whole_numbers(name: str) -> Callable[..., Spec]:
    """As `common`, for integers alone."""
    return restricted(name, INTEGER, INTEGER, "cast first")


def sub_infer(*inputs: Any) -> Spec:
    """As `numeric`; bools are refused with numbers, too, as torch does."""
    spec = numeric("sub")(*inputs)
    if any(isinstance(x, bool) or (isinstance(x, Array) and x.dtype is bool_) for x in inputs):
        raise DTypeError("sub does not take bools", next="use logical_xor, or cast with .to(...)")
    return spec


def pow_infer(*inputs: Any) -> Spec:
    """As `numeric`; an integer has no negative power."""
    spec = numeric("pow")(*inputs)
    if spec.dtype.category == INTEGER and isinstance(inputs[1], int) and inputs[1] < 0:
        raise DTypeError(f"pow of integers to the negative power {inputs[1]}", next="cast to a float type first")
    return spec


def square_infer(x: Any) -> Spec:
    """Bools count as integers."""
    dtype = result_type((x,))
    return Spec(shape_of((x,)), int64 if dtype is bool_ else dtype)


def lerp_infer(*inputs: Any) -> Spec:
    """All tensors of one float type, as in torch."""
    dtypes = {x.dtype for x in inputs if isinstance(x, Array)}
    if len(dtypes) != 1 or not result_type(inputs[:1]).is_floating_point:
        listed = ", ".join(sorted(d.name for d in dtypes))
        raise DTypeError(f"lerp takes tensors of one float type, got {listed}", next="cast with .to(...)")
    return Spec(shape_of(inputs), dtypes.pop())


def compute_type(*operands: Any) -> np.dtype:
    """The numpy type in which numpy operands meet, by torch's rule (for results of another type, such as bool)."""
    return result_type(Spec(x.shape, as_dtype(x.dtype)) if isinstance(x, np.ndarray) else x for x in operands).numpy
