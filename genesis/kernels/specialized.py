"""Matrix products of 2-byte floats on Hopper whose warps divide the work, so that what follows a sum costs no time.

Eight warps multiply tile after tile; when a tile's sum is complete they lay it down in shared memory, rounded, and go
on with the next. Four other warps finish it from there: they add a residual, gate, or turn it into SwiGLU's gradients,
with loads that began while the tile was multiplied. In one stream of instructions, as Triton has it, the tensor cores
wait for all that. The kernel is written in Gluon, Triton's lower dialect; it has no interpreter, so what is right of it
is checked on a GPU, against the kernels that stand in for it elsewhere (`linalg.py`, `gated.py`, `swiglu.py`).

Letters: the product is [m, k] x [k, n]; BM, BN, BK are the tile's sizes.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.descriptor import Descriptor, is_describable
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch

__all__ = ["gated_backward_into", "gated_into", "product_and_residual_into"]

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 has other names than 3.6
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(tma, "async_load"))

TILE = 128, 256, 64  # BM, BN, BK; measured on an H200, as all here
STAGES = 3  # more would leave no room for the finished tile
GROUP = 8  # rows of tiles walked together
WARPS, FINISHERS = 8, 4  # more warps would leave the multiplying ones too few registers to begin with
REGISTERS = 168  # of a finishing thread; the multiplying ones have what is left
ROWS = gl.constexpr(64)  # of a piece that the finishing warps take at once
COLUMNS = gl.constexpr(64)
ROUNDS = 1.5  # tiles a processor from which on this pays

RESIDUAL = gl.constexpr(1)  # FORM: sum + residual
GATED = gl.constexpr(2)  # gate and up, and silu(gate)·up
GATED_BACKWARD = gl.constexpr(3)  # the gradients of gate and up from that of silu(gate)·up, which is the sum


# --- Where tiles and pieces lie ---------------------------------------------------------------------------------------


@gluon.jit
def quotient(x, y):
    """x // y for 0 <= x < 2^21 and y > 0: see `linalg.quotient`."""
    return ((gl.cast(x, gl.float32) + 0.5) * (1.0 / gl.cast(y, gl.float32))).to(gl.int32)


@gluon.jit
def place(i_tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP rows are walked together, so that neighbours in time share L2."""
    i_group = quotient(i_tile, GROUP * tiles_n)
    rows = gl.minimum(tiles_m - i_group * GROUP, GROUP)
    within = i_tile - i_group * GROUP * tiles_n
    i_n = quotient(within, rows)
    return i_group * GROUP + within - i_n * rows, i_n


@gluon.jit
def piece(i, i_m, i_n, m, n, step, BLOCKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Offsets of piece i of the tile [BM, BN], in rows of `step` elements, and which exist."""
    IN_ROWS: gl.constexpr = BM // ROWS
    o_m = i_m * BM + i % IN_ROWS * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BLOCKED))
    o_n = i_n * BN + i // IN_ROWS * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCKED))
    return o_m[:, None] * step + o_n[None, :], (o_m < m)[:, None] & (o_n < n)[None, :]


# --- The multiplying warps --------------------------------------------------------------------------------------------


@gluon.jit
def fetch(d_x, d_w, s_x, s_w, full, slot, i_m, i_n, i_k, n, wanted, FORM: gl.constexpr, TURNED: gl.constexpr,
          BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """Begin to load step i_k of a tile, if it is wanted. A gated tile takes BN / 2 rows of gate and the same of up."""
    arrived, s_b = full.index(slot), s_w.index(slot)
    mbarrier.expect(arrived, (BM + BN) * BK * 2, pred=wanted)
    load(d_x, [i_m * BM, i_k * BK], arrived, s_x.index(slot), pred=wanted)
    if FORM == GATED:
        HALF: gl.constexpr = BN // 2
        load(d_w, [i_n * HALF, i_k * BK], arrived, s_b.slice(0, HALF, 0), pred=wanted)
        load(d_w, [n + i_n * HALF, i_k * BK], arrived, s_b.slice(HALF, HALF, 0), pred=wanted)
    elif TURNED:
        load(d_w, [i_n * BN, i_k * BK], arrived, s_b, pred=wanted)
    else:
        load(d_w, [i_k * BK, i_n * BN], arrived, s_b, pred=wanted)


@gluon.jit
def lay_down(acc, s_o, FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Round a tile to shared memory, COLUMNS columns behind the other."""
    if BN == COLUMNS:
        s_o.index(FIRST).store(acc.to(s_o.dtype))
    else:
        left, right = acc.reshape((BM, 2, BN // 2)).permute(0, 2, 1).split()
        lay_down(left, s_o, FIRST, BM, BN // 2)
        lay_down(right, s_o, FIRST + BN // 2 // COLUMNS, BM, BN // 2)


@gluon.jit
def multiply(d_x, d_w, s_x, s_w, s_o, full, done, free, tiles_m, tiles_n, n, steps, FORM: gl.constexpr,
             TURNED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
             GROUP: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Sum tile after tile. Loads run STAGES - 1 steps ahead, over the borders of tiles."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    first, programs, tiles = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n
    i_ahead, k_ahead, slot_ahead = first, 0, 0
    m_ahead, n_ahead = place(i_ahead, tiles_m, tiles_n, GROUP)
    for _ in gl.static_range(STAGES - 1):
        fetch(d_x, d_w, s_x, s_w, full, slot_ahead, m_ahead, n_ahead, k_ahead, n, i_ahead < tiles, FORM, TURNED, BM, BN,
              BK)  # fmt: skip
        slot_ahead, k_ahead = slot_ahead + 1, k_ahead + 1
        if k_ahead == steps:
            i_ahead, k_ahead = i_ahead + programs, 0
            m_ahead, n_ahead = place(i_ahead, tiles_m, tiles_n, GROUP)
    slot, phase, is_free = 0, 0, 1
    for _ in range(first, tiles, programs):
        acc = gl.zeros((BM, BN), gl.float32, SUMS)
        for _ in range(steps):
            mbarrier.wait(full.index(slot), phase)
            s_b = s_w.index(slot)
            if TURNED:
                s_b = s_b.permute((1, 0))
            acc = warpgroup_mma(s_x.index(slot), s_b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before is done: its slot can be filled again
            fetch(d_x, d_w, s_x, s_w, full, slot_ahead, m_ahead, n_ahead, k_ahead, n, i_ahead < tiles, FORM, TURNED, BM,
                  BN, BK)  # fmt: skip
            slot_ahead = gl.where(slot_ahead == STAGES - 1, 0, slot_ahead + 1)
            k_ahead += 1
            if k_ahead == steps:
                i_ahead, k_ahead = i_ahead + programs, 0
                m_ahead, n_ahead = place(i_ahead, tiles_m, tiles_n, GROUP)
            slot += 1
            if slot == STAGES:
                slot, phase = 0, phase ^ 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.wait(free, is_free)
        lay_down(acc, s_o, 0, BM, BN)
        fence_async_shared()
        mbarrier.arrive(done, count=1)
        is_free ^= 1


# --- The finishing warps ----------------------------------------------------------------------------------------------


@gluon.jit
def following(i, pieces, i_m, i_n, next_m, next_n):
    """The piece after piece i: the first of the next tile behind a tile's last."""
    last = i == pieces - 1
    return gl.where(last, 0, i + 1), gl.where(last, next_m, i_m), gl.where(last, next_n, i_n)


@gluon.jit
def add_residual(p_o, p_r, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr, BM: gl.constexpr,
                 BN: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Out = sum + residual, a piece of the residual loaded ahead."""
    PIECES: gl.constexpr = BM // ROWS * (BN // COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    i_m, i_n = place(first, tiles_m, tiles_n, GROUP)
    o, mask = piece(0, i_m, i_n, m, n, n, BLOCKED, BM, BN)
    b_r = gl.load(p_r + o, mask=mask, other=0)
    for i_tile in range(first, tiles, programs):
        next_m, next_n = place(gl.minimum(i_tile + programs, tiles - 1), tiles_m, tiles_n, GROUP)
        mbarrier.wait(done, is_done)
        for i in range(PIECES):
            b_y = s_pieces.index(i).load(BLOCKED).to(gl.float32) + b_r.to(gl.float32)
            i_ahead, m_ahead, n_ahead = following(i, PIECES, i_m, i_n, next_m, next_n)
            o_ahead, mask_ahead = piece(i_ahead, m_ahead, n_ahead, m, n, n, BLOCKED, BM, BN)
            b_r = gl.load(p_r + o_ahead, mask=mask_ahead, other=0)
            o, mask = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, BN)
            gl.store(p_o + o, b_y.to(p_o.dtype.element_ty), mask=mask)
        mbarrier.arrive(free, count=1)
        i_m, i_n, is_done = next_m, next_n, is_done ^ 1


@gluon.jit
def gate(d_gate, d_up, p_h, s_o, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
         BM: gl.constexpr, HALF: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Gate and up as they are summed, and h = silu(gate)·up of what is stored of them."""
    PIECES: gl.constexpr = BM // ROWS * (HALF // COLUMNS)
    WIDE: gl.constexpr = HALF // COLUMNS
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    for i_tile in range(first, tiles, programs):
        i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP)
        mbarrier.wait(done, is_done)
        for j in gl.static_range(WIDE):
            store(d_gate, [i_m * BM, i_n * HALF + j * COLUMNS], s_o.index(j))
            store(d_up, [i_m * BM, i_n * HALF + j * COLUMNS], s_o.index(WIDE + j))
        for i in range(PIECES):
            b_gate = s_pieces.index(i).load(BLOCKED).to(gl.float32)
            b_up = s_pieces.index(PIECES + i).load(BLOCKED).to(gl.float32)
            o, mask = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, HALF)
            b_h = 1 / (gl.exp(-b_gate) + 1) * b_gate * b_up
            gl.store(p_h + o, b_h.to(p_h.dtype.element_ty), mask=mask)
        tma.store_wait(0)
        mbarrier.arrive(free, count=1)
        is_done ^= 1


@gluon.jit
def gate_backward(p_d, p_h, p_x, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
                  BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """[dgate, dup] of the sum dh and [gate, up] at p_x, a piece of those loaded ahead; and h where p_h is given."""
    PIECES: gl.constexpr = BM // ROWS * (BN // COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    i_m, i_n = place(first, tiles_m, tiles_n, GROUP)
    o, mask = piece(0, i_m, i_n, m, n, 2 * n, BLOCKED, BM, BN)
    b_gate, b_up = gl.load(p_x + o, mask=mask, other=0), gl.load(p_x + n + o, mask=mask, other=0)
    for i_tile in range(first, tiles, programs):
        next_m, next_n = place(gl.minimum(i_tile + programs, tiles - 1), tiles_m, tiles_n, GROUP)
        mbarrier.wait(done, is_done)
        for i in range(PIECES):
            b_d = s_pieces.index(i).load(BLOCKED).to(gl.float32)
            i_ahead, m_ahead, n_ahead = following(i, PIECES, i_m, i_n, next_m, next_n)
            o_ahead, mask_ahead = piece(i_ahead, m_ahead, n_ahead, m, n, 2 * n, BLOCKED, BM, BN)
            b_gate_ahead = gl.load(p_x + o_ahead, mask=mask_ahead, other=0)
            b_up_ahead = gl.load(p_x + n + o_ahead, mask=mask_ahead, other=0)
            b_g, b_u = b_gate.to(gl.float32), b_up.to(gl.float32)
            b_s = 1 / (gl.exp(-b_g) + 1)
            b_silu = b_s * b_g
            o, mask = piece(i, i_m, i_n, m, n, 2 * n, BLOCKED, BM, BN)
            d_gate = b_d * (b_s + b_silu * (1 - b_s)) * b_u
            gl.store(p_d + o, d_gate.to(p_d.dtype.element_ty), mask=mask)
            gl.store(p_d + n + o, (b_d * b_silu).to(p_d.dtype.element_ty), mask=mask)
            if p_h is not None:
                o_h, _ = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, BN)
                gl.store(p_h + o_h, (b_silu * b_u).to(p_h.dtype.element_ty), mask=mask)
            b_gate, b_up = b_gate_ahead, b_up_ahead
        mbarrier.arrive(free, count=1)
        i_m, i_n, is_done = next_m, next_n, is_done ^ 1


# --- The kernel -------------------------------------------------------------------------------------------------------


@gluon.jit
def seen_as(s, SHAPE: gl.constexpr):
    """Shared memory in another shape."""
    if RENAMED:
        return s.reinterpret(s.dtype, SHAPE, s.layout)
    else:
        return s._reinterpret(s.dtype, SHAPE, s.layout)


@gluon.jit
def finish(d_gate, d_up, p_o, p_h, p_r, s_o, done, free, tiles_m, tiles_n, m, n, FORM: gl.constexpr,
           FINISHERS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Finish the tiles of [BM, BN] that are laid down, as FORM says."""
    s_pieces = seen_as(s_o, [BN // COLUMNS * (BM // ROWS), ROWS, COLUMNS])
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [FINISHERS, 1], [1, 0])
    if FORM == RESIDUAL:
        add_residual(p_o, p_r, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN, GROUP)
    elif FORM == GATED:
        gate(d_gate, d_up, p_h, s_o, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN // 2, GROUP)
    else:
        gate_backward(p_o, p_h, p_r, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN, GROUP)


@gluon.jit(do_not_specialize=["m"])
def specialized(d_x, d_w, d_gate, d_up, p_o, p_h, p_r, m, n, k, FORM: gl.constexpr, TURNED: gl.constexpr,
                BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                WARPS: gl.constexpr, FINISHERS: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """Tiles of x·w, or x·wᵀ where it is TURNED, taken in turn by programs that stay, finished as FORM says."""
    s_x = gl.allocate_shared_memory(d_x.dtype, [STAGES, BM, BK], d_x.layout)
    if TURNED:
        s_w = gl.allocate_shared_memory(d_w.dtype, [STAGES, BN, BK], d_w.layout)
    else:
        s_w = gl.allocate_shared_memory(d_w.dtype, [STAGES, BK, BN], d_w.layout)
    # The layout of x's tiles, COLUMNS wide as well: rows of 128 bytes, so that a piece of them is a range of memory.
    s_o = gl.allocate_shared_memory(d_x.dtype, [BN // COLUMNS, BM, COLUMNS], d_x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    OWN: gl.constexpr = BN // 2 if FORM == GATED else BN
    tiles_m, tiles_n, steps = gl.cdiv(m, BM), gl.cdiv(n, OWN), gl.cdiv(k, BK)
    gl.warp_specialize([
        (multiply, (d_x, d_w, s_x, s_w, s_o, full, done, free, tiles_m, tiles_n, n, steps, FORM, TURNED, BM, BN, BK,
                    STAGES, GROUP, WARPS)),
        (finish, (d_gate, d_up, p_o, p_h, p_r, s_o, done, free, tiles_m, tiles_n, m, n, FORM, FINISHERS, BM, BN,
                  GROUP)),
    ], [FINISHERS], [REGISTERS])  # fmt: skip


# --- Launching it -----------------------------------------------------------------------------------------------------


def _tiles(x: Array, n: int, own: int) -> int:
    """How many tiles of BM rows and `own` columns there are, where this kernel is the faster way; otherwise 0."""
    if x.dtype.itemsize != 2 or x.ndim != 2 or not x.size or is_interpreted():
        return 0
    properties = backend_of(x.device).driver.properties
    tiles = triton.cdiv(x.shape[0], TILE[0]) * triton.cdiv(n, own)
    fits = properties.capability[0] == 9 and tiles < 1 << 21 and x.shape[0] * 2 * n < 1 << 31
    return tiles if fits and tiles >= ROUNDS * properties.processors else 0


def _region(a: Array, rows: int, columns: int) -> Descriptor:
    """Tiles of a matrix, with their layout in shared memory."""
    kind = {"bfloat16": gl.bfloat16, "float16": gl.float16}[a.dtype.name]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return Descriptor(a, a.shape, a.strides, (rows, columns), layout=repr(layout))


def _are_describable(*arrays: Array) -> bool:
    return all(is_describable(a, a.shape, a.strides) for a in arrays)


def _launch(
    form: gl.constexpr, x: Array, w: Array, n: int, tiles: int, out: Array, *, turned: bool, h: Array | None = None,
    read: Array | None = None, parts: tuple[Array, Array] | None = None,
) -> None:  # fmt: skip
    (m, k), (bm, bn, bk) = x.shape, TILE
    own = bn // 2 if form is GATED else bn
    gate_up = [_region(a, bm, COLUMNS.value) for a in parts] if parts else [None, None]
    launch(
        specialized, min(tiles, backend_of(x.device).driver.properties.processors), _region(x, bm, bk),
        _region(w, own, bk) if turned else _region(w, bk, bn), *gate_up, out, h, read, m, n, k, FORM=form.value,
        TURNED=turned, BM=bm, BN=bn, BK=bk, STAGES=STAGES, GROUP=GROUP, WARPS=WARPS, FINISHERS=FINISHERS,
        REGISTERS=REGISTERS, num_warps=WARPS,
    )  # fmt: skip


def product_and_residual_into(out: Array, x: Array, weight: Array, residual: Array) -> bool:
    """out = x·weightᵀ + residual; the product is rounded before the addition.

    Args:
        out, residual: `[m, n]`, contiguous, of x's 2-byte type.
        x: `[m, k]`.
        weight: `[n, k]`.

    Returns:
        False where this is not the faster way, or the copy engine cannot address the operands; nothing is done then.
    """
    tiles = _tiles(x, weight.shape[0], TILE[1])
    if not tiles or not _are_describable(x, weight, out, residual):
        return False
    _launch(RESIDUAL, x, weight, weight.shape[0], tiles, out, turned=True, read=residual)
    return True


def gated_into(h: Array, gate_up: Array, x: Array, weight: Array) -> bool:
    """gate_up = [gate | up] = x·weightᵀ and h = silu(gate)·up; as `gated.gated_product_into`, and False like above."""
    n = h.shape[1]
    tiles = _tiles(x, n, TILE[1] // 2)
    parts = tuple(gate_up.view((gate_up.shape[0], n), (2 * n, 1), gate_up.offset + i * n) for i in range(2))
    if not tiles or not _are_describable(x, weight, h, *parts):
        return False
    _launch(GATED, x, weight, n, tiles, h, turned=True, h=h, parts=(parts[0], parts[1]))
    return True


def gated_backward_into(d: Array, h: Array | None, g: Array, weight: Array, gate_up: Array) -> bool:
    """[dgate, dup] behind dh = g·weight, which is rounded before; and h = silu(gate)·up. False like above.

    Args:
        d, gate_up: `[m, 2·n]`, contiguous, of g's 2-byte type.
        h: `[m, n]`, contiguous, or None.
        g: `[m, k]`.
        weight: `[k, n]`.
    """
    tiles = _tiles(g, weight.shape[1], TILE[1])
    if not tiles or not _are_describable(g, weight, d, gate_up, *([] if h is None else [h])):
        return False
    _launch(GATED_BACKWARD, g, weight, weight.shape[1], tiles, d, turned=False, h=h, read=gate_up)
    return True
