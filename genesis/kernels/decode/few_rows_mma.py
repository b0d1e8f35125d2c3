"""Matmuls with up to 32 rows of x on the tensor cores, with operands in registers.

few_rows.py names the plain reference and launches the kernel.

W is operand A of m16n8k16 and x is operand B. A thread loads 16 bytes of a row along K at once, and these are its part
of the operand. Only the sums of the warps pass through shared memory, at the end. An MMA takes the 32 elements along K
in another order than memory has them, but the order is the same for W and x, so every product is summed once.

x is [M, K] and W is [N, K]. Tiles are [BS * 8, 32]: 8 rows of W or x and, for each of BS warps, 32 elements along K.
Vectors [BS * 32] have one element per thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.decode.few_rows_fma import after_loads, load_tile, rms_reciprocal, unrolled
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.elements import converted
from genesis.kernels.gemm.gated import swiglu

WIDENED = tl.constexpr(
    """{
    .reg .b16 lo, hi, h0, h1, h2, h3;
    .reg .b32 a, b;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 a, lo;
    cvt.rn.f16x2.e4m3x2 b, hi;
    mov.b32 {h0, h1}, a;
    mov.b32 {h2, h3}, b;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
    }"""
)
SCALED = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")


@constexpr_function
def layout_line(warps: int) -> str:
    """Return the comment in the assembly with which `compile` compares the layout that the compiler gives all tiles."""
    layout = f"sizePerThread = [1, 8], threadsPerWarp = [8, 4], warpsPerCTA = [{warps}, 1], order = [1, 0]"
    return f"// for #ttg.blocked<{{{layout}}}>"


@constexpr_function
def mma_of(kind: tl.dtype) -> str:
    """Return the instruction m16n8k16 for operands of a type."""
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32".replace("fp16", "f16")


@constexpr_function
def quad_text(at: int) -> str:
    """Return four registers from $at on as an operand."""
    return "{" + ", ".join(f"${at + i}" for i in range(4)) + "}"


@constexpr_function
def mma_text(kind: tl.dtype, warps: int, blocks: int) -> str:
    """Return the assembly of `mma` for 8 elements per thread: 16 rows of W and one or two blocks of 8 rows of x.

    Registers $0 to $7 are the new sums and $24 to $31 the old ones. W's first 8 rows are $8 to $11 and its other 8 are
    $12 to $15. The blocks of x are $16 to $19 and $20 to $23. A single block of x has two sums, which are added last.
    """
    first, second = "{$8, $12, $9, $13}", "{$10, $14, $11, $15}"
    if blocks == 1:
        steps = [(0, first, "{$16, $17}", 24), (4, second, "{$18, $19}", 28)]
    else:
        steps = [(0, first, "{$16, $17}", 24), (4, first, "{$20, $21}", 28)]
        steps += [(0, second, "{$18, $19}", 0), (4, second, "{$22, $23}", 4)]
    lines = [f"{mma_of(kind)} {quad_text(d)}, {a}, {b}, {quad_text(c)};" for d, a, b, c in steps]
    return "\n".join([f"{{ {layout_line(warps)}", *lines, "}"])


@constexpr_function
def combine_text(warps: int, blocks: int, tiles: int, squares: int) -> str:
    """Return the assembly of `combined` for 8 sums per thread in each of `tiles` tiles and `squares` tiles of squares.

    Every warp stores its sums: element j of a thread at [tile, warp, j, lane]. A thread has 8 elements, or 4 for one
    block of x, whose two sums are added first. Each warp then sums its part of them over all warps into a thread's
    first outputs, and sets the others to -0. The squares of x's rows are on the diagonal of x·xᵀ: each element of the
    part gets the sum of squares of its row.
    """
    elements = 4 if blocks == 1 else 8
    part, count = max(1, elements // warps), tiles + squares
    lines = [
        f"{{ {layout_line(warps)}",
        f".shared .align 16 .b32 sums[{count * warps * elements * 32}];",
        ".reg .b32 base, lane, first, at, own, t, square;",
        ".reg .f32 v;",
        "mov.u32 base, sums;",
        "mov.u32 first, %tid.x;",
        "and.b32 lane, first, 31;",
        "shr.u32 first, first, 5;",
        f"mad.lo.u32 at, first, {elements * 128}, base;",
        "mad.lo.u32 at, lane, 4, at;",
    ]
    # Store the sums of all warps.
    for i in range(count):
        for j in range(elements):
            value = f"${8 * (count + i) + j}"
            if blocks == 1:
                lines.append(f"add.f32 v, {value}, ${8 * (count + i) + j + 4};")
                value = "v"
            lines.append(f"st.shared.f32 [at + {(i * warps * elements + j) * 128}], {value};")
    lines += [
        "bar.sync 0;",
        f"mul.lo.u32 first, first, {part};",
        f"and.b32 first, first, {elements - 1};",  # the first of this warp's elements
        "mad.lo.u32 own, first, 128, base;",
        "mad.lo.u32 own, lane, 4, own;",
        "and.b32 t, lane, 3;",
    ]
    # Add this warp's part over all warps.
    for e in range(part):
        if squares:  # the square of x's row 2·t + b in block q is at lane (2·t + b)·4 + t
            lines += [f"add.u32 at, first, {e};", "and.b32 lane, at, 1;", "mad.lo.u32 square, lane, 128 + 16, base;"]
            lines.append("mad.lo.u32 square, t, 36, square;")
            if blocks > 1:
                lines += ["shr.u32 lane, at, 2;", f"mad.lo.u32 square, lane, {(4 + 2) * 128}, square;"]
        for i in range(count):
            for s in range(warps):
                at = (i * warps + s) * elements * 128
                source = f"[own + {at + e * 128}]" if i < tiles else f"[square + {at}]"
                lines.append(f"ld.shared.f32 {'v' if s else f'${8 * i + e}'}, {source};")
                if s:
                    lines.append(f"add.f32 ${8 * i + e}, ${8 * i + e}, v;")
    lines += [f"mov.f32 ${8 * i + j}, 0f80000000;" for i in range(count) for j in range(part, 8)]
    return "\n".join([*lines, "}"])


@constexpr_function
def constraints(results: int, words: int, sums: int) -> str:
    """Return the constraints for float results, words (pairs of 2-byte operands) and float sums."""
    return ",".join(["=&f"] * results + ["r"] * words + ["f"] * sums)


@triton.jit
def mma(w, w_next, x, x_next, acc, BS: tl.constexpr, X: tl.constexpr):
    """Return acc + the products of 16 rows of W with 8 rows of x, or with 16 if x has more than one block."""
    TEXT: tl.constexpr = mma_text(x.dtype, BS, X)
    return tl.inline_asm_elementwise(TEXT, constraints(8, 16, 8), [w, w_next, x, x_next, acc], tl.float32, True, 8)


@triton.jit
def combined(tiles, BS: tl.constexpr, X: tl.constexpr, N: tl.constexpr, SQUARES: tl.constexpr):
    """Return the sums over all warps of N tiles, each element in one warp. With SQUARES, also return in further tiles
    the sum of squares of each element's row of x.
    """
    COUNT: tl.constexpr = N + SQUARES
    TEXT: tl.constexpr = combine_text(BS, X, N, SQUARES)
    return tl.inline_asm_elementwise(TEXT, constraints(8 * COUNT, 0, 8 * COUNT), tiles, (tl.float32,) * COUNT, False, 8)


@triton.jit
def operand(w, TYPE: tl.constexpr):
    """Return a tile of W in x's type. Assembly converts e4m3 to bfloat16, because Triton's conversion is slow."""
    if w.dtype == tl.float8e4nv and tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(WIDENED, "=r,=r,r", [w], tl.bfloat16, True, 4)
    else:
        return converted(w, TYPE)


@triton.jit
def scaled(x, scale):
    """Return x·scale in bfloat16, rounded once, two elements at a time."""
    return tl.inline_asm_elementwise(SCALED, "=r,r,r", [x, scale], tl.bfloat16, True, 2)


if is_interpreted():

    def mma(w: Any, w_next: Any, x: Any, x_next: Any, acc: Any, BS: Any, X: Any) -> Any:
        rows, columns = (
            np.stack([converted(v, tl.float32).handle.data.reshape(-1, 8, 4, 2, 4) for v in pair])
            for pair in ((w, w_next), (x, x_next))
        )  # [2, BS, 8, 4 threads, 2 MMAs, 4 elements]
        columns = columns.reshape(2, -1, 4, 2, 4, 2, 4)  # rows of x in pairs
        with np.errstate(all="ignore"):
            if getattr(X, "value", X) == 1:
                sums = np.einsum("hsgace,stbace->sgtchb", rows, columns[0])
            else:
                sums = np.einsum("hsgace,qstbace->sgtqhb", rows, columns)
        return acc + tl.tensor(type(acc.handle)(sums.reshape(acc.handle.data.shape), tl.float32), acc.type)

    def combined(tiles: Any, BS: Any, X: Any, N: Any, SQUARES: Any) -> Any:
        warps, blocks, count = (getattr(v, "value", v) for v in (BS, X, N))
        elements = 4 if blocks == 1 else 8
        part, results = max(1, elements // warps), []
        for i, tile in enumerate(tiles):
            of_all = tile.handle.data.reshape(warps, 8, 4, 8 // elements, elements).sum((0, 3))  # [8 g, 4 t, elements]
            if i >= count:
                t, j = np.arange(4)[:, None], np.arange(elements)
                row = of_all[2 * t + j % 2, t, j % 2 if blocks == 1 else j // 4 * 6 + j % 2]  # [4 t, elements]
                of_all = np.broadcast_to(row, of_all.shape)
            own = np.zeros((warps, 8, 4, 8), np.float32)
            for s in range(warps):
                first = s * part % elements
                own[s, :, :, :part] = of_all[..., first : first + part]
            results.append(tl.tensor(type(tile.handle)(own.reshape(tile.handle.data.shape), tl.float32), tile.type))
        return tuple(results)

    operand = converted

    @triton.jit
    def scaled(x, scale):
        return converted(converted(x, tl.float32) * converted(scale, tl.float32), x.dtype)


@triton.jit
def products(w, x, sums, BS: tl.constexpr, X: tl.constexpr, XX: tl.constexpr, WW: tl.constexpr):
    """Add the products of one step to the sums of all pairs of blocks of W and x, and return these."""
    new_sums = ()
    for i in tl.static_range(WW):
        for j in tl.static_range(XX):
            new_sums += (mma(w[2 * i], w[2 * i + 1], x[2 * j], x[2 * j + 1], sums[i * XX + j], BS, X),)
    return new_sums


@triton.jit
def filled(value, P: tl.constexpr, ROWS: tl.constexpr):
    """Return P tiles [ROWS, 32] filled with a value."""
    tiles = ()
    for _ in tl.static_range(P):
        tiles += (tl.full((ROWS, 32), 0, tl.float32) + value,)  # [ROWS, 32]
    return tiles


@triton.jit
def plus(tiles, value, P: tl.constexpr):
    sums = ()
    for i in tl.static_range(P):
        sums += (tiles[i] + value,)  # [BS * 8, 32]
    return sums


@triton.jit
def element(b, E: tl.constexpr):
    """Return element E of each thread's 8 elements, [BS * 32]. A one-dimensional tile is loaded and stored by the
    threads that hold its elements. With more dimensions the compiler would exchange them, with two barriers each time.
    """
    b_none = tl.full((b.shape[0] * 4, 8), -(1 << 31), tl.int32).to(tl.float32, bitcast=True)  # -0
    return tl.sum(tl.where(tl.arange(0, 8)[None, :] == E, tl.reshape(b, (b.shape[0] * 4, 8)), b_none), 1)  # [BS * 32]


@triton.jit
def place_of_element(E: tl.constexpr, J: tl.constexpr, BS: tl.constexpr, PART: tl.constexpr):
    """Return for element E of each thread, [BS * 32]: whether it is used, its row of x and its row of W."""
    o_thread = tl.arange(0, BS * 32)  # [BS * 32]
    o_j = o_thread // 32 * PART + E  # [BS * 32]
    return o_j < J, o_j // 4 * 8 + o_thread % 4 * 2 + o_j % 2, o_j // 2 % 2 * 8 + o_thread // 4 % 8


@triton.jit
def load_steps(p, o_rows, rows, stride, o_k, K: tl.constexpr, ROWS: tl.constexpr, BY: tl.constexpr, STEP: tl.constexpr,
               STEPS: tl.constexpr, ONCE: tl.constexpr = False):  # fmt: skip
    """Load the tiles of STEPS steps, which are STEP elements apart along K; return none if p is None.

    Rows beyond the last read the last row, and a single trip over K needs no masks.

    Args:
        o_rows: first rows; each step also has ROWS - 1 tiles of later rows, BY rows apart.
        ONCE: no other program reads these tiles.
    """
    tiles = ()
    if p is not None:
        for i in tl.static_range(STEPS):
            o = o_k + i * STEP  # [BS * 8, 32]
            for j in tl.static_range(ROWS):
                p_rows = p + tl.minimum(o_rows + j * BY, rows - 1).to(tl.int64) * stride
                if K > STEP * STEPS or (i + 1) * STEP > K:
                    tiles += (load_tile(p_rows + o, o < K, ONCE),)
                else:
                    tiles += (load_tile(p_rows + o, None, ONCE),)
    return tiles


@triton.jit
def load_operands(p_w, p_up, p_norm, o_rows, n, w_row, o_k, K: tl.constexpr, ROWS: tl.constexpr, BY: tl.constexpr,
                  STEP: tl.constexpr, STEPS: tl.constexpr, ONCE: tl.constexpr = False):  # fmt: skip
    """Load the tiles of W, of up and of the norm's weight; see `load_steps`."""
    w = load_steps(p_w, o_rows, n, w_row, o_k, K, ROWS, BY, STEP, STEPS, ONCE)
    up = load_steps(p_up, o_rows, n, w_row, o_k, K, ROWS, BY, STEP, STEPS, ONCE)
    return w, up, load_steps(p_norm, o_rows * 0, 1, 0, o_k, K, 1, BY, STEP, STEPS)


@triton.jit
def load_each(p, o, mask, DEFAULT: tl.constexpr):
    """Load the elements at offsets o in float32, or return DEFAULT if p is None."""
    if p is None:
        return tl.full(mask.shape, DEFAULT, tl.float32)
    else:
        return converted(tl.load(p + o, mask=mask, other=0.0), tl.float32)


@triton.jit(do_not_specialize=["m"])
def few_rows_mma_kernel(p_y, p_h, p_rstd, p_x, p_w, p_up, p_norm, p_bias, p_residual, p_w_scale, m, n, x_row, w_row,
                        y_row, eps, K: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Multiply up to BM rows of x by BN rows of W, or by BN rows of gate and BN of up."""
    allow_next(OVERLAP)
    i_n = tl.program_id(0) * BN
    X: tl.constexpr = BM // 8  # blocks of 8 rows of x
    W: tl.constexpr = BN // 8  # blocks of 8 rows of W
    XX: tl.constexpr = (X + 1) // 2  # pairs of blocks of x
    WW: tl.constexpr = (W + 1) // 2  # pairs of blocks of W
    P: tl.constexpr = XX * WW
    STEP: tl.constexpr = BS * 32
    TRIP: tl.constexpr = STEP * STEPS
    # Thread (g, t) has the sums j = (q, h, b) of a pair of blocks of W and a pair of x: sum j is of W's row g in block
    # h and x's row 2·t + b in block q. At the end each warp has PART of them.
    J: tl.constexpr = 4 if X == 1 else 8
    PART: tl.constexpr = J // BS if J > BS else 1
    o_r, o_k = tl.arange(0, BS * 8)[:, None], tl.arange(0, 32)[None, :]  # [BS * 8, 1], [1, 32]
    o_k, o_r = o_k + o_r // 8 * 32, o_r % 8  # [BS * 8, 32], [BS * 8, 1]
    w, up, scale = (), (), ()  # tiles of STEPS steps
    if EARLY:
        w, up, scale = load_operands(p_w, p_up, p_norm, i_n + o_r, n, w_row, o_k, K, W, 8, STEP, STEPS)
    wait_for_previous(OVERLAP)
    # Load the scales, biases and residuals of this thread's elements.
    added, w_scale, up_scale = (), (), ()
    for e in tl.static_range(PART):
        m_e, o_m, o_n = place_of_element(e, J, BS, PART)  # [BS * 32] each
        for i in tl.static_range(WW):
            m_w, o_w = m_e & (o_n + i * 16 < tl.minimum(n - i_n, BN)), i_n + i * 16 + o_n  # [BS * 32] each
            w_scale += (load_each(p_w_scale, o_w, m_w, 1),)
            if p_up is not None and p_w_scale is not None:
                up_scale += (load_each(p_w_scale + n, o_w, m_w, 1),)
            else:
                up_scale += (load_each(None, o_w, m_w, 1),)
            for j in tl.static_range(XX):
                o_y = (o_m + j * 16).to(tl.int64) * y_row + o_w  # [BS * 32]
                added += (load_each(p_bias, o_w, m_w, 0) + load_each(p_residual, o_y, m_w & (o_m + j * 16 < m), 0),)
    if not EARLY:
        w, up, scale = load_operands(p_w, p_up, p_norm, i_n + o_r, n, w_row, o_k, K, W, 8, STEP, STEPS)
    sums, square = filled(-0.0, P, BS * 8), filled(-0.0, XX, BS * 8)
    sums_up = sums
    # Multiply the tiles along K, with loads of W one trip ahead.
    for i_k in tl.range(0, K, TRIP, loop_unroll_factor=unrolled(p_w.dtype.element_ty, K, TRIP)):
        x = load_steps(p_x, o_r, m, x_row, i_k + o_k, K, X, 8, STEP, STEPS)  # [BS * 8, 32] each
        zero = after_loads()
        sums, sums_up, square = plus(sums, zero, P), plus(sums_up, zero, P), plus(square, zero, XX)
        for i in tl.static_range(STEPS):
            b_x, b_w, b_up = (), (), ()  # pairs of blocks; a single block is paired with itself
            for j in tl.static_range(2 * XX):
                b_x += (x[i * X + j % X],)
            if p_norm is not None:
                normed, squares = (), ()
                for j in tl.static_range(XX):  # products of 16 rows of x with themselves
                    squares += (mma(b_x[2 * j], b_x[2 * j + 1], b_x[2 * j], b_x[2 * j + 1], square[j], BS, X),)
                for j in tl.static_range(2 * XX):
                    normed += (scaled(b_x[j], scale[i]),)  # [BS * 8, 32]
                square, b_x = squares, normed
            for j in tl.static_range(2 * WW):
                b_w += (operand(w[i * W + j % W], p_x.dtype.element_ty),)  # [BS * 8, 32]
                if p_up is not None:
                    b_up += (operand(up[i * W + j % W], p_x.dtype.element_ty),)  # [BS * 8, 32]
            sums = products(b_w, b_x, sums, BS, X, XX, WW)
            if p_up is not None:
                sums_up = products(b_up, b_x, sums_up, BS, X, XX, WW)
        if K > TRIP:
            o_next = i_k + TRIP + o_k
            w, up, scale = load_operands(p_w, p_up, p_norm, i_n + o_r, n, w_row, o_next, K, W, 8, STEP, STEPS)
    # Add the sums of the warps, apply the norm, and store.
    N: tl.constexpr = P if p_up is None else 2 * P
    if p_up is not None:
        sums += sums_up
    if p_norm is not None:
        sums += square
    sums = combined(sums, BS, X, N, XX if p_norm is not None else 0)
    for e in tl.static_range(PART):
        m_e, o_m, o_n = place_of_element(e, J, BS, PART)  # [BS * 32] each
        for i in tl.static_range(P):
            o_x, o_w = o_m + i % XX * 16, i_n + i // XX * 16 + o_n  # [BS * 32] each
            mask = m_e & (o_x < m) & (o_w < tl.minimum(n, i_n + BN))  # [BS * 32]
            b_y, b_up, o_y = element(sums[i], e), 0.0, o_x.to(tl.int64) * y_row + o_w  # [BS * 32] each
            if p_up is not None:
                b_up = element(sums[P + i], e)
            if p_norm is not None:
                b_rstd = rms_reciprocal(element(sums[N + i % XX], e), K, eps)  # [BS * 32]
                b_y, b_up = b_y * b_rstd, b_up * b_rstd
                if p_rstd is not None and i < XX:
                    tl.store(p_rstd + o_x, b_rstd, mask=mask & (o_w == 0))
            b_y = converted(b_y * w_scale[e * WW + i // XX] + added[e * P + i], p_y.dtype.element_ty)
            tl.store(p_y + o_y, b_y, mask=mask)
            if p_up is not None:
                b_up = converted(b_up * up_scale[e * WW + i // XX], p_y.dtype.element_ty)
                tl.store(p_y + n + o_y, b_up, mask=mask)
                b_h = converted(swiglu(b_y, b_up), p_h.dtype.element_ty)  # [BS * 32]
                tl.store(p_h + o_x.to(tl.int64) * n + o_w, b_h, mask=mask)
