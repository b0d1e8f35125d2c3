"""What the programs of a cluster add up, each a share of it, through each other's shared memory.

Plain reference: parts that go through global memory, attention_parts.py.

Every program sends the others their shares as they are made, and each waits for the bytes that are to come to it. So
nobody waits for what else was stored, as in a barrier of the cluster.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.kernels.decode.attention_step_tiles import added
from genesis.kernels.decode.few_rows_mma import constraints, layout_line

HEAD = 16  # bytes of shared memory before what is sent: the barrier that counts it


@constexpr_function
def share_of(part: int, cluster: int) -> int:
    """Of a thread's `part` elements those that a program adds up; the last programs of many have none."""
    return max(part // cluster, 1)


@constexpr_function
def entering_text(warps: int, cluster: int, part: int, heads: int) -> str:
    """The assembly of `enter_cluster`: the address of shared memory in $0."""
    elements = cluster * warps * 32 * share_of(part, cluster)
    comes = 4 * elements * heads // 8 + cluster * heads * 8  # bytes
    return f"""{{ .shared .align 16 .b8 sent[{HEAD + 4 * elements + cluster * 64}]; .reg .pred one; .reg .b32 thread;
    mov.u32 $0, sent;
    mov.u32 thread, %tid.x;
    setp.eq.u32 one, thread, 0;
    @one mbarrier.init.shared::cta.b64 [$0], 1;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {comes};
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned; }}"""


@triton.jit
def enter_cluster(BS: tl.constexpr, CLUSTER: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr):
    """Make shared memory ready for what comes and tell the other programs, so that they may send it: its address."""
    TEXT: tl.constexpr = entering_text(BS, CLUSTER, PART, HEADS)
    return tl.inline_asm_elementwise(TEXT, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def await_cluster():
    """Wait until all programs of the cluster have entered it."""
    tl.inline_asm_elementwise("barrier.cluster.wait.acquire.aligned; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@constexpr_function
def gathered_text(warps: int, cluster: int, part: int, heads: int) -> str:
    """The assembly of `gather`: results from $0, $8 and $16 on, as many as a thread has, the others -0; $24 is the
    address, from $32, $40 and $48 on come the greatest score, the sum, and o, of which a thread has `part` elements.

    Shared memory has what each program sends at [rank, thread, share], then a score and a sum at [rank, g].
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
        f"setp.lt.and.u32 first, head, {heads}, first;",  # of the first warp
        "and.b32 head, head, 7;",
        f"setp.lt.u32 mine, head, {heads};",
        "shl.b32 head, head, 3;",
        f"mul.lo.u32 own, thread, {share * 4};",
        "mad.lo.u32 at, rank, 64, head;",
        f"mad.lo.u32 to, rank, {threads * share * 4}, own;",
    ]
    for r in range(min(cluster, part)):
        values = ", ".join(f"${48 + r * share + i}" for i in range(share))
        lines += [
            f"mapa.shared::cluster.u32 there, $24, {r};",
            "{ .reg .b32 a, b;",
            "add.u32 a, there, to; add.u32 b, there, at;",
            f"@mine {send}.{vector} [a + {HEAD}], {f'{{{values}}}' if share > 1 else values}, [there];",
            f"@first {send}.v2.f32 [b + {states}], {{$32, $40}}, [there]; }}",
        ]
    lines += ["add.u32 head, head, $24;", "add.u32 own, own, $24;"]
    if cluster > part:
        lines += [f"setp.ge.u32 done, rank, {part};", "@done bra.uni CAME;"]
    lines += ["WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$24], 0;", "@!done bra WAIT;", "CAME:"]
    lines += [f"ld.shared.v2.f32 {{m{r}, l{r}}}, [head + {states + 64 * r}];" for r in range(cluster)]
    lines += ["mov.f32 most, m0;", *(f"max.f32 most, most, m{r};" for r in range(1, cluster))]
    lines += ["setp.eq.f32 none, most, 0fFF800000;", "mov.f32 $0, most;", "@none mov.f32 most, 0f00000000;"]
    for r in range(cluster):
        loaded = ", ".join(f"v{i}" for i in range(share))
        lines += [f"sub.f32 m{r}, m{r}, most;", f"ex2.approx.ftz.f32 m{r}, m{r};", added(8, f"l{r}", r)]
        where = f"[own + {HEAD + r * threads * share * 4}]"
        lines.append(f"ld.shared.{vector} {f'{{{loaded}}}' if share > 1 else loaded}, {where};")
        lines += [added(16 + i, f"v{i}", r) for i in range(share)]
    lines += [f"mov.f32 ${8 * k + i}, ${8 * k};" for k in range(2) for i in range(1, share)]
    lines += [f"mov.f32 ${8 * k + i}, 0f80000000;" for k in range(3) for i in range(share, 8)]
    return "\n".join([*lines, "}"])


@triton.jit
def gather(address, b_max, b_sum, o, BS: tl.constexpr, CLUSTER: tl.constexpr, PART: tl.constexpr,
           HEADS: tl.constexpr):  # fmt: skip
    """Of all programs of a cluster the greatest score of each head, the sum and o, of which a program has a share.

    Args:
        address: of the shared memory with which the program entered the cluster.
        b_max, b_sum, o: of thread (g, t) head g's, in the first PART elements of o; of heads the first HEADS count.
    """
    TEXT: tl.constexpr = gathered_text(BS, CLUSTER, PART, HEADS)
    where: tl.constexpr = constraints(24, 8, 24)
    given = (tl.full(o.shape, 0, tl.int32) + address, b_max, b_sum, o)
    return tl.inline_asm_elementwise(TEXT, where, given, (tl.float32, tl.float32, tl.float32), is_pure=False, pack=8)
