"""An attention call as its kernels take it: sizes, scale, types, and how tiles of its arrays are read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import float32
from genesis.errors import ShapeError
from genesis.kernels.attention.tiles import padded_head_dim
from genesis.kernels.types import TRITON, float_argument, work_type
from genesis.shapes import Shape


class Problem(NamedTuple):
    """What the kernels of a call share; see common.py for what they make of it.

    Attributes:
        scales: (scale_log2, sign, scale), sign None for 1.
        uses_tma: tiles come through TMA.
        is_hopper: the GPU has compute capability 9.
        kv_row_bytes: of a row of keys and one of values together.
        constants: CAUSAL, TMA and DOT of the kernels.
    """

    batches: int
    tokens: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int
    scales: tuple[float, float | None, float]
    window: int | None
    doc_starts_strides: tuple[int, int]
    uses_tma: bool
    is_hopper: bool
    kv_row_bytes: int
    constants: dict[str, Any]

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.key_heads

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """(tokens, keys, batches, heads, group, window)."""
        return self.tokens, self.keys, self.batches, self.heads, self.group, self.window

    @property
    def padded(self) -> int:
        """Columns of the tiles."""
        return padded_head_dim(self.head_dim)

    def tiled(self, x: Array, rows: int) -> Array | Descriptor:
        """A kernel's argument for `x` [B, T, H, D], read in tiles of `rows` rows of a head."""
        if not self.uses_tma:
            return x
        shape, strides = tma_region(x)
        return Descriptor(x, shape, strides, (1, 1, rows, self.padded))

    def vectors(self, x: Array, count: int) -> list[Array | Descriptor]:
        """Kernel arguments for the rows of a matrix `x`, read `count` elements at a time."""
        found: list[Array | Descriptor] = []
        for i in range(x.shape[0]):
            row = x.view((x.shape[1],), (1,), x.offset + i * x.shape[1])
            found.append(Descriptor(row, row.shape, (1,), (count,)) if self.uses_tma else row)
        return found


def tma_region(x: Array) -> tuple[Shape, Shape]:
    """Shape and strides of `x` as [B, H, T, D] for TMA. A dimension of size 1 may have any stride."""
    grain = 16 // x.dtype.itemsize
    dims = [(n, s if n > 1 else grain) for n, s in zip(x.shape[:3], x.strides[:3], strict=True)]
    ordered = (dims[0], dims[2], dims[1])
    return (*(n for n, _ in ordered), x.shape[3]), (*(s for _, s in ordered), x.strides[3])


def problem_of(scale: float, causal: bool, window: int, doc_starts: Array | None, *read: Array) -> Problem:
    """The problem of a call.

    Args:
        read: q and k first, then all others that are read in tiles.
    """
    q, k = read[:2]
    (batches, tokens, heads, head_dim), (_, keys, key_heads, _) = q.shape, k.shape
    sign = (scale > 0) - (scale < 0)
    scales = (abs(scale) or 1.0) / math.log(2), sign, scale
    scale_log2, sign_argument, scale = (float_argument(value, q.dtype) for value in scales)
    if padded_head_dim(head_dim) > 256:
        what = f"attention: a head size of {head_dim}; the CUDA kernels take at most 256"
        raise ShapeError(what, next="use more heads")
    capability = backend_of(q.device).driver.properties.capability
    uses_tma = q.dtype.itemsize == 2 and capability >= (9, 0) and all(is_describable(x, *tma_region(x)) for x in read)
    precision = "tf32" if q.dtype is float32 and allow_tf32 else "ieee"
    return Problem(
        batches, tokens, keys, heads, key_heads, head_dim,
        (scale_log2, None if sign == 1 else sign_argument, scale),
        window or None, (0, 0) if doc_starts is None else (doc_starts.strides[0], doc_starts.strides[1]), uses_tma,
        capability[0] == 9, 2 * head_dim * q.dtype.itemsize,
        {"CAUSAL": causal, "TMA": uses_tma, "DOT": (TRITON[q.dtype.name], TRITON[work_type(q.dtype).name], precision)},
    )  # fmt: skip
