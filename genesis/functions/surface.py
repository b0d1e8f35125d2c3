"""What users call, and how it reads what they hand over: Python's integers, numbers and flags, keywords by all names.

The tables hold the functions of `genesis`, the methods of Tensor and the functions of `genesis.nn.functional`. A
function that is made of an op alone comes from the op's record (`pointwise.py`). One that adds something is written,
and `@public` at its definition says the same facts. Everything else is generated from the tables: modules export them,
`Methods` binds them, and `make stubs` writes their signatures.

A parameter that is annotated as int, float or bool takes what torch takes for it (an integer tensor without dimensions,
numpy's scalars), and refuses the rest. Keywords may have torch's names; one that a function has under no name is
refused, with the nearest that it has.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np

from genesis.array import Array
from genesis.autograd.record import TensorBase
from genesis.backend import Device
from genesis.dtypes import INTEGER, DType
from genesis.errors import DTypeError, UsageError, unknown_keyword
from genesis.random import Generator
from genesis.shapes import Shape

Tensor: TypeAlias = Any
Operand: TypeAlias = Any  # a tensor or a number: `Tensor | float` in the stubs
Dims: TypeAlias = int | tuple[int, ...] | list[int] | None
Sizes: TypeAlias = int | Sequence[int]
DTypeLike: TypeAlias = DType | str | type[Any] | np.dtype[Any] | None
DeviceLike: TypeAlias = Device | str | None


def array_of(x: Any, name: str) -> Array:
    """The array of a tensor argument. Raises: DTypeError, for anything else, naming the function."""
    if not isinstance(x, TensorBase):
        raise DTypeError(f"{name} takes a tensor, got {type(x).__name__}", next="wrap it with genesis.tensor()")
    return x.array


def as_operand(value: Any, name: str) -> Any:
    """A tensor, or a Python number (numpy's become one). Raises: DTypeError, for anything else, naming the function."""
    if isinstance(value, TensorBase) or type(value) in (float, int, bool):
        return value
    found = plain(value)
    if found is not None:
        return found
    raise DTypeError(
        f"{name} takes tensors and numbers, got {type(value).__name__}", next="wrap it with genesis.tensor()"
    )


def check_operands(name: str, *values: Any) -> tuple[Any, ...]:
    """All operands checked, at least one of them a tensor."""
    tensors = 0
    for v in values:
        tensors += isinstance(v, TensorBase)
    if tensors == len(values):  # nothing to convert, nothing to refuse
        return values
    checked = tuple([as_operand(v, name) for v in values])
    if not tensors:
        raise DTypeError(f"{name} needs at least one tensor", next="wrap a number with genesis.tensor()")
    return checked


# --- Numbers ----------------------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    """A wrong value, formatted for its error."""
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
    """An integer: Python's, numpy's, or a tensor of integers without dimensions, which is read.

    Raises: DTypeError, for everything else, bools and whole floats too.
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
    """One integer, or a sequence of them as a tuple. Raises: DTypeError, as `integer`."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple([integer(v, function, name) for v in value])
    return integer(value, function, name)


def sizes_of(values: tuple[Any, ...], name: str = "") -> Shape:
    """Integers given one by one or as one sequence: f(2, 3) or f((2, 3)). Raises: DTypeError, as `integer`."""
    if len(values) == 1 and isinstance(values[0], Sequence):
        values = tuple(values[0])
    for value in values:
        if type(value) is not int:
            return tuple([integer(v, name, "a size or dimension") for v in values])
    return values


def number(value: Any, function: str, name: str = "") -> Any:
    """A Python number: of numpy, or of a tensor of one number that requires no gradient. Raises: DTypeError, else."""
    if type(value) in (float, int, bool):
        return value
    if isinstance(value, TensorBase):
        if not value.array.shape and not value.requires_grad:
            return value.array.item()
    else:
        found = plain(value)
        if found is not None:
            return found
    raise _wrong(value, function, name, "a number")


def plain(value: Any) -> Any:
    """A number of numpy, or of a subclass of Python's numbers, as Python's own; None for everything else."""
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    for kinds, python in (((bool, np.bool_), bool), ((int, np.integer), int), ((float, np.floating), float)):
        if isinstance(value, kinds):
            return python(value)
    item = value.item() if isinstance(value, np.generic) else None  # ml_dtypes
    return item if isinstance(item, float) else None


def fitting(value: Any, dtype: DType, function: str) -> None:
    """Raise DTypeError where an integer type cannot hold a number; an unsigned one holds -1, as in torch."""
    if dtype.category != INTEGER or isinstance(value, TensorBase):
        return
    limits = np.iinfo(dtype.numpy)
    if not min(int(limits.min), -int(limits.max)) <= value <= limits.max:  # also for NaN
        raise DTypeError(
            f"{function}: {value} does not fit into {dtype.name}, which holds {limits.min} to {limits.max}"
        )


def truth(value: Any, function: str, name: str = "") -> bool:
    """A bool: Python's or numpy's, or 0 or 1. Raises: DTypeError, for everything else."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise _wrong(value, function, name, "True or False")


def _generator(value: Any, function: str, name: str) -> Any:
    """Refuses what is neither a Generator nor None: those pass unread."""
    raise _wrong(value, function, name, "a genesis.Generator")


Convert = Callable[[Any, str, str], Any]
_NONE = type(None)
# How a parameter is read, by its annotation: the types that pass as they are, and what reads the others.
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
    "Generator | None": ((Generator, _NONE), _generator),
}


# --- Keywords ---------------------------------------------------------------------------------------------------------

# What torch, or numpy, calls a parameter, and what it may be called here.
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

    def understood(self, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments under the names that they have here, keywords read.

        Raises: KeywordError, for one that the function has under no name; UsageError, for two names of one parameter.
        """
        found = {}
        for keyword, value in given.items():
            name = self._name(keyword)
            if name != keyword and (name in given or name in self.order[: len(args)]):
                raise UsageError(
                    f"{self.function} got both {name} and {keyword}",
                    next=f"{keyword} is another name for {name}: give one",
                )
            if name in self.readers:
                types, convert = self.readers[name]
                if type(value) not in types:
                    value = convert(value, self.function, keyword)
            found[name] = value
        if self.various is not None and self.various in found:  # `size=(2, 3)` of f(x, *size)
            rest = found.pop(self.various)
            args = (*args, *[found.pop(name) for name in self.order[len(args) :] if name in found], rest)
        return args, found

    def _name(self, keyword: str) -> str:
        if keyword in self.names or keyword == self.various or self.takes_any:
            return keyword
        for name in (self.more.get(keyword, keyword), *_NAMES.get(keyword, ())):
            if name in self.names or name == self.various:
                return name
        # What it may have meant is shown under torch's names for the operands.
        meant = {"x": "input", "y": "other"} | {name: keyword for keyword, name in self.more.items()}
        names = (*self.order, *((self.various,) if self.various else ()), *sorted(self.names - set(self.order)))
        raise unknown_keyword(self.function, keyword, [meant.get(name, name) for name in names if name != "self"])

    def refuse_others(self, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Raise DTypeError for the first parameter annotated as a tensor that got none: a body missed an attribute."""
        for name, value in {**dict(zip(self.order, args, strict=False)), **given}.items():
            takes = self.annotations.get(name)
            wrong = takes == "Tensor" or (takes == "Tensor | None" and value is not None)
            if wrong and not isinstance(value, TensorBase):
                shown = {"x": "input", "y": "other"}.get(name, name)
                raise DTypeError(
                    f"{self.function}: {shown} is {_shown(value)}, not a tensor", next="make one with genesis.tensor()"
                ) from None


def normalized(function: Any, **more: str) -> Any:
    """`function` with its arguments read, and `more` keywords by what they mean; `__wrapped__` is the plain one."""
    form = _Form(function, more)
    places = form.places

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        if given:
            args, given = form.understood(args, given)
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

    return called


def bare(function: Any) -> Any:
    """The plain form of a normalized function: for operators, which have neither keywords nor integers to read."""
    return function.__wrapped__


# --- Tables -----------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])

functions: dict[str, Any] = {}  # by name in `genesis`
methods: dict[str, Any] = {}  # by name in Tensor
functional: dict[str, Any] = {}  # by name in `genesis.nn.functional`


@overload
def public(made: F, /) -> F: ...


@overload
def public(
    *,
    function: bool = True,
    method: bool = True,
    nn: bool = False,
    also: Iterable[str] = (),
    keywords: dict[str, str] | None = None,
) -> Callable[[F], F]: ...


def public(
    made: Any = None,
    /,
    *,
    function: bool = True,
    method: bool = True,
    nn: bool = False,
    also: Iterable[str] = (),
    keywords: dict[str, str] | None = None,
) -> Any:
    """Decorator: a public function, with its arguments normalized, entered in the tables.

    Args:
        function, method, nn: whether it is one of `genesis`, of Tensor, of `genesis.nn.functional`. A name with a
            trailing underscore works in place, and is a method alone.
        also: further names of the function in `genesis`.
        keywords: further keywords with the parameters they mean.
    """

    def register(written: Any) -> Any:
        name, found = written.__name__, normalized(written, **(keywords or {}))
        found.keywords = keywords or {}
        is_in_place = name[-1] == "_"
        tables = ((functions, function and not is_in_place), (methods, method), (functional, nn and not is_in_place))
        for table, takes in tables:
            if takes:
                assert name not in table, f"{name} is public twice"
                table[name] = found
        functions.update(dict.fromkeys(also, found))
        return found

    return register if made is None else register(made)


layer_function = public(function=False, method=False, nn=True)  # a function of `genesis.nn.functional` alone
