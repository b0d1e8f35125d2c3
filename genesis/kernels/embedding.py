"""Twins of embedding look-up and its gradient: a gather of rows, and zeros with the rows' sums written over them."""

from __future__ import annotations

from genesis.array import Array
from genesis.backend.cuda.launch import clear
from genesis.backend.cuda.twins import twin
from genesis.kernels.index import gather, places_of, sorted_places
from genesis.kernels.segment import add_rows, rows_of

__all__ = ["embedding", "embedding_backward"]


@twin("embedding")
def embedding(out: Array, ids: Array, weight: Array) -> None:
    """y[...] = weight[ids[...]]."""
    places = places_of("embedding", (ids,), weight.shape[:1], weight.strides[:1], negative=False)
    gather(out, weight, places, ((), ()), (weight.shape[1:], weight.strides[1:]))


@twin("embedding_backward")
def embedding_backward(out: Array, g: Array, ids: Array, rows: int) -> None:
    """dweight[r] = the sum of g over the places where ids = r, in order of position."""
    clear(out)
    if g.size == 0:
        return
    places = places_of("embedding_backward", (ids,), (rows,), (1,), negative=False)
    width = g.shape[-1]
    found = rows_of(ids.shape, g.strides[:-1], (width,), (1,), g.strides[-1:])
    add_rows(out, g, sorted_places(places, max(rows, 1), width), found, add=False)
