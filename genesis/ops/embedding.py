"""Embedding look-up and its gradient: rows summed by sorted segments, in a fixed order."""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import INTEGER
from genesis.errors import DTypeError, IndexRangeError, ShapeError
from genesis.op import Context, op
from genesis.ops.elementwise import copy
from genesis.ops.segment import add_rows, sum_rows


def _infer(ids: Array, weight: Array) -> Spec:
    if ids.dtype.category != INTEGER:
        raise DTypeError(f"embedding takes integer ids, got {ids.dtype}")
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight must be [rows, width], got {weight.shape}")
    return Spec((*ids.shape, weight.shape[1]), weight.dtype)


def _vjp(ctx: Context, g: Array) -> tuple[Array | None, ...]:
    """An accumulated gradient (that of a head with the same weight) gets only the rows of ids that occur."""
    accumulated = ctx.take_accumulated(1)
    if accumulated is not None:
        total = accumulated.array if accumulated.is_own else copy(accumulated.array)
        embedding_add_(total, g, ctx.inputs[0])
        return None, total
    spec = ctx.input_specs[1]
    assert spec is not None
    return None, embedding_backward(g, ctx.inputs[0], rows=spec.shape[0], out=ctx.gradient_slot(1))


@op(
    "embedding",
    _infer,
    vjp=_vjp,
    saves=(0,),
    flops=lambda i, o, a: 0,
    nbytes=lambda i, o, a: i[0].nbytes + 2 * o[0].nbytes,  # of the weight the rows that are asked for
    torch="torch.nn.functional.embedding",
)
def embedding(out: np.ndarray, ids: np.ndarray, weight: np.ndarray) -> None:
    """y[...] = weight[ids[...]].

    Args:
        ids: integers of any shape, 0 to rows - 1.
        weight: `[rows, width]`.
    """
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= weight.shape[0]):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise IndexRangeError(
            f"embedding: id {bad} is not between 0 and {weight.shape[0] - 1}",
            next="check that the tokenizer belongs to this model",
        )
    np.take(weight, ids, axis=0, out=out, mode="clip")


def _backward_infer(g: Array, ids: Array, rows: int) -> Spec:
    if g.shape[:-1] != ids.shape:
        raise ShapeError(f"embedding_backward: the gradient has shape {g.shape}, the ids have {ids.shape}")
    return Spec((rows, g.shape[-1]), g.dtype)


@op(
    "embedding_backward",
    _backward_infer,
    flops=lambda i, o, a: i[0].size,
)
def embedding_backward(out: np.ndarray, g: np.ndarray, ids: np.ndarray, rows: int) -> None:
    """dweight[r] = Σ of g over the places where ids = r, in order of position; accumulated in float32 or wider."""
    out.fill(0)
    if ids.size == 0 or g.shape[-1] == 0:
        return
    found, sums = sum_rows(ids.reshape(-1).astype(np.int64, copy=False), g.reshape(-1, g.shape[-1]))
    out[found] = sums


def _add_infer(total: Array, g: Array, ids: Array) -> tuple[Spec, ...]:
    if total.ndim != 2 or g.shape != (*ids.shape, total.shape[1]):
        raise ShapeError(
            f"embedding_add_ adds a gradient {g.shape} of ids {ids.shape} to [rows, width], got {total.shape}"
        )
    if total.dtype is not g.dtype:
        raise DTypeError(f"embedding_add_: the gradient is {g.dtype}, what it is added to {total.dtype}")
    return ()


@op(
    "embedding_add_",
    _add_infer,
    mutates=(0,),
    flops=lambda i, o, a: i[1].size,
    nbytes=lambda i, o, a: 3 * i[1].nbytes + i[2].nbytes,  # of the total the rows that something is added to
)
def embedding_add_(out: tuple[()], total: np.ndarray, g: np.ndarray, ids: np.ndarray) -> None:
    """total[r] += Σ of g over the places where ids = r, in order of position; other rows are not touched.

    Sums accumulate in float32 or wider and are rounded once.
    """
    if g.size:
        add_rows(total, (ids.reshape(-1).astype(np.int64, copy=False),), g.reshape(-1, g.shape[-1]))
