"""Checks that shape rules of several families share."""

from __future__ import annotations

from genesis.array import Array
from genesis.errors import ShapeError
from genesis.op import Spec

__all__ = ["gradient_like"]


def gradient_like(name: str, g: Array, *outputs: Array, like: Array | None = None) -> tuple[Spec, ...]:
    """The specs of gradients of `outputs`, after checking the incoming gradient.

    Args:
        g: the gradient of the forward op's result.
        outputs: the inputs that get gradients, of their shape and dtype.
        like: what `g` must have the shape of; the first of `outputs` unless given.

    Raises:
        ShapeError: naming op and shapes.
    """
    expected = outputs[0] if like is None else like
    if g.shape != expected.shape:
        raise ShapeError(f"{name}: the gradient has shape {g.shape}, the result has {expected.shape}")
    return tuple(Spec(x.shape, x.dtype) for x in outputs)
