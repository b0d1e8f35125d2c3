"""Gradients of linear layers, and arrays that are next to each other in memory: what the vjps of linear ops share.

In the formulas below g is the gradient of the result. Gradients of weights go where they stay, and are added there to
what came before, in one product for weights that lie next to each other in memory, as in a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from genesis.array import Array
from genesis.op import Context
from genesis.ops.elementwise import add
from genesis.ops.fp8 import is_wide_enough, quantized_matmul
from genesis.ops.linalg import add_matmul, matmul, matmul_add, matmul_sum, transposed
from genesis.ops.random import dropout
from genesis.ops.reduce import sum_to_shape
from genesis.shapes import contiguous_strides

__all__ = ["LowRankTerm", "bias_gradients", "columns", "input_gradient", "joined", "slices", "weight_gradients"]


# --- Arrays next to each other ----------------------------------------------------------------------------------------


def joined(arrays: Sequence[Array]) -> Array | None:
    """One window `[Σ n, ...]` over arrays `[n, ...]` that lie one behind the other in memory, or None."""
    first = arrays[0]
    end, rows = first.offset, 0
    for a in arrays:
        if a.storage is not first.storage or a.offset != end or a.shape[1:] != first.shape[1:]:
            return None
        if a.dtype is not first.dtype or not a.is_contiguous:
            return None
        end += a.size
        rows += a.shape[0]
    shape = (rows, *first.shape[1:])
    return first.view(shape, contiguous_strides(shape))


def slices(whole: Array, sizes: Sequence[int]) -> list[Array]:
    """Windows of `sizes` rows each, one behind the other."""
    found, start, step = [], whole.offset, whole.strides[0]
    for size in sizes:
        found.append(whole.view((size, *whole.shape[1:]), whole.strides, start))
        start += size * step if whole.size else 0  # no elements: no offset beyond the memory
    return found


def columns(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Windows of `sizes` entries each along the last dimension."""
    found, start, step = [], x.offset, x.strides[-1]
    for size in sizes:
        found.append(x.view((*x.shape[:-1], size), x.strides, start))
        start += size * step if x.size else 0
    return found


# --- Gradients of a product x·Wᵀ + b ----------------------------------------------------------------------------------


class LowRankTerm(NamedTuple):
    """What low-rank pairs add to an input's gradient: dropout(v·A); see low_rank.py.

    Attributes:
        v: `[..., Σ ranks]`.
        a: A of each pair `[rank, in]`.
        noise: attributes of `dropout`, None where there is none.
        position: its input behind x, if it has one.
    """

    v: Array
    a: list[Array]
    ranks: list[int]
    noise: dict[str, Any] | None
    position: tuple[Any, ...]

    @property
    def products(self) -> list[tuple[Array, Array]]:
        """Parts of v and A, the fewest."""
        whole = joined(self.a)
        return [(self.v, whole)] if whole is not None else list(zip(columns(self.v, self.ranks), self.a, strict=True))


def input_gradient(
    ctx: Context | None, i: int, g: Array, weights: Sequence[Array], fp8: int = 0, low: LowRankTerm | None = None
) -> Array:
    """g·W with the weights stacked, plus what input `i` of a context has accumulated, if there is one.

    Args:
        fp8: as for `linear`, of the weights' width.
        low: what low-rank pairs add, in the weights' type.
    """
    accumulated = None if ctx is None else ctx.take_accumulated(i)
    total, is_own = accumulated if accumulated is not None else (None, False)
    whole, quantizes = joined(weights), is_wide_enough(fp8, weights[0].shape[1])
    parts = columns(g, [w.shape[0] for w in weights]) if whole is None else [g]
    pairs = list(zip(parts, weights if whole is None else [whole], strict=True))
    if low is not None and low.noise is not None:
        more = _sum_of_products(None, False, low.products, False)
        dropout(more, *low.position, **low.noise, out=more)
        total, is_own = more if total is None else add(total, more, out=total if is_own else None), True
    elif low is not None and len(pairs) == len(low.products) == 1 and not quantizes and not is_own:
        return matmul_sum(*pairs[0], *low.products[0], *(() if total is None else (total,)))
    elif low is not None:
        total, is_own = _sum_of_products(total, is_own, low.products, False), True
    return _sum_of_products(total, is_own, pairs, quantizes)


def _sum_of_products(total: Array | None, is_own: bool, pairs: Sequence[tuple[Array, Array]], quantizes: bool) -> Array:
    """The products of all pairs, and `total`, which `is_own` lets be written over; `quantizes`: in 8-bit floats."""
    for part, weight in pairs:
        if quantizes:
            total = quantized_matmul(part, weight) if total is None else quantized_matmul(part, weight, total)
        elif total is None:
            total = matmul(part, weight)
        elif is_own:
            add_matmul(total, part, weight)
        else:
            total = matmul_add(part, weight, total)
        is_own = True
    assert total is not None
    return total


def _gradients(
    ctx: Context,
    inputs: Sequence[int],
    sizes: Sequence[int],
    fresh: Callable[[int | None, Array | None], Array],
    more: Callable[[int | None, Array, bool], Array],
) -> list[Array | None]:
    """Gradients of parameters that one product has one after another.

    Args:
        inputs, sizes: which inputs they are, and their rows.
        fresh: `fresh(k, out)` makes the gradient of number k, or of all (None), in `out` if that is given.
        more: `more(k, before, is_own)` adds it to `before`, in place where that is allowed.
    """
    wanted = [k for k, i in enumerate(inputs) if ctx.needs[i]]
    sums = [ctx.take_accumulated(i) if ctx.needs[i] else None for i in inputs]
    slots = [ctx.gradient_slot(i) if t is None and ctx.needs[i] else None for i, t in zip(inputs, sums, strict=True)]
    if len(wanted) == len(inputs):
        arrays = [t.array for t in sums if t is not None and t.is_own]
        if len(arrays) == len(inputs) and (whole := joined(arrays)) is not None:
            more(None, whole, True)
            return list(arrays)
        free = [slot for slot in slots if slot is not None]
        if len(free) == len(inputs) and (whole := joined(free)) is not None:
            fresh(None, whole)
            return list(free)
        if not free and not any(sums):
            return list(slices(fresh(None, None), sizes))
    found: list[Array | None] = [None] * len(inputs)
    for k in wanted:
        before = sums[k]
        found[k] = fresh(k, slots[k]) if before is None else more(k, before.array, before.is_own)
    return found


def _on_side_stream(slot: Array | None, nbytes: int) -> AbstractContextManager[None]:
    """Where a gradient is made from `nbytes`: in its slot nobody reads it before the backward pass does, or is over."""
    return nullcontext() if slot is None else slot.storage.backend.on_side_stream(nbytes)


def weight_gradients(
    ctx: Context, inputs: Sequence[int], g: Array, x: Array, sizes: Sequence[int]
) -> list[Array | None]:
    """gᵀ·x for each weight `[size, in]`; g is `[rows, Σ sizes]`, x `[rows, in]`."""
    parts = columns(g, sizes)

    def left(k: int | None) -> Array:
        return transposed(g if k is None else parts[k])

    def more(k: int | None, before: Array, is_own: bool) -> Array:
        if not is_own:
            return matmul_add(left(k), x, before)
        add_matmul(before, left(k), x)
        return before

    def fresh(k: int | None, out: Array | None) -> Array:
        with _on_side_stream(out, g.nbytes + x.nbytes):
            return matmul(left(k), x, out=out)

    return _gradients(ctx, inputs, sizes, fresh, more)


def bias_gradients(ctx: Context, inputs: Sequence[int], g: Array, sizes: Sequence[int]) -> list[Array | None]:
    """The sum of g `[rows, Σ sizes]` over all rows, for each bias `[size]`."""
    parts = columns(g, sizes)

    def fresh(k: int | None, out: Array | None) -> Array:
        part = g if k is None else parts[k]
        with _on_side_stream(out, g.nbytes):
            return sum_to_shape(part, shape=part.shape[1:], out=out)

    def more(k: int | None, before: Array, is_own: bool) -> Array:
        return add(before, fresh(k, None), out=before if is_own else None)

    return _gradients(ctx, inputs, sizes, fresh, more)
