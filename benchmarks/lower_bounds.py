"""The lower bound of an op's time, given its kernels: its launches, and its bytes or FLOPs at the limit.

Counted from what a run recorded of the op's kernels, never measured here. In a matmul the SM with most tiles
counts: each computes whole tiles, and none faster than its share of the best matmul.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from genesis.profile.format import format_seconds

__all__ = ["EXPLAINED", "RENAMED", "SMALLEST", "LowerBound", "describe", "lower_bound_of"]

# The share of the time that explains it: such an op is in the band "good" or better, so it would not be listed. Figures
# of a few microseconds are uncertain by the rest: the same launch took 0.96 to 1.05 µs in different runs, and two
# measurements of a small op in one run differ by up to a tenth.
EXPLAINED = 0.8
SMALLEST = "microseconds on next to no data"  # the field of a result that has them by kernel
LOST = 0.2  # the share of empty slots for programs that is worth a note
EVEN = 1.01  # shares of a matmul that count as one
# Kernels that were measured under another name, with the one that they have now. A measurement anew empties this table.
RENAMED = {
    "add_parts": "gemm_reduce_splits",
    "binary": "binary_kernel",
    "by_descriptors": "gemm_tma",
    "extreme_kernel": "row_argminmax_kernel",
    "fold": "reduce_kernel",
    "merge": "merge_kernel",
    "softmax_long": "softmax_two_pass_kernel",
}
Row = dict[str, Any]


class LowerBound(NamedTuple):
    """The least time of an op.

    Attributes:
        launches: the names of what is launched, with the seconds that a launch takes without work.
        was_noted: whether they were; else one is sure.
        limit: seconds of the op's bytes or FLOPs at the limit.
        work: how much longer that takes as it is shared among SMs, at the least; 1 where it is even.
        seconds: that the op took.
        notes: what else its kernels say.
    """

    launches: tuple[tuple[str, float], ...]
    was_noted: bool
    limit: float
    work: float
    seconds: float
    notes: tuple[str, ...]

    @property
    def least(self) -> float:
        """Seconds."""
        return sum(seconds for _, seconds in self.launches) + self.limit * self.work

    @property
    def share(self) -> float:
        """Of the time that it took; more than 1 where the limit does not hold, as for data in a cache."""
        return self.least / self.seconds


class Tiling(NamedTuple):
    """A matmul in tiles.

    Attributes:
        tiles: how many.
        work: what the SM with most of them computes, over an even share of the matmul.
    """

    tiles: int
    work: float


def lower_bound_of(row: Row, share: float, launch: float, smallest: Mapping[str, float]) -> LowerBound:
    """The lower bound of a row of `benchmarks.gpu.ops`.

    Args:
        share: of the limit, as the row reaches it.
        launch: seconds of a small launch inside a graph.
        smallest: seconds of kernels on next to no data, by name, which count instead of `launch`.
    """
    seconds, product, kernels = row["genesis_us"] * 1e-6, row.get("product"), row.get("kernels") or ()
    launches = tuple((_name(kernel), smallest.get(kernel["name"], launch)) for kernel in kernels)
    works = [_tiling(kernel, product).work for kernel in kernels if product and "tile" in kernel]
    notes = dict.fromkeys(note for kernel in kernels for note in _fill(kernel, product))
    work = max(works, default=1.0)
    return LowerBound(launches or (("", launch),), bool(kernels), share * seconds, work, seconds, tuple(notes))


def _name(kernel: Row) -> str:
    return RENAMED.get(kernel["name"], kernel["name"])


def _tiling(kernel: Row, product: Sequence[int]) -> Tiling:
    """Rows, columns and steps along k are filled up to whole tiles; tiles that are split along k are shared evenly."""
    counts = [-(-extent // size) for extent, size in zip(product, kernel["tile"], strict=True)]
    tiles, sm_count = counts[0] * counts[1], kernel["sm_count"]
    padded = math.prod(map(operator.mul, counts, kernel["tile"])) / math.prod(product)
    rounds = tiles / sm_count if kernel["split"] else -(-tiles // sm_count)
    return Tiling(tiles, padded * rounds * sm_count / tiles)


def _fill(kernel: Row, product: Sequence[int] | None) -> Iterator[str]:
    """How a kernel leaves SMs without work, if it does."""
    programs, sm_count, name = math.prod(kernel["grid"]), kernel["sm_count"], _name(kernel)
    if not kernel["grid"]:
        return
    if product and "tile" in kernel:
        tiles, work = _tiling(kernel, product)
        rows, columns, _ = kernel["tile"]
        if work > EVEN:
            yield f"{tiles} tiles of {rows} x {columns} on {sm_count} SMs, the busiest has {work:.2f} shares"
    elif programs < sm_count:
        yield f"{name} has {programs} program{'s' * (programs != 1)} for {sm_count} SMs"
    elif kernel.get("resident"):
        waves = programs / (kernel["resident"] * sm_count)
        if waves > 1 and 1 - waves / math.ceil(waves) > LOST:
            yield f"{name} takes {waves:.2f} waves"


def describe(bound: LowerBound) -> str:
    """The bound next to the time, as a phrase."""
    starts = ", ".join(f"{name} {format_seconds(seconds)}".strip() for name, seconds in bound.launches)
    count = len(bound.launches)
    text = f"{'' if bound.was_noted else 'at least '}{count} launch{'es' * (count > 1)} ({starts})"
    text += f" and {format_seconds(bound.limit)} at the limit"
    if bound.work > EVEN:
        text += f", {format_seconds(bound.limit * bound.work)} as it is shared out"
    took = format_seconds(bound.seconds)
    text += f": {format_seconds(bound.least)}"
    text += f" of {took}, {bound.share:.0%}" if bound.share < 1 else f", and it took {took}"
    return "; ".join((text, *bound.notes))
