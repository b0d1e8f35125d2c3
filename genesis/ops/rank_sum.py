"""The sum over the ranks of a group, as `genesis.distributed.group` defines it: how NCCL's group adds what has come."""

from __future__ import annotations

import numpy as np

from genesis.array import Array
from genesis.dtypes import BOOL, float8_e4m3fn, float32
from genesis.errors import DTypeError, ShapeError
from genesis.op import op


def _infer(total: Array, own: Array, others: Array, *, rank: int, adds: bool) -> tuple[()]:
    if own.ndim != 1 or total.shape != own.shape or others.ndim != 2 or others.shape[1:] != own.shape:
        shapes = f"{total.shape}, {own.shape} and {others.shape}"
        raise ShapeError(f"rank_sum takes a total [n], own values [n] and others' [ranks - 1, n], got {shapes}")
    if not (total.is_contiguous and own.is_contiguous and (own.size == 0 or others.strides[1] == 1)):
        raise ShapeError("rank_sum takes values that are contiguous", next="call .contiguous() on them")
    if not 0 <= rank <= others.shape[0]:
        raise ShapeError(f"rank_sum: there is no rank {rank} among {others.shape[0] + 1}")
    if own.dtype.category == BOOL or own.dtype is float8_e4m3fn or others.dtype is not own.dtype:
        raise DTypeError(f"rank_sum takes values of one dtype that can be added, got {own.dtype} and {others.dtype}")
    is_wider = total.dtype is float32 and own.dtype.is_floating_point and own.dtype.itemsize < 4
    if total.dtype is not own.dtype and not is_wider:
        raise DTypeError(f"rank_sum: a sum of {own.dtype} does not go to {total.dtype}")
    return ()


@op("rank_sum", _infer, mutates=(0,), flops=lambda inputs, outputs, attrs: inputs[1].size + inputs[2].size)
def rank_sum(out: tuple[()], total: np.ndarray, own: np.ndarray, others: np.ndarray, *, rank: int, adds: bool) -> None:
    """Set `total` [n] to Σ of all ranks' values: in float32 or wider, in the order of the ranks, rounded once.

    Args:
        total: of the values' dtype, or float32 where that is a narrower float; it may be the memory of `own`.
        own: this rank's values [n].
        others: those of the other ranks in their order, [ranks - 1, n]; the rows are contiguous.
        rank: which of them this is.
        adds: start from what is in `total`.
    """
    is_narrow = own.itemsize == 2 and not np.issubdtype(own.dtype, np.integer)
    work = np.dtype(np.float32) if is_narrow else own.dtype
    rows = [*others[:rank], own, *others[rank:]]
    if adds:
        rows.insert(0, total)
    with np.errstate(over="ignore", invalid="ignore"):
        found = rows[0].astype(work)
        for row in rows[1:]:
            found += row.astype(work, copy=False)
        total[...] = found.astype(total.dtype, copy=False)
