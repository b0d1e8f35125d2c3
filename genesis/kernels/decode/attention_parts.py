"""Parts of a generation step's keys: how keys are divided, and how the results of the parts are added.

Plain reference: genesis/ops/attention_step.py: `attention_step`. Both kernels that attention_step.py launches use this.

Programs exchange the results of parts through global memory, or in a cluster through shared memory. There each program
sends the others their shares at once, and waits only for the bytes that it receives. A barrier of the cluster would
also wait for all other stores.

GROUP query heads of SIZE columns share a key head. Tiles: BG heads x BD columns, padded; TOGETHER parts at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.kernels.attention.common import fast_exp2
from genesis.kernels.decode.attention_step_tiles import add_text
from genesis.kernels.decode.few_rows_mma import constraints, layout_line
from genesis.kernels.dependents import prefetch
from genesis.kernels.elements import converted
from genesis.kernels.maths import rounded_product
from genesis.ops.attention_step import LARGEST

LIMIT = tl.constexpr(LARGEST)
HEAD = 16  # bytes of shared memory for the barrier, which counts the bytes that a cluster's programs send


@triton.jit
def length_of(p_lengths, p_active, i_row, capacity):
    """Return the number of a row's earlier keys, and whether it is active. An inactive row counts as empty."""
    length = tl.load(p_lengths + i_row, cache_modifier=".cg")
    is_on = (length >= 0) & (length < capacity)
    if p_active is not None:
        is_on = is_on & (tl.load(p_active + i_row) != 0)
    return tl.where(is_on, length, 0).to(tl.int32), is_on


@triton.jit
def part_of(length, window, i_split, splits, PART: tl.constexpr, BN: tl.constexpr):
    """Return the keys [begin, end) of a part, and the number of parts into which the keys before `length` divide."""
    low = length * 0
    if window is not None:
        low = tl.maximum(length + 1 - window, 0)
    part = tl.maximum(tl.cdiv(tl.cdiv(length - low, splits), BN) * BN, PART)
    begin = low + i_split * part
    return begin, tl.minimum(begin + part, length), tl.maximum(tl.cdiv(length - low, part), 1)


@triton.jit
def prefetch_part(p_keys, p_values, begin, end, so_cache, OVERLAP: tl.constexpr, SIZE: tl.constexpr,
                  KEYS: tl.constexpr):  # fmt: skip
    """Prefetch at least the first KEYS keys of [begin, end) and their values to L2."""
    LINE: tl.constexpr = 1024 // p_keys.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    LINES: tl.constexpr = triton.next_power_of_2((SIZE + LINE - 1) // LINE)
    o_line, o_key = tl.arange(0, LINES) * LINE, begin + tl.arange(0, triton.next_power_of_2(KEYS))  # [LINES], [KEYS]
    o_kv = o_key.to(tl.int64)[:, None] * so_cache[3] + o_line[None, :] * so_cache[4]  # [KEYS, LINES]
    m_kv = (o_key < end)[:, None] & (o_line < SIZE)[None, :]  # [KEYS, LINES]
    prefetch(p_keys + o_kv, m_kv, OVERLAP)
    prefetch(p_values + o_kv, m_kv, OVERLAP)


@triton.jit
def saturated(b_x, TYPE: tl.constexpr):
    """Cast to the cache's type. In e4m3 larger numbers become the largest one. NaN is kept."""
    if tl.float8e4nv == TYPE:
        b_x = tl.where(b_x > LIMIT, LIMIT, tl.where(b_x < -LIMIT, -LIMIT, b_x))
    return converted(b_x, TYPE)


@triton.jit
def store_heads(p_x, b_x, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Store the heads of a group from a tile [ROWS, BD], contiguously."""
    o_g, o_d = tl.arange(0, ROWS), tl.arange(0, BD)  # [ROWS], [BD]
    m_x = (o_g < GROUP)[:, None] & (o_d < SIZE)[None, :]  # [ROWS, BD]
    tl.store(p_x + (o_g * SIZE)[:, None] + o_d[None, :], converted(b_x, p_x.dtype.element_ty), mask=m_x)


@triton.jit
def add_parts(p_parts, p_states, active, WORK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
              TOGETHER: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Return o [BG, BD] of one key head's queries, adding its parts in order, TOGETHER of them at a time."""
    o_s, o_g, o_d = tl.arange(0, TOGETHER), tl.arange(0, BG), tl.arange(0, BD)
    b_max = tl.full((BG,), -float("inf"), WORK)  # [BG]
    b_sum = tl.zeros((BG,), WORK)  # [BG]
    b_acc = tl.zeros((BG, BD), WORK)  # [BG, BD]
    for first in range(0, active, TOGETHER):
        o_part = first + o_s  # [TOGETHER]
        m_state = (o_part < active)[:, None] & (o_g < GROUP)[None, :]  # [TOGETHER, BG]
        p_state = p_states + (o_part * (2 * GROUP))[:, None] + o_g[None, :]  # [TOGETHER, BG]
        b_m = tl.load(p_state, mask=m_state, other=-float("inf"), cache_modifier=".cg")  # [TOGETHER, BG]
        b_l = tl.load(p_state + GROUP, mask=m_state, other=0, cache_modifier=".cg")  # [TOGETHER, BG]
        m_part = m_state[:, :, None] & (o_d < SIZE)[None, None, :]  # [TOGETHER, BG, BD]
        o_x = (o_part * (GROUP * SIZE))[:, None, None] + (o_g * SIZE)[None, :, None] + o_d[None, None, :]
        b_o = tl.load(p_parts + o_x, mask=m_part, other=0, cache_modifier=".cg")  # [TOGETHER, BG, BD]
        b_new_max = tl.maximum(b_max, tl.max(b_m, 0))  # [BG]
        b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # padding heads have no score
        b_factor, b_rescale = fast_exp2(b_m - b_base[None, :]), fast_exp2(b_max - b_base)  # [TOGETHER, BG], [BG]
        b_factors = tl.broadcast_to(b_factor[:, :, None], (TOGETHER, BG, BD))  # [TOGETHER, BG, BD]
        b_acc = b_acc * b_rescale[:, None] + tl.sum(rounded_product(b_o, b_factors), 0)  # [BG, BD]
        b_sum = b_sum * b_rescale + tl.sum(rounded_product(b_l, b_factor), 0)  # [BG]
        b_max = b_new_max
    return b_acc / tl.where(o_g < GROUP, b_sum, 1.0)[:, None]  # [BG, BD]


@triton.jit
def end_part(p_result, p_parts, p_states, p_counter, active, WORK: tl.constexpr, GROUP: tl.constexpr,
             SIZE: tl.constexpr, TOGETHER: tl.constexpr, BD: tl.constexpr, CLUSTER: tl.constexpr = 1):  # fmt: skip
    """Count a stored part, to which each of CLUSTER programs contributes a share. The program that completes the last
    part adds all parts and resets the counter to 0.

    One thread increments the counter, with release and acquire semantics, after a barrier of all threads. So the stores
    of a program precede its count, and all counts precede the sum.
    """
    tl.debug_barrier()
    if tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu") == active * CLUSTER - 1:
        BG: tl.constexpr = triton.next_power_of_2(GROUP)
        b_o = add_parts(p_parts, p_states, active, WORK, GROUP, SIZE, TOGETHER, BG, BD)  # [BG, BD]
        store_heads(p_result, b_o, GROUP, SIZE, BG, BD)
        tl.store(p_counter, 0)


# --- In a cluster -----------------------------------------------------------------------------------------------------


@constexpr_function
def share_of(part: int, cluster: int) -> int:
    """Return how many of a thread's `part` elements one program adds. With many programs the last ones add none."""
    return max(part // cluster, 1)


@constexpr_function
def entering_text(warps: int, cluster: int, part: int, heads: int) -> str:
    """Return the assembly of `enter_cluster`, which sets $0 to the address of shared memory."""
    elements = cluster * warps * 32 * share_of(part, cluster)
    received = 4 * elements * heads // 8 + cluster * heads * 8  # bytes
    return f"""{{ .shared .align 16 .b8 sent[{HEAD + 4 * elements + cluster * 64}]; .reg .pred one; .reg .b32 thread;
    mov.u32 $0, sent;
    mov.u32 thread, %tid.x;
    setp.eq.u32 one, thread, 0;
    @one mbarrier.init.shared::cta.b64 [$0], 1;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {received};
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned; }}"""


@triton.jit
def enter_cluster(BS: tl.constexpr, CLUSTER: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr):
    """Prepare shared memory to receive, signal the other programs that they may send, and return its address."""
    TEXT: tl.constexpr = entering_text(BS, CLUSTER, PART, HEADS)
    return tl.inline_asm_elementwise(TEXT, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def await_cluster():
    """Wait until all programs of the cluster have entered it."""
    tl.inline_asm_elementwise("barrier.cluster.wait.acquire.aligned; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@constexpr_function
def gathered_text(warps: int, cluster: int, part: int, heads: int) -> str:
    """Return the assembly of `gather`.

    The results start at $0, $8 and $16: a thread's share of each, followed by -0. Inputs: $24 is the address; the
    greatest score, the sum and o (`part` elements per thread) start at $32, $40 and $48. Shared memory holds the
    elements that each program sends at [rank, thread, share], followed by a score and a sum at [rank, g].
    """
    share, threads = share_of(part, cluster), 32 * warps
    states = HEAD + cluster * threads * share * 4
    vector = {1: "f32", 2: "v2.f32", 4: "v4.f32"}[share]
    floats = [f"{name}{i}" for name, count in (("m", cluster), ("l", cluster), ("v", share)) for i in range(count)]
    send = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    lines = [
        f"{{ {layout_line(warps)}",
        ".reg .b32 rank, thread, at, own, there, to, head; .reg .pred first, mine, none, done;",
        f".reg .f32 {', '.join(floats)}, most;",
        "mov.u32 thread, %tid.x;",
        "mov.u32 rank, %cluster_ctarank;",
        "shr.u32 head, thread, 2;",
        "and.b32 at, thread, 3;",
        "setp.eq.u32 first, at, 0;",
        f"setp.lt.and.u32 first, head, {heads}, first;",  # one thread per head, in the first warp
        "and.b32 head, head, 7;",
        f"setp.lt.u32 mine, head, {heads};",
        "shl.b32 head, head, 3;",
        f"mul.lo.u32 own, thread, {share * 4};",
        "mad.lo.u32 at, rank, 64, head;",
        f"mad.lo.u32 to, rank, {threads * share * 4}, own;",
    ]
    # Send every program its share of this program's elements, and the scores and sums.
    for r in range(min(cluster, part)):
        values = ", ".join(f"${48 + r * share + i}" for i in range(share))
        lines += [
            f"mapa.shared::cluster.u32 there, $24, {r};",
            "{ .reg .b32 a, b;",
            "add.u32 a, there, to; add.u32 b, there, at;",
            f"@mine {send}.{vector} [a + {HEAD}], {f'{{{values}}}' if share > 1 else values}, [there];",
            f"@first {send}.v2.f32 [b + {states}], {{$32, $40}}, [there]; }}",
        ]
    # Wait for the shares of all programs, and add them relative to the greatest score.
    lines += ["add.u32 head, head, $24;", "add.u32 own, own, $24;"]
    if cluster > part:
        lines += [f"setp.ge.u32 done, rank, {part};", "@done bra.uni CAME;"]
    lines += ["WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$24], 0;", "@!done bra WAIT;", "CAME:"]
    lines += [f"ld.shared.v2.f32 {{m{r}, l{r}}}, [head + {states + 64 * r}];" for r in range(cluster)]
    lines += ["mov.f32 most, m0;", *(f"max.f32 most, most, m{r};" for r in range(1, cluster))]
    lines += ["setp.eq.f32 none, most, 0fFF800000;", "mov.f32 $0, most;", "@none mov.f32 most, 0f00000000;"]
    for r in range(cluster):
        loaded = ", ".join(f"v{i}" for i in range(share))
        lines += [f"sub.f32 m{r}, m{r}, most;", f"ex2.approx.ftz.f32 m{r}, m{r};", add_text(8, f"l{r}", r)]
        where = f"[own + {HEAD + r * threads * share * 4}]"
        lines.append(f"ld.shared.{vector} {f'{{{loaded}}}' if share > 1 else loaded}, {where};")
        lines += [add_text(16 + i, f"v{i}", r) for i in range(share)]
    lines += [f"mov.f32 ${8 * k + i}, ${8 * k};" for k in range(2) for i in range(1, share)]
    lines += [f"mov.f32 ${8 * k + i}, 0f80000000;" for k in range(3) for i in range(share, 8)]
    return "\n".join([*lines, "}"])


@triton.jit
def gather(address, b_max, b_sum, o, BS: tl.constexpr, CLUSTER: tl.constexpr, PART: tl.constexpr,
           HEADS: tl.constexpr):  # fmt: skip
    """Reduce over all programs of a cluster. Return each head's greatest score and sum, and this program's share of o.

    Args:
        address: address of shared memory, from `enter_cluster`.
        b_max: greatest scores; thread (g, t) holds head g, and only the first HEADS heads are used.
        b_sum: sums, in the same layout.
        o: results; a thread's first PART elements are used.
    """
    TEXT: tl.constexpr = gathered_text(BS, CLUSTER, PART, HEADS)
    where: tl.constexpr = constraints(24, 8, 24)
    given = (tl.full(o.shape, 0, tl.int32) + address, b_max, b_sum, o)
    return tl.inline_asm_elementwise(TEXT, where, given, (tl.float32, tl.float32, tl.float32), is_pure=False, pack=8)
