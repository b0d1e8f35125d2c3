"""What a call of attention is to its kernels: sizes, what queries may see, and how tiles of its arrays are read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.launch import Double
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import float32, float64
from genesis.errors import ShapeError
from genesis.kernels.attention.tiles import padded
from genesis.kernels.types import TRITON, work_type
from genesis.shapes import Shape

__all__ = ["Call", "call_of", "region"]


class Call(NamedTuple):
    """What the kernels share.

    Attributes:
        factor, sign: their product is the scale in units of log2. The factor is positive, so that it may stand outside
            of maxima.
        boxes: tiles come through TMA.
        hopper: of a GPU of that kind.
        row: bytes of a row of two arrays.
    """

    batches: int
    tokens: int
    keys: int
    heads: int
    key_heads: int
    size: int
    factor: float
    sign: float
    window: int | None
    ss: tuple[int, int]
    boxes: bool
    hopper: bool
    row: int
    constants: dict[str, Any]

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.key_heads

    def tile(self, x: Array, rows: int) -> Array | Descriptor:
        """A kernel's argument for `x` [B, T, H, D], read in tiles of `rows` rows of a head."""
        if not self.boxes:
            return x
        shape, strides = region(x)
        return Descriptor(x, shape, strides, (1, 1, rows, padded(self.size)))

    def numbers(self, x: Array, count: int) -> list[Array | Descriptor]:
        """Kernel's arguments for the rows of `x`, read `count` numbers at a time."""
        found: list[Array | Descriptor] = []
        for i in range(x.shape[0]):
            row = x.view((x.shape[1],), (1,), x.offset + i * x.shape[1])
            found.append(Descriptor(row, row.shape, (1,), (count,)) if self.boxes else row)
        return found


def region(x: Array) -> tuple[Shape, Shape]:
    """`x` as [B, H, T, D] for TMA. A dimension of size 1 may have any stride."""
    grain = 16 // x.dtype.itemsize
    dims = [(n, s if n > 1 else grain) for n, s in zip(x.shape[:3], x.strides[:3], strict=True)]
    ordered = (dims[0], dims[2], dims[1])
    return (*(n for n, _ in ordered), x.shape[3]), (*(s for _, s in ordered), x.strides[3])


def call_of(scale: float, causal: bool, window: int, starts: Array | None, *read: Array) -> Call:
    """`read` holds q and k first, and all others that go in tiles."""
    q, k = read[:2]
    (batches, tokens, heads, size), (_, keys, key_heads, _) = q.shape, k.shape
    number = Double if q.dtype is float64 else float
    sign = float(scale > 0) - float(scale < 0)
    head = padded(size)
    if head > 256:
        raise ShapeError(f"attention: a head size of {size}; the CUDA kernels take at most 256", next="use more heads")
    capability = backend_of(q.device).driver.properties.capability
    boxes = q.dtype.itemsize == 2 and capability >= (9, 0) and all(is_describable(x, *region(x)) for x in read)
    constants = {
        "CAUSAL": causal, "SIGNED": sign != 1, "BOXES": boxes, "TYPE": TRITON[q.dtype.name],
        "WORK": TRITON[work_type(q.dtype).name], "PRECISION": "tf32" if q.dtype is float32 and allow_tf32 else "ieee",
        "HEAD": head,
    }  # fmt: skip
    return Call(
        batches, tokens, keys, heads, key_heads, size, number((abs(scale) or 1.0) / math.log(2)), number(sign),
        window or None, (0, 0) if starts is None else (starts.strides[0], starts.strides[1]), boxes,
        capability[0] == 9, 2 * size * q.dtype.itemsize, constants,
    )  # fmt: skip
