"""Public functions: their tables, and the conversion of arguments and keywords.

The tables hold the functions of `genesis`, the methods of Tensor and the functions of `genesis.nn.functional`. A
function that only calls an op is generated from the op's record (`pointwise.py`); one that does more is written by
hand, with `@public` for the same facts. Everything else is generated from the tables: modules export them, `Methods`
binds them, and `make stubs` writes their signatures.

A parameter annotated as int, float or bool accepts what torch accepts (0-d integer tensors, numpy scalars) and raises
for anything else. Keywords may have torch's names; an unknown keyword raises an error that suggests the nearest one.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np

from genesis.array import Array
from genesis.autograd.modes import is_grad_enabled
from genesis.autograd.record import TensorBase, apply, apply_
from genesis.backend import Device
from genesis.dtypes import INTEGER, DType, contiguous_format, preserve_format, strided
from genesis.errors import DTypeError, ShapeError, UsageError, unknown_keyword
from genesis.op import registry
from genesis.random import Generator
from genesis.shapes import Shape

Tensor: TypeAlias = Any
Operand: TypeAlias = Any  # a tensor or a number: `Tensor | float` in the stubs
Dims: TypeAlias = int | tuple[int, ...] | list[int] | None
Sizes: TypeAlias = int | Sequence[int]
DTypeLike: TypeAlias = DType | str | type[Any] | np.dtype[Any] | None
DeviceLike: TypeAlias = Device | str | None


def array_of(x: Any, name: str) -> Array:
    """Return the array of a tensor. Raises DTypeError, with the function's name, for anything else."""
    if not isinstance(x, TensorBase):
        raise DTypeError(f"{name} takes a tensor, got {type(x).__name__}", next="wrap it with genesis.tensor()")
    return x.array


def as_operand(value: Any, name: str) -> Any:
    """Return a tensor, or a Python number (also from numpy's). Raises DTypeError with the function's name."""
    if isinstance(value, TensorBase) or type(value) in (float, int, bool):
        return value
    converted = plain(value)
    if converted is not None:
        return converted
    raise DTypeError(
        f"{name} takes tensors and numbers, got {type(value).__name__}", next="wrap it with genesis.tensor()"
    )


def check_operands(name: str, *values: Any) -> tuple[Any, ...]:
    """Return the operands as `as_operand` does. Raises DTypeError also if none of them is a tensor."""
    tensors = 0
    for v in values:
        tensors += isinstance(v, TensorBase)
    if tensors == len(values):  # nothing to convert or to refuse
        return values
    checked = tuple([as_operand(v, name) for v in values])
    if not tensors:
        raise DTypeError(f"{name} needs at least one tensor", next="wrap a number with genesis.tensor()")
    return checked


# --- Numbers ----------------------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    if isinstance(value, TensorBase):
        note = " that requires a gradient" if value.requires_grad else ""
        return f"a tensor of shape {value.array.shape} and type {value.array.dtype.name}{note}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def _wrong(value: Any, function: str, name: str, expected: str) -> DTypeError:
    where = f"{function}: {name} is" if name else f"{function} got"
    return DTypeError(f"{where} {_shown(value)}, expected {expected}")


def integer(value: Any, function: str, name: str = "") -> int:
    """Return an integer: Python's, numpy's, or the value of a 0-d integer tensor (blocks).

    Raises DTypeError for everything else, including bools and floats with integer values.
    """
    if type(value) is int:
        return value
    if isinstance(value, TensorBase):
        if not value.array.shape and value.array.dtype.category == INTEGER:
            return int(value.array.item())
    elif not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise _wrong(value, function, name, "an integer")


def integers(value: Any, function: str, name: str = "") -> int | tuple[int, ...]:
    """Return one integer, or a tuple of them from a sequence. Raises DTypeError as `integer` does."""
    if type(value) is tuple and all(type(v) is int for v in value):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple([integer(v, function, name) for v in value])
    return integer(value, function, name)


def sizes_of(values: tuple[Any, ...], name: str = "") -> Shape:
    """Return integers passed one by one or as a sequence: f(2, 3) or f((2, 3)). Raises DTypeError as `integer` does."""
    if len(values) == 1 and isinstance(values[0], Sequence):
        values = tuple(values[0])
    for value in values:
        if type(value) is not int:
            return tuple([integer(v, name, "a size or dimension") for v in values])
    return values


def number(value: Any, function: str, name: str = "") -> Any:
    """Return a Python number, also from numpy or a 0-d tensor without gradient. Raises DTypeError for anything else."""
    if type(value) in (float, int, bool):
        return value
    if isinstance(value, TensorBase):
        if not value.array.shape and not value.requires_grad:
            return value.array.item()
    else:
        converted = plain(value)
        if converted is not None:
            return converted
    raise _wrong(value, function, name, "a number")


def plain(value: Any) -> Any:
    """Return a number of numpy, or of a subclass of Python's numbers, as Python's own; None for anything else."""
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    for kinds, python in (((bool, np.bool_), bool), ((int, np.integer), int), ((float, np.floating), float)):
        if isinstance(value, kinds):
            return python(value)
    item = value.item() if isinstance(value, np.generic) else None  # ml_dtypes' scalars
    return item if isinstance(item, float) else None


def fitting(value: Any, dtype: DType, function: str) -> None:
    """Raise DTypeError if an integer dtype cannot hold a number; unsigned dtypes accept -1, as in torch."""
    if dtype.category != INTEGER or isinstance(value, TensorBase):
        return
    limits = np.iinfo(dtype.numpy)
    if not min(int(limits.min), -int(limits.max)) <= value <= limits.max:  # also for NaN
        raise DTypeError(
            f"{function}: {value} does not fit into {dtype.name}, which holds {limits.min} to {limits.max}"
        )


def truth(value: Any, function: str, name: str = "") -> bool:
    """Return a bool: Python's, numpy's, 0 or 1. Raises DTypeError for anything else."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise _wrong(value, function, name, "True or False")


def _generator(value: Any, function: str, name: str) -> Any:
    """Raise DTypeError: Generators and None never reach this function."""
    raise _wrong(value, function, name, "a genesis.Generator")


Convert = Callable[[Any, str, str], Any]
_NONE = type(None)
# How a parameter is converted, by its annotation: types that pass unchanged, and the converter of all others.
_READ: dict[str, tuple[tuple[type, ...], Convert]] = {
    "int": ((int,), integer),
    "int | None": ((int, _NONE), integer),
    "int | Sequence[int]": ((int,), integers),
    "int | Sequence[int] | None": ((int, _NONE), integers),
    "Sequence[int]": ((), integers),
    "Dims": ((int, _NONE), integers),
    "float": ((float, int), number),
    "float | None": ((float, int, _NONE), number),
    "bool": ((bool,), truth),
    "bool | None": ((bool, _NONE), truth),
    "Generator | None": ((Generator, _NONE), _generator),
}


# --- Keywords ---------------------------------------------------------------------------------------------------------

# Torch's or numpy's name of a parameter, and the names that a function here may use.
_NAMES: dict[str, tuple[str, ...]] = {
    "input": ("x",),
    "self": ("x",),
    "a": ("x",),
    "x1": ("x",),
    "other": ("y",),
    "x2": ("y",),
    "axis": ("dim", "dims"),
    "dim": ("dims", "axis"),
    "dims": ("dim", "axes"),
    "axes": ("dims", "dim"),
    "keepdims": ("keepdim",),
    "shape": ("size",),
    "train": ("training",),
    "element": ("elements",),
    "test_element": ("test_elements",),
    "input2": ("L", "tau"),
    "input3": ("other",),
}


class _Form:
    """The parameters of a function."""

    def __init__(self, function: FunctionType, more: dict[str, str]) -> None:
        code = function.__code__
        count, keyword_only = code.co_argcount, code.co_kwonlyargcount
        self.function, self.annotations, self.more = function.__name__, function.__annotations__, more
        self.order = code.co_varnames[:count]
        self.names = frozenset(code.co_varnames[: count + keyword_only])
        after = code.co_varnames[count + keyword_only :]
        self.various = after[0] if code.co_flags & 0x04 else None  # the name of *sizes
        self.takes_any = bool(code.co_flags & 0x08)
        reads = {name: _READ.get(str(text).replace("builtins.", "")) for name, text in self.annotations.items()}
        self.readers = {name: read for name, read in reads.items() if read is not None and name in self.names}
        # the positions that are read, in order
        self.places = [(i, *self.readers[name], name) for i, name in enumerate(self.order) if name in self.readers]

    def bind(self, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with keywords renamed to the function's own and converted.

        Raises KeywordError for an unknown keyword, UsageError for two names of one parameter.
        """
        renamed = {}
        for keyword, value in given.items():
            name = keyword if keyword in self.names else self._name(keyword)
            if name != keyword and (name in given or name in self.order[: len(args)]):
                raise UsageError(
                    f"{self.function} got both {name} and {keyword}",
                    next=f"pass one; {keyword} is another name for {name}",
                )
            if name in self.readers:
                types, convert = self.readers[name]
                if type(value) not in types:
                    value = convert(value, self.function, keyword)
            renamed[name] = value
        if self.various is not None and self.various in renamed:  # `size=(2, 3)` of f(x, *size)
            rest = renamed.pop(self.various)
            args = (*args, *[renamed.pop(name) for name in self.order[len(args) :] if name in renamed], rest)
        return args, renamed

    def _name(self, keyword: str) -> str:
        if keyword in self.names or keyword == self.various or self.takes_any:
            return keyword
        for name in (self.more.get(keyword, keyword), *_NAMES.get(keyword, ())):
            if name in self.names or name == self.various:
                return name
        # Suggest torch's names for the operands.
        meant = {"x": "input", "y": "other"} | {name: keyword for keyword, name in self.more.items()}
        names = (*self.order, *((self.various,) if self.various else ()), *sorted(self.names - set(self.order)))
        raise unknown_keyword(self.function, keyword, [meant.get(name, name) for name in names if name != "self"])

    def refuse_others(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raise DTypeError for the first argument that should be a tensor; call after an AttributeError in the body."""
        for name, value in {**dict(zip(self.order, args, strict=False)), **keywords}.items():
            takes = self.annotations.get(name)
            wrong = takes == "Tensor" or (takes == "Tensor | None" and value is not None)
            if wrong and not isinstance(value, TensorBase):
                shown = {"x": "input", "y": "other"}.get(name, name)
                raise DTypeError(
                    f"{self.function}: {shown} is {_shown(value)}, not a tensor", next="make one with genesis.tensor()"
                ) from None


def normalized(function: Any, extras: Sequence[str] = (), /, **more: str) -> Any:
    """Return `function` with its arguments converted; `more` maps further keywords to parameters.

    Args:
        function: function to normalize; the result's `__wrapped__`.
        extras: keywords that are handled here: "out", memory for the result, which is returned; "pin_memory",
            "layout" and "memory_format".
    """
    form = _Form(function, more)
    places = form.places

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        if given:
            if extras and not given.keys().isdisjoint(extras):
                return _finished(called, args, given, **{name: given.pop(name, None) for name in extras})
            args, given = form.bind(args, given)
        for i, types, convert, parameter in places:
            if i >= len(args):
                break
            if type(args[i]) not in types:
                args = (*args[:i], convert(args[i], form.function, parameter), *args[i + 1 :])
        try:
            return function(*args, **given)
        except AttributeError:
            form.refuse_others(args, given)
            raise

    if extras:
        _show_extras(called, extras)
    return called


def bare(function: Any) -> Any:
    """Return the bare form of a normalized function, for operators, which pass neither keywords nor integers."""
    return function.__wrapped__


# --- Derived forms ----------------------------------------------------------------------------------------------------


def store(result: Any, out: Any, name: str) -> Any:
    """Copy a result, or each of several, into the tensors `out`, and return those in the result's place."""
    if not isinstance(result, tuple):
        array_of(out, name)
        return apply(registry["copy"], result, out=out)
    if not isinstance(out, (tuple, list)) or len(out) != len(result):
        raise UsageError(f"{name} has {len(result)} results", next=f"pass out= with {len(result)} tensors")
    stored = [store(r, o, name) for r, o in zip(result, out, strict=True)]
    return type(result)(*stored) if hasattr(result, "_fields") else tuple(stored)


def _finished(
    called: Any,
    args: tuple[Any, ...],
    given: dict[str, Any],
    out: Any = None,
    pin_memory: Any = None,
    layout: Any = None,
    memory_format: Any = None,
) -> Any:
    """Return the result of a call in `out`, in pinned memory, or in a memory format."""
    if layout not in (None, strided):
        raise UsageError(f"{called.__name__}: the layout is {layout!r}", next="leave it out: tensors are strided")
    if out is not None and "pin_memory" in called.extras and "dtype" not in given:
        given["dtype"] = array_of(out, called.__name__).dtype  # functions that create a tensor take out's dtype
    result = called(*args, **given)
    if out is not None:
        return store(result, out, called.__name__)
    if pin_memory:
        return result.detach().pin_memory().requires_grad_(result.requires_grad)
    return result if memory_format is None else formatted(result, memory_format, called.__name__)


def formatted(x: Any, memory_format: Any, name: str) -> Tensor:
    """Return a tensor in a memory format; a new leaf remains a leaf."""
    if memory_format not in (contiguous_format, preserve_format):
        raise UsageError(f"{name}: the memory format is {memory_format!r}", next="use genesis.contiguous_format")
    if memory_format is preserve_format or x.array.is_contiguous:
        return x
    copied = apply(registry["copy"], x.detach() if x.is_leaf else x)
    return copied.requires_grad_(x.requires_grad) if x.is_leaf else copied


def _show_extras(called: Any, extras: Sequence[str]) -> None:
    """Add the further keywords to a function's signature."""
    signature = inspect.signature(called)
    annotation = "Sequence[Tensor] | None" if "And" in str(signature.return_annotation) else "Tensor | None"
    kind, kept = inspect.Parameter, list(signature.parameters.values())
    shown: dict[str, tuple[Any, str]] = {"out": (None, annotation), "pin_memory": (False, "bool")}
    shown |= {"layout": (None, "Layout | None"), "memory_format": (None, "MemoryFormat | None")}
    kept += [kind(name, kind.KEYWORD_ONLY, default=shown[name][0], annotation=shown[name][1]) for name in extras]
    called.__signature__, called.extras = signature.replace(parameters=kept), extras


def renamed(function: Any, name: str) -> Any:
    """Return a public function under another name, which its errors show."""
    written = inspect.unwrap(function)
    copied = FunctionType(written.__code__, written.__globals__, name, written.__defaults__, written.__closure__)
    copied.__kwdefaults__, copied.__annotations__ = written.__kwdefaults__, written.__annotations__
    return normalized(copied, **getattr(function, "keywords", {}))


def derived_in_place(function: Any) -> Any:
    """Return the method `x.f_(…)`, which overwrites x with `f(x, …)`, made of a public function."""
    name = f"{function.__name__}_"
    compute = renamed(function, name)

    @functools.wraps(function)
    def method(*args: Any, **given: Any) -> Any:
        if not args:
            args = (given.pop("input", None),) if "input" in given else (compute(**given),)
        x = args[0]
        array = array_of(x, name)
        tensors = [v for v in (*args, *given.values()) if isinstance(v, TensorBase)]
        is_recorded = is_grad_enabled() and any(v.requires_grad for v in tensors)
        # Autograd may save x for the gradient, so a recorded call computes with a copy.
        result = compute(apply(registry["copy"], x) if is_recorded else x, *args[1:], **given)
        found = array_of(result, name)
        if found.dtype.category > array.dtype.category or (name == "float_power_" and array.dtype is not found.dtype):
            raise DTypeError(f"{name}: a {found.dtype} result does not fit into {array.dtype}", next=f"use {name[:-1]}")
        if found.shape != array.shape:
            raise ShapeError(f"{name}: the result has shape {found.shape}, the tensor has {array.shape}")
        return apply_(registry["overwrite"], x, x, result)

    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name != "out"]
    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Compute `{name[:-1]}` in place."
    method.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return method


# --- Tables -----------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])

functions: dict[str, Any] = {}  # by their name in `genesis`
methods: dict[str, Any] = {}  # by their name in Tensor
functional: dict[str, Any] = {}  # by their name in `genesis.nn.functional`


@overload
def public(written: F, /) -> F: ...


@overload
def public(
    *,
    function: bool = True,
    method: bool = True,
    nn: bool = False,
    out: bool = False,
    pin_memory: bool = False,
    memory_format: bool = False,
    in_place: bool = False,
    also: Iterable[str] = (),
    keywords: dict[str, str] | None = None,
) -> Callable[[F], F]: ...


def public(
    written: Any = None,
    /,
    *,
    function: bool = True,
    method: bool = True,
    nn: bool = False,
    out: bool = False,
    pin_memory: bool = False,
    memory_format: bool = False,
    in_place: bool = False,
    also: Iterable[str] = (),
    keywords: dict[str, str] | None = None,
) -> Any:
    """Decorator: normalize a function's arguments and enter it in the tables of public functions.

    Args:
        written: function to publish.
        function: whether `genesis` exports it; in-place functions (with a trailing underscore) are only methods.
        method: whether it is a method of Tensor.
        nn: whether `genesis.nn.functional` exports it.
        out: whether the function gets a keyword `out`, into which the result is copied.
        pin_memory: whether the function, which creates a tensor, gets the keywords `pin_memory` and `layout`.
        memory_format: whether the function gets a keyword `memory_format`.
        in_place: whether Tensor also has the method with a trailing underscore, which overwrites x with the result.
        also: further names of the function in `genesis`.
        keywords: further keywords, with the parameters that they name.
    """

    def register(definition: Any) -> Any:
        name = definition.__name__
        takes = {"out": out, "pin_memory": pin_memory, "layout": pin_memory}
        takes["memory_format"] = memory_format or name.endswith("_like")
        wrapped = normalized(definition, [keyword for keyword in takes if takes[keyword]], **(keywords or {}))
        wrapped.keywords = keywords or {}
        is_in_place = name[-1] == "_"
        tables = ((functions, function and not is_in_place), (methods, method), (functional, nn and not is_in_place))
        for table, enters in tables:
            if enters:
                assert name not in table, f"{name} is public twice"
                table[name] = wrapped
        functions.update(dict.fromkeys(also, wrapped))
        if in_place:
            methods[f"{name}_"] = derived_in_place(wrapped)
        return wrapped

    return register if written is None else register(written)


layer_function = public(function=False, method=False, nn=True)  # functions of `genesis.nn.functional` only
