"""Further forms of the functions, by rule from lists: aliases, in-place methods, methods that change a tensor's shape.

Imported last, after every other module of functions has entered its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from genesis.autograd.modes import is_grad_enabled
from genesis.dtypes import INTEGER, MemoryFormat
from genesis.errors import GradientError
from genesis.functions import (  # noqa: F401  importing them fills the tables
    arrange,
    create,
    draw,
    elementwise,
    exchange,
    index,
    linalg,
    maths,
    pointwise,
    printing,
    products,
    random,
    reduce,
    segments,
    settings,
    shape,
    statistics,
)
from genesis.functions.surface import (
    Tensor,
    array_of,
    bare,
    derived_in_place,
    functions,
    methods,
    public,
    renamed,
    store,
)

# Torch's further names, which have the functions' methods and in-place methods too.
ALIASES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift",
    "clip": "clamp", "concatenate": "cat", "divide": "div", "fix": "trunc", "ger": "outer", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "moveaxis": "movedim", "multiply": "mul",
    "negative": "neg", "not_equal": "ne", "subtract": "sub", "swapdims": "transpose", "true_divide": "div",
    "sgn": "sign", "unsafe_split": "split",
}  # fmt: skip

# Functions whose in-place method overwrites x with their result.
IN_PLACE = (
    "addmm", "addmv", "baddbmm", "bitwise_not", "clamp_max", "clamp_min", "cumsum", "eq", "ge", "gt", "le",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "ne", "relu", "tril", "triu",
)  # fmt: skip

# Views whose in-place method changes the tensor itself into the view.
IN_PLACE_VIEWS = ("as_strided", "squeeze", "swapaxes", "t", "transpose", "unsqueeze")

# In-place methods that torch also has as functions.
IN_PLACE_FUNCTIONS = (
    "abs", "acos", "acosh", "addmv", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh",
    "asin", "asinh", "atan", "atanh", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "cos", "cosh", "deg2rad",
    "erf", "erfc", "exp", "exp2", "expm1", "fill", "fix", "floor", "frac", "gcd", "index_put", "lcm", "ldexp", "log",
    "log10", "log1p", "log2", "logit", "nan_to_num", "neg", "negative", "rad2deg", "reciprocal", "relu", "resize_as",
    "round", "rsqrt", "sgn", "sigmoid", "sin", "sinc", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "xlogy",
    "zero",
)  # fmt: skip


# Views that also have a function with the suffix _copy.
COPIES = (
    "as_strided", "diagonal", "expand", "permute", "select", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unfold", "unsqueeze", "view",
)  # fmt: skip


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that copies the views that `function` returns."""

    name = f"{function.__name__}_copy"
    view = renamed(function, name)

    @functools.wraps(function)
    def copied(*args: Any, **given: Any) -> Any:
        views = view(*args, **given)
        return tuple(v.clone() for v in views) if isinstance(views, (tuple, list)) else views.clone()

    copied.__name__, copied.__qualname__, copied.__doc__ = name, name, f"Return a copy of `{name[:-5]}`."
    del copied.__wrapped__
    copied.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return public(method=False, out=True)(copied)


def turn_into(x: Any, view: Any, name: str) -> Any:
    """Change tensor x itself into a view of it, with the view's history; return x."""
    recorded = x.requires_grad and is_grad_enabled()
    if recorded and x.is_leaf:
        raise GradientError(f"{name}: a leaf that requires a gradient cannot be changed in place", next="use the view")
    x.array = view.array
    if recorded:
        x.node, x.output = view.node, view.output
        x.history += 1
        if x.base is not None:
            x._view_history = x.base.history
    return x


def _as_view(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `x.f_(…)`, which turns x into the view `f(x, …)`."""
    method = derived_in_place(function)
    name = method.__name__

    def changed(x: Any, *args: Any, **given: Any) -> Any:
        return turn_into(x, function(x, *args, **given), name)

    changed.__name__, changed.__qualname__ = name, name
    changed.__doc__ = f"Change x itself into the view `{name[:-1]}`."
    changed.__signature__ = method.__signature__  # type: ignore[attr-defined]
    changed.__wrapped__ = function  # type: ignore[attr-defined]
    return changed


_relu_of_floats = bare(functions.pop("relu"))
del methods["relu"]


@public
def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return max(x, 0)."""
    if array_of(x, "relu").dtype.category == INTEGER:
        x = elementwise.clamp(x, min=0)
        return x if out is None else store(x, out, "relu")
    return _relu_of_floats(x, out=out)


@public(method=False, out=True)
def alias_copy(x: Tensor) -> Tensor:
    """Return a copy of x."""
    return x.clone()


@public
def resize_as_(x: Tensor, the_template: Tensor, *, memory_format: MemoryFormat | None = None) -> Tensor:
    """Change x's shape to another tensor's; see `Tensor.resize_`."""
    return x.resize_(array_of(the_template, "resize_as_").shape)


@public(method=False)
def constant_pad_nd(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Compute `nn.functional.pad` with a constant."""
    return shape.pad(x, pad, value=value)


for _name in IN_PLACE:
    methods[f"{_name}_"] = derived_in_place(functions[_name])
for _name in IN_PLACE_VIEWS:
    methods[f"{_name}_"] = _as_view(methods[_name])
methods["swapdims_"] = methods["transpose_"]
for _name, _target in ALIASES.items():
    if _target in functions:
        functions.setdefault(_name, functions[_target])
    for _end in ("", "_"):
        if _target + _end in methods:
            methods.setdefault(_name + _end, methods[_target + _end])
functions["t"] = methods["t"]
for _name in COPIES:
    _copied(methods[_name])
for _name in IN_PLACE_FUNCTIONS:
    functions[f"{_name}_"] = methods[f"{_name}_"]
