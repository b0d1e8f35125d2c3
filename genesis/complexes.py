"""Complex numbers for rotary embeddings: pairs of real numbers with torch's names, gradients and views.

A complex tensor has the operator * and the methods below, on every device. Everything else refuses it.

>>> genesis.view_as_complex(genesis.tensor([[1.0, 2.0]])) * 1j
tensor([-2.0000+1.0000j])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from genesis.autograd.record import TensorBase
from genesis.dtypes import ComplexType, complex64, complex128, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.functions.arrange import broadcast_tensors
from genesis.functions.create import zeros_like
from genesis.functions.elementwise import where
from genesis.functions.shape import stack
from genesis.functions.surface import array_of, methods, public, sizes_of
from genesis.shapes import normalize_axis
from genesis.tensor import Tensor

_TYPES = {float32: complex64, float64: complex128}
_REAL = {kind: real for real, kind in _TYPES.items()}


class ComplexTensor(Tensor):
    """A complex tensor over the memory of real `pairs` [..., 2]."""

    __slots__ = ("pairs",)
    __hash__ = Tensor.__hash__

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    @property
    def array(self) -> Any:  # type: ignore[override]
        """Refuse all functions of real tensors."""
        raise DTypeError("the function takes no complex tensors", next="use its operators, methods or view_as_real()")

    base = node = array
    shape = property(lambda self: self.pairs.shape[:-1])
    ndim = property(lambda self: self.pairs.ndim - 1)
    dtype = property(lambda self: _TYPES[self.pairs.dtype])
    real = property(lambda self: self.pairs[..., 0])
    imag = property(lambda self: self.pairs[..., 1])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[normalize_axis(dim, self.ndim)]

    def numpy(self, *, force: bool = False) -> Any:
        return self.pairs.numpy(force=force).copy().view(self.dtype.numpy)[..., 0]

    def tolist(self) -> Any:
        return self.pairs.detach().cpu().contiguous().numpy().view(self.dtype.numpy)[..., 0].tolist()

    def is_complex(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        return ComplexTensor(self.pairs[(*parts, slice(None)) if any(p is ... for p in parts) else index])

    def __repr__(self) -> str:
        text = np.array2string(
            np.asarray(self.tolist(), self.dtype.numpy), separator=", ", prefix="tensor(",
            formatter={"complexfloat": lambda z: f"{z.real:.4f}{z.imag:+.4f}j"},
        )  # fmt: skip
        return f"tensor({text})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return ComplexTensor(self.pairs.__deepcopy__(memo))

    def to(self, *args: Any, **given: Any) -> Any:
        read = [_REAL.get(a, a) if isinstance(a, ComplexType) else a for a in args]
        given = {k: _REAL.get(v, v) if isinstance(v, ComplexType) else v for k, v in given.items()}
        moved = self.pairs.to(*[a.pairs if isinstance(a, ComplexTensor) else a for a in read], **given)
        if moved.dtype is not self.pairs.dtype and not {complex64, complex128} & {*args, *given.values()}:
            raise DTypeError("a complex tensor has no real type", next="cast its .real or its view_as_real()")
        return ComplexTensor(moved)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.pairs.requires_grad_(requires_grad)
        return self

    def abs(self) -> Any:  # type: ignore[override]
        """Return the magnitudes; the gradient at 0 is 0."""
        return self.pairs.norm(dim=-1)

    def conj(self) -> Any:
        return _joined(self.real, -self.imag)

    def __mul__(self, other: Any) -> Any:
        a, b, other = self.real, self.imag, self._operand(other)
        c, d = other[..., 0], other[..., 1]
        return _joined(a * c - b * d, a * d + b * c)

    def _operand(self, value: Any) -> Any:
        """Return the pairs of another operand: a complex or real tensor, or a number."""
        if isinstance(value, ComplexTensor):
            return value.pairs
        if isinstance(value, TensorBase):
            return stack((value, zeros_like(value)), -1)
        return self.pairs.new_tensor((value.real, value.imag))

    __rmul__, __abs__ = __mul__, abs


def _joined(real: Any, imag: Any) -> Any:
    return ComplexTensor(stack((real, imag), -1))


def _with_pairs(name: str, arguments: Callable[[int, Any], Any]) -> Callable[..., Any]:
    """Return a method that calls the pairs' method with `arguments(ndim, args)`."""

    def method(self: Any, *args: Any, **given: Any) -> Any:
        return ComplexTensor(getattr(self.pairs, name)(*arguments(self.ndim, args), **given))

    return method


def _dims(more: int = 0) -> Callable[[int, Any], Any]:
    return lambda ndim, args: [normalize_axis(d, ndim + more) for d in args]


_METHODS: dict[str, Callable[[int, Any], Any]] = {
    **dict.fromkeys(("reshape", "view", "expand"), lambda ndim, args: (*sizes_of(args), 2)),
    **dict.fromkeys(("squeeze", "transpose"), _dims()),
    "unsqueeze": _dims(1),
    "flatten": lambda ndim, args: [normalize_axis(d, ndim) for d in (*args, *(0, -1)[len(args):])],
    "permute": lambda ndim, args: (*[normalize_axis(d, ndim) for d in sizes_of(args)], ndim),
    **dict.fromkeys(("clone", "contiguous", "detach", "cpu", "cuda"), lambda ndim, args: args),
}  # fmt: skip
for _name, _arguments in _METHODS.items():
    setattr(ComplexTensor, _name, _with_pairs(_name, _arguments))
for _name in ("device", "requires_grad", "is_leaf"):
    setattr(ComplexTensor, _name, property(attrgetter(f"pairs.{_name}")))


@public(method=False)
def view_as_complex(x: Tensor) -> Tensor:
    """Return the complex view of real pairs [..., 2]. Raises ShapeError unless each pair is contiguous."""
    array = array_of(x, "view_as_complex")
    if array.dtype not in _TYPES:
        raise DTypeError(f"view_as_complex of {array.dtype.name}", next="cast to float32 or float64")
    steps = array.strides
    if array.shape[-1:] != (2,) or (
        array.size and (steps[-1] != 1 or array.offset % 2 or any(s % 2 for s in steps[:-1]))
    ):
        raise ShapeError(f"view_as_complex of shape {array.shape} and strides {steps}", next="pass x.contiguous()")
    return ComplexTensor(x)


@public(method=False)
def view_as_real(x: Tensor) -> Tensor:
    """Return the pairs [..., 2] of a complex tensor, over the same memory."""
    return _complex(x, "view_as_real").pairs  # type: ignore[no-any-return]


@public(method=False)
def real(x: Tensor) -> Tensor:
    """Return the real parts, a view; a real tensor itself."""
    return x.real


@public(method=False)
def imag(x: Tensor) -> Tensor:
    """Return the imaginary parts of a complex tensor, a view."""
    return _complex(x, "imag").imag  # type: ignore[no-any-return]


@public
def conj(x: Tensor) -> Tensor:
    """Return the conjugate; a real tensor itself."""
    return x.conj() if isinstance(x, ComplexTensor) else x


@public(out=True, in_place=True)
def conj_physical(x: Tensor) -> Tensor:
    """Return `conj(x)`, computed at once; a real tensor itself."""
    return conj(x)


@public
def is_conj(x: Tensor) -> bool:
    """Return False: conjugates are always computed."""
    return False


@public
def is_neg(x: Tensor) -> bool:
    """Return False: negatives are always computed."""
    return False


@public
def resolve_conj(x: Tensor) -> Tensor:
    """Return x: conjugates are always computed."""
    return x


@public
def resolve_neg(x: Tensor) -> Tensor:
    """Return x: negatives are always computed."""
    return x


@public(out=True)
def angle(x: Tensor) -> Tensor:
    """Return the angles of complex numbers, from -π to π; π for negative real numbers, and 0 for others."""
    if isinstance(x, ComplexTensor):
        return x.imag.atan2(x.real)  # type: ignore[no-any-return]
    return where(x != x, x, (x < 0).to(x.dtype) * math.pi)  # type: ignore[no-any-return]


def _caster(name: str, kind: ComplexType) -> Any:
    def method(x: Tensor, memory_format: Any = None) -> Tensor:
        if isinstance(x, ComplexTensor):
            return x.to(kind)  # type: ignore[no-any-return]
        real = x.to(_REAL[kind])
        return complex(real, zeros_like(real))

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Convert to {kind.name}."
    return public(function=False)(method)


cfloat, cdouble = _caster("cfloat", complex64), _caster("cdouble", complex128)


@public(method=False)
def complex(real: Tensor, imag: Tensor) -> Tensor:
    """Return a complex tensor of real and imaginary parts, which have the same type, float32 or float64."""
    if array_of(real, "complex").dtype is not array_of(imag, "complex").dtype or real.dtype not in _TYPES:
        raise DTypeError(f"complex of {real.dtype.name} and {imag.dtype.name}", next="cast both to float32")
    return _joined(*broadcast_tensors(real, imag))  # type: ignore[no-any-return]


@public(method=False)
def polar(abs: Tensor, angle: Tensor) -> Tensor:
    """Return abs·(cos(angle) + i·sin(angle)), of tensors of the same type, float32 or float64."""
    parts: Any = complex(abs, angle)  # checks the types
    return complex(parts.real * parts.imag.cos(), parts.real * parts.imag.sin())


for _name in (
    "angle",
    "cdouble",
    "cfloat",
    "conj",
    "conj_physical",
    "conj_physical_",
    "is_conj",
    "is_neg",
    "resolve_conj",
    "resolve_neg",
):
    setattr(Tensor, _name, methods[_name])


def _complex(x: Any, name: str) -> Any:
    if not isinstance(x, ComplexTensor):
        raise DTypeError(f"{name} takes a complex tensor", next="make one with view_as_complex() or polar()")
    return x
