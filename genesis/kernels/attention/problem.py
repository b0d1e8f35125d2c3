"""The arguments of an attention call as kernels take them: sizes, scale, types, and tiles."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
from triton.experimental.gluon import language as gl

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import DType, float32
from genesis.errors import ShapeError
from genesis.kernels.elements import TRITON, float_argument, work_type
from genesis.ops.attention import KEY_BLOCK
from genesis.shapes import Shape


class Problem(NamedTuple):
    """The arguments that the kernels of a call share; common.py describes them."""

    batches: int
    tokens: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int
    scales: tuple[float, float | None, float]  # (scale_log2, sign, scale), sign None for 1
    window: int | None
    doc_starts_strides: tuple[int, int, int | None]  # the last one is None without gaps
    uses_tma: bool  # whether TMA loads tiles
    is_hopper: bool  # whether the GPU has compute capability 9
    constants: dict[str, Any]  # the kernels' CAUSAL, TMA and DOT

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.key_heads

    @property
    def left_bounds(self) -> int:
        """Numbers that `left_bounds` in common.py finds for each query: 1, or 3 with gaps."""
        return 1 if self.doc_starts_strides[2] is None else 3

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """(tokens, keys, batches, heads, group, window)."""
        return self.tokens, self.keys, self.batches, self.heads, self.group, self.window

    @property
    def padded(self) -> int:
        """Columns of a tile."""
        return padded_head_dim(self.head_dim)

    def tiled(self, x: Array, rows: int, is_gluon: bool = False) -> Array | Descriptor:
        """Return the kernel argument for `x` [B, T, H, D], which is read in tiles of `rows` rows of a head."""
        if not self.uses_tma:
            return x
        shape, strides = tma_region(x)
        block = (1, 1, rows, self.padded)
        kind = {"bfloat16": gl.bfloat16, "float16": gl.float16}[x.dtype.name]
        layout = repr(gl.NVMMASharedLayout.get_default_for(list(block), kind)) if is_gluon else ""
        return Descriptor(x, shape, strides, block, layout=layout)

    def vectors(self, x: Array, count: int, layout: str = "") -> list[Array | Descriptor]:
        """Return the kernel arguments for the rows of a matrix `x`, which are read `count` elements at a time."""
        arguments: list[Array | Descriptor] = []
        for i in range(x.shape[0]):
            row = x.view((x.shape[1],), (1,), x.offset + i * x.shape[1])
            arguments.append(Descriptor(row, row.shape, (1,), (count,), layout=layout) if self.uses_tma else row)
        return arguments


def tma_region(x: Array) -> tuple[Shape, Shape]:
    """Return shape and strides of `x` as [B, H, T, D] for TMA. A dimension of size 1 may have any stride."""
    grain = 16 // x.dtype.itemsize
    dims = [(n, s if n > 1 else grain) for n, s in zip(x.shape[:3], x.strides[:3], strict=True)]
    ordered = (dims[0], dims[2], dims[1])
    return (*(n for n, _ in ordered), x.shape[3]), (*(s for _, s in ordered), x.strides[3])


def problem_of(scale: float, causal: bool, window: int, doc_starts: Array | None, *read: Array) -> Problem:
    """Return a call's problem. `read` is q, k, then all arrays read in tiles. Raises ShapeError for heads above 256."""
    q, k = read[:2]
    (batches, tokens, heads, head_dim), (_, keys, key_heads, _) = q.shape, k.shape
    sign = (scale > 0) - (scale < 0)
    scales = (abs(scale) or 1.0) / math.log(2), sign, scale
    scale_log2, sign_argument, scale = (float_argument(value, q.dtype) for value in scales)
    if padded_head_dim(head_dim) > 256:
        what = f"attention: head size {head_dim} exceeds 256, the limit of the CUDA kernels"
        raise ShapeError(what, next="use more heads of a smaller size")
    capability = backend_of(q.device).driver.properties.capability
    uses_tma = q.dtype.itemsize == 2 and capability >= (9, 0) and all(is_describable(x, *tma_region(x)) for x in read)
    precision = "ieee" if q.dtype is not float32 else "tf32" if allow_tf32 else "tf32x3"
    return Problem(
        batches, tokens, keys, heads, key_heads, head_dim,
        (scale_log2, None if sign == 1 else sign_argument, scale),
        window or None, _strides(doc_starts), uses_tma, capability[0] == 9,
        {"CAUSAL": causal, "TMA": uses_tma, "DOT": (TRITON[q.dtype.name], TRITON[work_type(q.dtype).name], precision)},
    )  # fmt: skip


def _strides(doc_starts: Array | None) -> tuple[int, int, int | None]:
    if doc_starts is None:
        return 0, 0, None
    sequence, token, *kind = doc_starts.strides
    return sequence, token, *(kind or (None,))


# --- Tiles ------------------------------------------------------------------------------------------------------------


class AttentionTile(NamedTuple):
    """The tile sizes and launch options of a kernel."""

    queries: int  # queries per block
    keys: int  # keys per block
    warps: int  # warps per program
    stages: int  # stages of the pipeline
    registers: int = 0  # the most registers per thread, so that more programs share an SM; 0 for no limit


# Forward tile inside `genesis.exact`: one size of key blocks, and 16 queries per warp. The four lanes of a quad then
# hold a row of weights, and `tl.sum` adds it in the same order as in a generation step, where one warp has 16 queries.
EXACT_SIZES = {"queries": 64, "keys": KEY_BLOCK, "warps": 4}

# By kind of type and padded head dimension: forward, dQ, dK/dV. "tma" applies to 2-byte types that Hopper loads by TMA.
# Measured on an H200 with Triton 3.6.
TILES: dict[str, dict[int, tuple[AttentionTile, AttentionTile, AttentionTile]]] = {
    "tma": {
        64: (AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 3, 168)),
        128: (AttentionTile(64, 64, 4, 3), AttentionTile(128, 64, 8, 3), AttentionTile(64, 64, 4, 2)),
        256: (AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 8, 2)),
    },
    "half": {
        64: (AttentionTile(64, 64, 4, 3), AttentionTile(64, 64, 4, 3), AttentionTile(32, 64, 4, 2)),
        128: (AttentionTile(128, 64, 8, 3), AttentionTile(64, 64, 8, 2), AttentionTile(32, 64, 8, 2)),
        256: (AttentionTile(64, 64, 8, 2), AttentionTile(64, 32, 8, 2), AttentionTile(32, 32, 8, 2)),
    },
    "float32": {
        64: (AttentionTile(32, 64, 4, 2), AttentionTile(64, 64, 4, 1), AttentionTile(64, 32, 4, 1)),
        128: (AttentionTile(16, 64, 4, 2), AttentionTile(32, 64, 4, 1), AttentionTile(32, 16, 4, 2)),
        256: (AttentionTile(16, 32, 4, 1), AttentionTile(16, 64, 8, 1), AttentionTile(16, 16, 8, 1)),
    },
    "float64": {
        64: (AttentionTile(16, 16, 4, 1), AttentionTile(16, 16, 4, 1), AttentionTile(16, 16, 4, 1)),
        128: (AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1)),
        256: (AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1)),
    },
}


def padded_head_dim(head_dim: int) -> int:
    """Return the head dimension of tiles: a power of 2, and at least the 16 that dots need."""
    return max(16, triton.next_power_of_2(head_dim))


LONG_KEYS = 2048  # the fewest keys for which the forward kernel for "tma" and heads of 64 uses LONG_TILE
LONG_TILE = AttentionTile(64, 128, 4, 2)


def tiles_of(
    dtype: DType, head_dim: int, tokens: int, keys: int, shared: int, uses_tma: bool
) -> tuple[AttentionTile, AttentionTile, AttentionTile]:
    """Return the tiles of forward, dQ and dK/dV for `shared` bytes. dQ's query block is a multiple of dK/dV's."""
    table = TILES["tma" if uses_tma else "half" if dtype.itemsize == 2 else dtype.name]
    padded = padded_head_dim(head_dim)
    row_bytes, row = padded * dtype.itemsize, next((d for d in table if d >= padded), 256)
    forward, dq, dkdv = table[row]
    if uses_tma:  # short sequences do not need smaller tiles, because TMA loads nothing out of bounds
        return (LONG_TILE if row == 64 and keys >= LONG_KEYS else forward), dq, dkdv
    dq = _fitting(dq, tokens, keys, row_bytes, shared, False)
    dkdv = _fitting(dkdv, tokens, keys, row_bytes, shared, True)
    return (
        _fitting(forward, tokens, keys, row_bytes, shared, False),
        dq,
        dkdv._replace(queries=min(dkdv.queries, dq.queries)),
    )


def _fitting(
    tile: AttentionTile, tokens: int, keys: int, row_bytes: int, shared: int, keeps_keys: bool
) -> AttentionTile:
    """Return the tile, clamped to the sequences, with fewer stages or smaller blocks if shared memory is short. Two
    tiles (of keys with `keeps_keys`, otherwise of queries) remain in shared memory, and two are pipelined.
    """
    m, n, _, stages = tile[:4]
    m = min(m, max(16, triton.next_power_of_2(tokens)))
    n = min(n, max(16, triton.next_power_of_2(keys)))
    while 2 * row_bytes * ((n + stages * m) if keeps_keys else (m + stages * n)) > shared and (stages, m, n) != (
        1, 16, 16,
    ):  # fmt: skip
        if stages > 1:
            stages -= 1
        elif n > 16:
            n //= 2
        else:
            m //= 2
    return tile._replace(queries=m, keys=n, stages=stages)
