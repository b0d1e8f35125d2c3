"""Low-rank pairs as functions of linear layers take them, and DoRA's factors; see `genesis.ops.low_rank`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from genesis.autograd.record import apply
from genesis.errors import ShapeError, UsageError
from genesis.functions.surface import Tensor
from genesis.ops import dora
from genesis.ops.low_rank import LowRank, Pair
from genesis.random import default_generator


class LowRankPairs(NamedTuple):
    """What adapters add to linear layers on one input x: c∘(x·Wᵀ + s·dropout(x)·Aᵀ·Bᵀ), for some or all of them.

    Attributes:
        pairs: for each weight A `[r, in]`, B `[out, r]` and s; None where there is no adapter.
        factors: c of all columns `[Σ out]`.
        dropout: with which probability an element of x is dropped on its way to A; one draw serves all pairs.
    """

    pairs: Sequence[tuple[Tensor, Tensor, float] | None]
    factors: Tensor | None = None
    dropout: float = 0.0


def with_pairs(given: LowRankPairs, weights: Sequence[Tensor], size: int) -> tuple[tuple[Tensor, ...], LowRank]:
    """The inputs that an op takes for pairs, and its attribute.

    Args:
        size: elements of the layers' input.

    Raises:
        ShapeError: where there are not as many pairs as weights, or all are None.
        UsageError: a dropout that is no probability.
    """
    if len(given.pairs) != len(weights) or not any(given.pairs):
        raise ShapeError(f"{len(given.pairs)} low-rank pairs for {len(weights)} weights", next="give None for a layer")
    if not 0 <= given.dropout <= 1:
        raise UsageError(f"dropout: {given.dropout} is no probability", next="give p in [0, 1]")
    a, b, found, start = [], [], [], 0
    for weight, pair in zip(weights, given.pairs, strict=True):
        stop = start + weight.shape[0]
        if pair is not None:
            a.append(pair[0])
            b.append(pair[1])
            found.append(Pair(start, stop, pair[0].shape[0], float(pair[2])))
        start = stop
    inputs = (*a, *b) if given.factors is None else (*a, *b, given.factors)
    noise = None
    if given.dropout:
        seed, offset, position = default_generator.reserve_relative(size)
        noise, inputs = (given.dropout, seed, offset), inputs if position is None else (*inputs, position)
    return inputs, LowRank(tuple(found), len(inputs), noise)


def dora_factors(
    layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float] | None], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """DoRA's factors c = m / ‖W + s·B·A‖ of layers side by side, and the norms; a gradient goes to m alone.

    Args:
        layers: m, ‖W‖² by rows, W, A, B and s of each layer; None where c is 1.
        sizes: rows of each layer's W.

    Returns:
        Two `[Σ sizes]`.
    """
    columns, start = [], 0
    for layer, size in zip(layers, sizes, strict=True):
        if layer is not None:
            columns.append((start, start + size))
        start += size
    present: Any = [layer for layer in layers if layer is not None]
    arrays = [layer[i] for i in range(5) for layer in present]
    scales = tuple(float(layer[5]) for layer in present)
    found = apply(dora.dora_factors, *arrays, columns=tuple(columns), scales=scales, width=start)
    return found  # type: ignore[no-any-return]
