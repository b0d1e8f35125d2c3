"""dQ and dK/dV kernels of attention for Hopper, with overlapped wgmmas: heads of 33 to 128 of a 2-byte type.

Plain reference: genesis/ops/attention.py: `attention_backward`. flash.py describes the kernels and computes all other
cases. In those, Triton waits for each score matrix at once. These kernels wait as late as possible: exponentials are
computed while dP's wgmma runs, and the wgmmas that add to dQ, or to dK and dV, overlap the next block's scores. Loads
are issued by TMA a block ahead or more. No branch is taken while a result that it touches is in flight, because ptxas
would then serialize all wgmmas (`tests/kernels/waits.py` checks for that).

The kernels are written in Gluon, Triton's lower-level dialect without an interpreter; results are checked on a GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.attention.common import (
    inverse_rope,
    is_partial,
    key_block,
    left_bounds,
    opaque,
    query_block,
    visible,
    visible_end,
    visible_key_blocks,
)
from genesis.kernels.attention.flash import inside_left_bounds, store_lse_and_delta, visible_query_blocks
from genesis.kernels.attention.problem import AttentionTile, Problem
from genesis.kernels.attention.spilled_ds import store_ds
from genesis.kernels.elements import converted
from genesis.kernels.gemm.warp_specialized import reinterpret, tma_load

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PLAIN = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))
COUNT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

VECTOR_LAYOUT = repr(PLAIN.value)


def overlaps_wgmmas(p: Problem, t: AttentionTile) -> bool:
    """Return whether these kernels support problem `p` in tiles `t`."""
    fits = t[:3] == (64, 64, 4) and p.padded in (64, 128)
    return p.is_hopper and p.uses_tma and fits and not is_interpreted()


# --- Loads, wgmmas, stores --------------------------------------------------------------------------------------------


@gluon.jit
def load_tile(x, s_x, full, i_batch, i_head, start, pred, ROWS: gl.constexpr, BD: gl.constexpr):
    """Issue the load of rows [start, start + ROWS) of a head if `pred` is set."""
    tma_load(x, [i_batch, i_head, start, 0], full, reinterpret(s_x, [1, 1, ROWS, BD], x), pred=pred)


@gluon.jit
def issue_scores(s_a, s_b, LAYOUT: gl.constexpr):
    """Issue a·bᵀ of two tiles in shared memory."""
    ROWS: gl.constexpr = s_a.shape[0]
    COLUMNS: gl.constexpr = s_b.shape[0]
    zero = gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT)
    return warpgroup_mma(s_a, s_b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def issue_sum(b_w, s_x, acc, LAYOUT: gl.constexpr):
    """Issue acc + w·x for weights in registers."""
    weights = gl.convert_layout(b_w, gl.DotOperandLayout(0, LAYOUT, 2))
    return warpgroup_mma(weights, s_x, acc, is_async=True)


@gluon.jit
def zero_sum(ROWS: gl.constexpr, BD: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a zero accumulator. `opaque` keeps the registers of a known zero from merging with the loop's result."""
    return warpgroup_mma_init(opaque(gl.zeros((ROWS, BD), gl.float32, LAYOUT)))


@gluon.jit
def next_stage(stage, STAGES: gl.constexpr):
    return gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def next_block(i, i_head, begin, end):
    """Return the block and head that follow; a head has the blocks [begin, end)."""
    return gl.where(i == end - 1, begin, i + 1), i_head + gl.where(i == end - 1, 1, 0)


@gluon.jit
def load_queries(sources, tiles, full, stage, i_batch, row, padded, i_head, i_block, pred, BM: gl.constexpr,
                 BD: gl.constexpr):  # fmt: skip
    """Issue the loads of a block's q, dO, LSE and delta. Head `i_head` is row `row` + i_head of LSE and delta."""
    q, g, lse, delta = sources
    s_q, s_g, s_lse, s_delta = tiles
    load_tile(q, s_q.index(stage), full, i_batch, i_head, i_block * BM, pred, BM, BD)
    load_tile(g, s_g.index(stage), full, i_batch, i_head, i_block * BM, pred, BM, BD)
    o_row = (row + i_head) * padded + i_block * BM
    tma_load(lse, [o_row], full, s_lse.index(stage), pred=pred)
    tma_load(delta, [o_row], full, s_delta.index(stage), pred=pred)


@gluon.jit
def store_columns(p_x, b_x, start, rows, stride, columns, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Store b_x [ROWS, WIDTH] from column FIRST on."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = b_x.shape[0]
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, BLOCKED))
    o_d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, BLOCKED))
    b_x = gl.convert_layout(converted(b_x, p_x.dtype.element_ty), BLOCKED)
    m = (o_row < rows - start)[:, None] & (o_d < columns)[None, :]
    gl.store(p_x + (o_row * stride)[:, None] + o_d[None, :], b_x, mask=m)


@gluon.jit
def store_gradient(p_x, b_x, p_cos, p_sin, rope_stride, i_part, i_batch, i_head, start, rows, head_dim, sx,
                   ROWS: gl.constexpr, BD: gl.constexpr):  # fmt: skip
    """Store b_x [ROWS, BD] as rows of a head of part `i_part`, through the inverse RoPE if p_cos is given."""
    p_x += i_part.to(gl.int64) * sx[0] + i_head.to(gl.int64) * sx[2] + start.to(gl.int64) * sx[1]
    if p_cos is None:
        store_columns(p_x, b_x, start, rows, sx[1], head_dim, 0, BD)
    else:
        HALF: gl.constexpr = BD // 2
        b_left, b_right = b_x.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()  # [ROWS, HALF] each
        PAIRS: gl.constexpr = b_left.type.layout
        o_row, o_pair = gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS)), gl.arange(0, HALF, gl.SliceLayout(0, PAIRS))
        o_rope = i_batch.to(gl.int64) * rope_stride + start.to(gl.int64) * HALF
        o_rope += (o_row * HALF)[:, None] + o_pair[None, :]  # [ROWS, HALF]
        b_left, b_right = inverse_rope(b_left, b_right, p_cos, p_sin, o_rope, (o_row < rows - start)[:, None])
        store_columns(p_x, b_left, start, rows, sx[1], HALF, 0, HALF)
        store_columns(p_x, b_right, start, rows, sx[1], BD, HALF, HALF)


# --- dQ ---------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["sizes"])
def attention_bwd_dq_wgmma(p_dq, p_stats, p_extents, p_left, q, g, k, v, p_g, p_o, p_lse, p_doc_starts, p_cos, p_sin,
                           rope_stride, sizes, head_dim, scales, strides, CAUSAL: gl.constexpr, TMA: gl.constexpr,
                           DOT: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Compute dQ, and store LSE and delta, as `attention_bwd_dq` does."""
    tokens, keys, batches, heads, group, window = sizes
    scale_log2, sign, scale = scales
    sd, sg, _sq, _sk, _sv, so, sl, ss = strides
    BM: gl.constexpr = TILE[0]
    BN: gl.constexpr = TILE[1]
    BD: gl.constexpr = TILE[2]
    STAGES: gl.constexpr = TILE[3]
    LEFT_BOUND: gl.constexpr = (p_doc_starts is not None) or (window is not None)
    HAS_GAPS: gl.constexpr = ss[2] is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])  # layout of scores
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [4, 1], [1, 0])
    # Allocate shared memory.
    s_q = gl.allocate_shared_memory(q.dtype, [BM, BD], SWIZZLED)
    s_g = gl.allocate_shared_memory(q.dtype, [BM, BD], SWIZZLED)
    s_k = gl.allocate_shared_memory(q.dtype, [STAGES, BN, BD], SWIZZLED)
    s_v = gl.allocate_shared_memory(q.dtype, [STAGES, BN, BD], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    # Masks read the column indices from shared memory, so that they take no registers in the loop.
    s_column = gl.allocate_shared_memory(gl.int32, [BN], COUNT)
    s_column.store(gl.arange(0, BN, gl.SliceLayout(0, S)))
    i_block, i_batch, i_head = query_block(tokens, batches, heads, BM)
    start, diagonal = i_block * BM, keys - tokens
    i_key_head = i_head // group
    o_row, o_d = gl.arange(0, BM, gl.SliceLayout(1, BLOCKED)), gl.arange(0, BD, gl.SliceLayout(0, BLOCKED))
    m_query = start + o_row < tokens  # [BM]
    bounds = left_bounds(p_doc_starts, i_batch, start + o_row, m_query, diagonal, keys, window, ss)
    begin, full_begin, full_end, end, gaps = visible_key_blocks(
        bounds, m_query, start, gl.minimum(start + BM, tokens), diagonal, keys, CAUSAL, LEFT_BOUND, HAS_GAPS, BN
    )
    end -= gaps[1]
    # Fill the pipeline.
    for i in gl.static_range(STAGES - 1):
        loaded, pred = full.index(i), begin + i < end
        mbarrier.expect(loaded, 4 * (BN + (BM if i == 0 else 0)) * BD, pred=pred)
        if i == 0:
            load_tile(q, s_q, loaded, i_batch, i_head, start, pred, BM, BD)
            load_tile(g, s_g, loaded, i_batch, i_head, start, pred, BM, BD)
        start_n = key_block(begin + i, gaps, HAS_GAPS) * BN
        load_tile(k, s_k.index(i), loaded, i_batch, i_key_head, start_n, pred, BN, BD)
        load_tile(v, s_v.index(i), loaded, i_batch, i_key_head, start_n, pred, BN, BD)
    b_lse, b_delta = store_lse_and_delta(  # [BM] each
        p_stats, p_extents, p_left, p_g, p_o, p_lse, bounds, o_row, o_d, (i_batch, i_head, i_block),
        (tokens, keys, batches, heads), head_dim, (sg, so, sl), LEFT_BOUND, HAS_GAPS, gl.float32, BM,
    )  # fmt: skip
    b_lse, b_delta = gl.convert_layout(b_lse, ROW), gl.convert_layout(b_delta, ROW)
    bounds = gl.convert_layout(bounds[0], ROW), gl.convert_layout(bounds[1], ROW), gl.convert_layout(bounds[2], ROW)
    b_end = visible_end(start + gl.arange(0, BM, ROW), diagonal, keys, CAUSAL)  # [BM]
    dq = zero_sum(BM, BD, ACC)  # [BM, BD]
    stage, phase, stage_ahead = 0, 0, STAGES - 1
    for n in range(begin, end):
        i_key = key_block(n, gaps, HAS_GAPS)
        mbarrier.wait(full.index(stage), phase)
        b_s = issue_scores(s_q, s_k.index(stage), S)  # [BM, BN]
        dq = warpgroup_mma_wait(1, deps=(dq,))
        b_dp = issue_scores(s_g, s_v.index(stage), S)  # [BM, BN]
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        # The previous block's stage is empty.
        loaded, pred = full.index(stage_ahead), n + STAGES - 1 < end
        start_ahead = key_block(n + STAGES - 1, gaps, HAS_GAPS) * BN
        mbarrier.expect(loaded, 4 * BN * BD, pred=pred)
        load_tile(k, s_k.index(stage_ahead), loaded, i_batch, i_key_head, start_ahead, pred, BN, BD)
        load_tile(v, s_v.index(stage_ahead), loaded, i_batch, i_key_head, start_ahead, pred, BN, BD)
        if sign is not None:
            b_s = b_s * sign
        b_p = gl.exp2(b_s * scale_log2 - b_lse[:, None])  # [BM, BN]
        b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
        # Mask only the blocks at the ends of the visible range.
        if is_partial(i_key, full_begin, full_end, gaps, HAS_GAPS, BN):
            o_key = i_key * BN + s_column.load(gl.SliceLayout(0, S))  # [BN]
            b_p = gl.where(visible(o_key, b_end, bounds, LEFT_BOUND, HAS_GAPS), b_p, 0.0)  # [BM, BN]
        b_ds = b_p * (b_dp - b_delta[:, None])  # [BM, BN]
        dq = issue_sum(b_ds.to(q.dtype), s_k.index(stage), dq, ACC)
        stage, stage_ahead = next_stage(stage, STAGES), next_stage(stage_ahead, STAGES)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    b_dq = warpgroup_mma_wait(0, deps=(dq,)) * scale
    store_gradient(p_dq, b_dq, p_cos, p_sin, rope_stride, i_batch, i_batch, i_head, start, tokens, head_dim, sd, BM, BD)


# --- dK and dV --------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["sizes"])
def attention_bwd_dkdv_wgmma(p_dk, p_dv, q, g, k, v, p_ds, lse, delta, p_extents, p_left, p_cos, p_sin, rope_stride,
                             sizes, head_dim, scales, strides, CAUSAL: gl.constexpr, HAS_GAPS: gl.constexpr,
                             TMA: gl.constexpr, DOT: gl.constexpr, TILE: gl.constexpr,
                             RATIO: gl.constexpr):  # fmt: skip
    """Compute dK and dV, and store ds if p_ds is given, as `attention_bwd_dkdv` does.

    With heads of 64, three programs share an SM. Their 168 registers leave no room for weights of a wgmma in flight
    while ds is computed, so that both sums are issued together.
    """
    tokens, keys, batches, heads, group, group_part = sizes
    scale_log2, sign, scale = scales
    sd = strides[0]
    BM: gl.constexpr = TILE[0]
    BN: gl.constexpr = TILE[1]
    BD: gl.constexpr = TILE[2]
    STAGES: gl.constexpr = TILE[3]
    EARLY: gl.constexpr = BD > 64
    LEFT_BOUND: gl.constexpr = p_left is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])  # layout of scores
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    # Allocate shared memory.
    s_k = gl.allocate_shared_memory(q.dtype, [BN, BD], SWIZZLED)
    s_v = gl.allocate_shared_memory(q.dtype, [BN, BD], SWIZZLED)
    s_q = gl.allocate_shared_memory(q.dtype, [STAGES, BM, BD], SWIZZLED)
    s_g = gl.allocate_shared_memory(q.dtype, [STAGES, BM, BD], SWIZZLED)
    s_lse = gl.allocate_shared_memory(gl.float32, [STAGES, BM], PLAIN)
    s_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BM], PLAIN)
    s_column = gl.allocate_shared_memory(gl.int32, [BM], COUNT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    s_column.store(gl.arange(0, BM, COLUMN))
    # The first keys, which the most queries see, run first.
    splits = gl.cdiv(group, group_part)
    i_block, i_rest = gl.program_id(0) // (batches * heads * splits), gl.program_id(0) % (batches * heads * splits)
    start_n, diagonal = i_block * BN, keys - tokens
    i_split = i_rest % splits
    i_batch, i_head = i_rest // splits // heads, i_rest // splits % heads
    o_lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
    begin, causal_end, left_begin, end = visible_query_blocks(
        p_extents, i_batch, batches, start_n, tokens, keys, diagonal, o_lane, CAUSAL, LEFT_BOUND, HAS_GAPS, BM, BN,
        RATIO,
    )  # fmt: skip
    padded = gl.cdiv(tokens, BM * RATIO) * (BM * RATIO)
    first_head = i_head * group + i_split * group_part
    count = gl.minimum(group_part, group - i_split * group_part) * (end - begin)
    sources, tiles, row = (q, g, lse, delta), (s_q, s_g, s_lse, s_delta), i_batch * heads * group
    # Fill the pipeline.
    i_ahead, head_ahead = begin, first_head
    for i in gl.static_range(STAGES - 1):
        loaded, pred = full.index(i), i < count
        if i == 0:
            mbarrier.expect(loaded, 4 * (BM + BN) * BD + 8 * BM, pred=pred)
            load_tile(k, s_k, loaded, i_batch, i_head, start_n, pred, BN, BD)
            load_tile(v, s_v, loaded, i_batch, i_head, start_n, pred, BN, BD)
        else:
            mbarrier.expect(loaded, 4 * BM * BD + 8 * BM, pred=pred)
        load_queries(sources, tiles, loaded, i, i_batch, row, padded, head_ahead, i_ahead, pred, BM, BD)
        i_ahead, head_ahead = next_block(i_ahead, head_ahead, begin, end)
    o_key = start_n + gl.arange(0, BN, gl.SliceLayout(1, S))  # [BN]
    dk, dv = zero_sum(BN, BD, ACC), zero_sum(BN, BD, ACC)  # [BN, BD] each
    stage, phase, stage_ahead = 0, 0, STAGES - 1
    i_query, i_query_head = begin, first_head
    # A single loop over heads and blocks keeps the pipeline full between heads.
    for n in range(count):
        mbarrier.wait(full.index(stage), phase)
        s_q_now, s_g_now = s_q.index(stage), s_g.index(stage)  # [BM, BD] each
        b_s = issue_scores(s_k, s_q_now, S)  # [BN, BM]
        dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
        b_dp = issue_scores(s_v, s_g_now, S)  # [BN, BM]
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        loaded, pred = full.index(stage_ahead), n + STAGES - 1 < count
        if EARLY:  # the previous block's stage is empty
            mbarrier.expect(loaded, 4 * BM * BD + 8 * BM, pred=pred)
            load_queries(sources, tiles, loaded, stage_ahead, i_batch, row, padded, head_ahead, i_ahead, pred, BM, BD)
        if sign is not None:
            b_s = b_s * sign
        b_p = gl.exp2(b_s * scale_log2 - s_lse.index(stage).load(COLUMN)[None, :])  # [BN, BM]
        b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
        if CAUSAL and i_query < causal_end:
            o_query = i_query * BM + diagonal + s_column.load(COLUMN)  # [BM]
            b_p = gl.where(o_key[:, None] <= o_query[None, :], b_p, 0.0)
        if LEFT_BOUND and i_query >= left_begin:
            p_bound = p_left + i_batch * padded + i_query * BM + s_column.load(COLUMN)  # [BM]
            b_p = inside_left_bounds(b_p, o_key, p_bound, batches * padded, HAS_GAPS)
        b_ds = (b_p * (b_dp - s_delta.index(stage).load(COLUMN)[None, :])).to(q.dtype)  # [BN, BM]
        dv = issue_sum(b_p.to(q.dtype), s_g_now, dv, ACC)
        dk = issue_sum(b_ds, s_q_now, dk, ACC)
        if p_ds is not None:
            o_row, o_column = gl.arange(0, BN, gl.SliceLayout(1, S)), gl.arange(0, BM, COLUMN)
            store_ds(p_ds, b_ds, o_row, o_column, row + i_query_head, i_block, i_query, tokens, 4)
        if not EARLY:
            mbarrier.expect(loaded, 4 * BM * BD + 8 * BM, pred=pred)
            load_queries(sources, tiles, loaded, stage_ahead, i_batch, row, padded, head_ahead, i_ahead, pred, BM, BD)
        i_ahead, head_ahead = next_block(i_ahead, head_ahead, begin, end)
        i_query, i_query_head = next_block(i_query, i_query_head, begin, end)
        stage, stage_ahead = next_stage(stage, STAGES), next_stage(stage_ahead, STAGES)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    b_dk, b_dv = warpgroup_mma_wait(0, deps=(dk, dv))
    i_part = i_split * batches + i_batch
    store_gradient(p_dv, b_dv, None, None, 0, i_part, i_batch, i_head, start_n, keys, head_dim, sd, BN, BD)
    store_gradient(
        p_dk, b_dk * scale, p_cos, p_sin, rope_stride, i_part, i_batch, i_head, start_n, keys, head_dim, sd, BN, BD
    )
