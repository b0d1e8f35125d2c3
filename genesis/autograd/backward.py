"""backward() and grad(): start a backward pass at tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from genesis.array import Array, empty
from genesis.autograd.autocast import autocasting, resumed, settings
from genesis.autograd.engine import run_backward, units
from genesis.autograd.graph import Edge
from genesis.autograd.modes import no_grad
from genesis.autograd.record import TensorBase
from genesis.errors import GradientError, ShapeError
from genesis.op import registry


def _seed(tensor: TensorBase, gradient: TensorBase | None) -> tuple[Edge, Array]:
    """The edge of an output with the gradient that enters there."""
    edge = tensor.edge()
    array = tensor.array
    if edge is None:
        raise GradientError(
            "backward() of a tensor that requires no gradient", next="set requires_grad on a leaf it uses"
        )
    if gradient is None:
        if array.size != 1:
            raise GradientError(
                f"backward() without a gradient needs a tensor of one element, this one has shape {array.shape}",
                next="reduce it with .sum() or .mean(), or pass gradient=",
            )
        ones = empty(array.shape, array.dtype, array.device)
        registry["fill"](out=ones, value=1, shape=array.shape, dtype=array.dtype)
        units.add(ones)
        return edge, ones
    if gradient.array.shape != array.shape:
        raise ShapeError(f"the gradient has shape {gradient.array.shape}, the tensor has {array.shape}")
    given = gradient.array
    return edge, given if given.dtype is array.dtype else registry["cast"](given, dtype=array.dtype)


def _listed(what: str, given: Any, optional: bool = False) -> list[Any]:
    """One tensor or several as a list, with Nones if these are `optional`."""
    if isinstance(given, TensorBase):
        return [given]
    found = list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        if not (isinstance(each, TensorBase) or (optional and each is None)):
            raise GradientError(f"{what} is a value of type {type(each).__name__}", next="give tensors")
    return found


def _roots(tensors: TensorBase | Sequence[TensorBase], gradients: Any, create_graph: bool) -> list[tuple[Edge, Array]]:
    if create_graph:
        raise GradientError("create_graph is not supported: gradients are not themselves differentiable")
    outputs = _listed("an output", tensors)
    given = [None] if gradients is None else _listed("a gradient", gradients, optional=True)
    if len(given) == 1 and given[0] is None:
        given *= len(outputs)
    if len(given) != len(outputs):
        raise GradientError(f"{len(outputs)} tensors with {len(given)} gradients")
    return [_seed(t, g) for t, g in zip(outputs, given, strict=True)]


def _without_autocast() -> AbstractContextManager[None]:
    """Around a backward pass: hooks and custom functions compute in the types that they are given."""
    return resumed(settings()._replace(low={})) if autocasting.low else nullcontext()


def backward(
    tensors: TensorBase | Sequence[TensorBase],
    gradient: TensorBase | Sequence[TensorBase | None] | None = None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> None:
    """Accumulate the gradient of `tensors` into `.grad` of the leaves they depend on.

    Args:
        tensors: one tensor or several.
        gradient: the gradient of the final value with respect to each; may be left out for one-element tensors.
        retain_graph: keep the recorded graph for another call.
        create_graph: not supported.

    Raises:
        GradientError: for a tensor that requires no gradient, a second pass over a released graph, create_graph.
    """
    roots = _roots(tensors, gradient, create_graph)
    with no_grad(), _without_autocast():
        run_backward(roots, retain_graph=retain_graph)


def grad(
    outputs: TensorBase | Sequence[TensorBase],
    inputs: TensorBase | Sequence[TensorBase],
    grad_outputs: TensorBase | Sequence[TensorBase | None] | None = None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Any, ...]:
    """The gradients of `outputs` with respect to `inputs`, without touching any `.grad`.

    Raises:
        GradientError: if an input requires no gradient, or is unused and `allow_unused` is not set.
    """
    wanted = _listed("an input", inputs)
    edges = [t.edge() for t in wanted]
    present = [e for e in edges if e is not None]
    if len(present) != len(edges):
        raise GradientError("grad() of an input that requires no gradient", next="set requires_grad_() on it first")
    roots = _roots(outputs, grad_outputs, create_graph)
    unique = list(dict.fromkeys(present))
    with no_grad(), _without_autocast():
        found = dict(zip(unique, run_backward(roots, retain_graph=retain_graph, capture=unique), strict=True))
    result = tuple(found[e] for e in present)
    if not allow_unused and any(g is None for g in result):
        raise GradientError("an input of grad() is not used by the outputs", next="pass allow_unused=True")
    return tuple(None if g is None else TensorBase.wrap(g) for g in result)
