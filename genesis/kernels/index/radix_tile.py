"""The radix sort inside a program: sort a tile by one digit of 8 bits, and count digits.

Plain reference: a stable argsort of the digits, and `np.bincount`; `radix_sort.py` launches the kernels.

A thread holds the elements j · threads + thread of a tile. To count ranks warp by warp, elements are renumbered so that
each warp holds a contiguous part and neighbouring lanes hold neighbouring elements (`order_in_tile`).

Tiles: T elements, W warps. The assembly handles N elements per thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.backend.cuda.driver import is_interpreted

DIGITS = tl.constexpr(256)
WARPS = tl.constexpr(8)  # one thread per digit


@constexpr_function
def layout_line(warps: int) -> str:
    """Return the line that names the expected layout of all tiles; `compile` compares the compiler's layout with it."""
    layout = f"sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [{warps}], order = [0]"
    return f"// for #ttg.blocked<{{{layout}}}>"


@constexpr_function
def rank_text(digit: str, rank: str) -> str:
    """Return the assembly of an element's rank among its warp's elements with the same digit.

    Ballots, one per bit, find lanes with equal digits (`match.any` is slower). The warp counts digits in shared memory.
    """
    lines = []
    for bit in range(8):
        lines += [f"and.b32 t, {digit}, {1 << bit};", "setp.ne.b32 p, t, 0;", "vote.sync.ballot.b32 v, p, -1;"]
        lines += ["@!p not.b32 v, v;", "and.b32 mask, mask, v;" if bit else "mov.b32 mask, v;"]
    lines += [
        f"mad.lo.u32 at, {digit}, 4, own;",
        "ld.shared.b32 v, [at];",
        "and.b32 t, mask, below;",
        "popc.b32 t, t;",
        f"add.u32 {rank}, v, t;",
        "and.b32 t, mask, above;",
        "setp.eq.b32 p, t, 0;",  # the last lane of a digit
        f"add.u32 t, {rank}, 1;",
        "bar.warp.sync -1;",
        "@p st.shared.b32 [at], t;",
        "bar.warp.sync -1;",
    ]
    return "\n".join(lines)


@constexpr_function
def sums_text(warps: int) -> str:
    """Return the assembly that turns counts [warps, 256] into the counts of earlier warps and each digit's first rank.

    A thread handles one digit and leaves its count in the tile in `total`.
    """
    sums = warps * 1024  # byte offset of the warps' sums; the first ranks of digits follow them
    lines = ["bar.sync 0;", "setp.lt.u32 p, thread, 256;", "mad.lo.u32 at, thread, 4, base;", "mov.b32 total, 0;"]
    for w in range(warps):
        lines += [f"@p ld.shared.b32 v, [at + {1024 * w}];", f"@p st.shared.b32 [at + {1024 * w}], total;"]
        lines += ["@p add.u32 total, total, v;"]
    lines += ["mov.b32 sum, total;"]
    for distance in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 t|q, sum, {distance}, 0, -1;", "@q add.u32 sum, sum, t;"]
    lines += [
        "setp.eq.u32 q, lane, 31;",
        "and.pred q, p, q;",
        "mad.lo.u32 t, warp, 4, base;",
        f"@q st.shared.b32 [t + {sums}], sum;",
        "sub.u32 sum, sum, total;",
        "bar.sync 0;",
    ]
    for w in range(7):
        lines += [f"ld.shared.b32 t, [base + {sums + 4 * w}];", f"setp.gt.u32 q, warp, {w};"]
        lines += ["@q add.u32 sum, sum, t;"]
    return "\n".join([*lines, f"@p st.shared.b32 [at + {sums + 32}], sum;", "bar.sync 0;"])


@constexpr_function
def exchange_text(sources: list[str], results: list[str], words: int) -> str:
    """Return the assembly that stores each word of a payload at its rank in shared memory, then loads it in order."""
    lines = []
    for word in range(words):
        lines.append("bar.sync 0;")
        for j, value in enumerate(sources):
            if words == 2:
                lines.append(f"mov.b64 {{low, high}}, {value};")
            source = value if words == 1 else ("low", "high")[word]
            lines.append(f"st.shared.b32 [rank{j}], {source};")
        lines.append("bar.sync 0;")
        for j, value in enumerate(results):
            if words == 1:
                lines.append(f"ld.shared.b32 {value}, [own + {128 * j}];")
            elif word == 0:
                lines += [f"ld.shared.b32 low, [own + {128 * j}];", f"mov.b64 {value}, {{low, low}};"]
            else:
                lines += [f"mov.b64 {{low, high}}, {value};", f"ld.shared.b32 high, [own + {128 * j}];"]
                lines += [f"mov.b64 {value}, {{low, high}};"]
    return "\n".join(lines)


@constexpr_function
def step_text(warps: int, items: int, *payloads: int) -> str:
    """Return the assembly of `sort_by_digit` for `items` elements per thread and payloads of 1 or 2 words each.

    It writes the sorted payloads and the counts, and reads the digits and the payloads.
    """
    firsts = warps * 1024 + 32  # byte offset of the first ranks of digits
    results = (len(payloads) + 1) * items
    lines = [
        f"{{ {layout_line(warps)}",
        f".shared .align 16 .b32 words[{max(firsts // 4 + 256, 32 * warps * items)}];",
        ".reg .pred p, q;",
        ".reg .b32 base, thread, lane, warp, own, at, mask, t, v, total, sum, below, above, low, high;",
        f".reg .b32 rank<{items}>;",
        # Thread, lane and warp, and the warp's counts in shared memory, cleared.
        "mov.u32 base, words;",
        "mov.u32 thread, %tid.x;",
        "mov.u32 below, %lanemask_lt;",
        "mov.u32 above, %lanemask_gt;",
        "and.b32 lane, thread, 31;",
        "shr.u32 warp, thread, 5;",
        "mad.lo.u32 own, warp, 1024, base;",
        "mad.lo.u32 at, lane, 4, own;",
        *(f"st.shared.b32 [at + {128 * i}], 0;" for i in range(8)),
        "bar.warp.sync -1;",
        *(rank_text(f"${results + j}", f"rank{j}") for j in range(items)),
        sums_text(warps),
    ]
    # Rank in the tile = rank in the warp + the digit's counts of earlier warps + the digit's first rank.
    for j in range(items):
        lines += [f"mad.lo.u32 at, ${results + j}, 4, own;", "ld.shared.b32 v, [at];"]
        lines += [f"mad.lo.u32 at, ${results + j}, 4, base;", f"ld.shared.b32 t, [at + {firsts}];"]
        lines += [f"add.u32 rank{j}, rank{j}, v;", f"add.u32 rank{j}, rank{j}, t;"]
        lines += [f"mad.lo.u32 rank{j}, rank{j}, 4, base;"]
    lines += [f"mad.lo.u32 own, warp, {128 * items}, base;", "mad.lo.u32 own, lane, 4, own;"]
    # Move the payloads to their ranks.
    for i, words in enumerate(payloads):
        sources = [f"${results + (i + 1) * items + j}" for j in range(items)]
        lines.append(exchange_text(sources, [f"${i * items + j}" for j in range(items)], words))
    lines += ["bar.sync 0;", f"selp.b32 ${results - items}, total, 0, p;"]
    lines += [f"mov.b32 ${results - items + j}, 0;" for j in range(1, items)]
    return "\n".join([*lines, "}"])


@constexpr_function
def step_constraints(items: int, *payloads: int) -> str:
    """Return the constraints of registers that are written (before all inputs are read) and read."""
    kinds = ["l" if words == 2 else "r" for words in payloads]
    return ",".join(
        [f"=&{k}" for k in [*kinds, "r"] for _ in range(items)] + [k for k in ["r", *kinds] for _ in range(items)]
    )


@constexpr_function
def count_text(warps: int, items: int, passes: int, wide: bool, wide_counts: bool) -> str:
    """Return the assembly of `count_digits`. Operands: an unused result, keys, masks and the pointer."""
    threads, size = 32 * warps, 8 if wide_counts else 4
    lines = [
        f"{{ .shared .align 16 .b32 bins[{passes * 256}];",
        ".reg .pred p;",
        ".reg .b32 base, thread, at, v;",
        ".reg .b64 where, w;",
        "mov.u32 base, bins;",
        "mov.u32 thread, %tid.x;",
        "mad.lo.u32 at, thread, 4, base;",
    ]
    # Clear the bins.
    parts = range(0, passes * 256, threads)
    for part in parts:
        lines += [f"setp.lt.u32 p, thread, {passes * 256 - part};", f"@p st.shared.b32 [at + {4 * part}], 0;"]
    # Count every digit of every key in shared memory.
    lines.append("bar.sync 0;")
    for j in range(items):
        lines.append(f"setp.ne.b32 p, ${2 * items + j}, 0;")
        for k in range(passes):
            if wide:
                lines += [f"shr.u64 w, ${items + j}, {8 * k};", "cvt.u32.u64 v, w;"]
            else:
                lines.append(f"shr.u32 v, ${items + j}, {8 * k};")
            lines += ["and.b32 v, v, 255;", "mad.lo.u32 v, v, 4, base;", f"@p red.shared.add.u32 [v + {1024 * k}], 1;"]
    # Add the bins that are not 0 to the counts in memory.
    lines += ["bar.sync 0;", f"mad.wide.u32 where, thread, {size}, ${3 * items};"]
    for part in parts:
        lines += [
            f"setp.lt.u32 p, thread, {passes * 256 - part};",
            "mov.b32 v, 0;",
            f"@p ld.shared.b32 v, [at + {4 * part}];",
        ]
        lines.append("setp.ne.b32 p, v, 0;")
        if wide_counts:
            lines += ["cvt.u64.u32 w, v;", f"@p red.relaxed.gpu.global.add.u64 [where + {8 * part}], w;"]
        else:
            lines.append(f"@p red.relaxed.gpu.global.add.u32 [where + {4 * part}], v;")
    return "\n".join([*lines, *(f"mov.b32 ${j}, 0;" for j in range(items)), "}"])


@constexpr_function
def count_constraints(items: int, wide: bool) -> str:
    """Return the constraints of results, keys, masks and addresses."""
    kinds = ["=&r", "l" if wide else "r", "r", "l"]
    return ",".join(k for k in kinds for _ in range(items))


@constexpr_function
def load_text(size: int) -> str:
    """Return the assembly of `load_states` for states of `size` bits."""
    least = hex(1 << (size - 1))
    return f"""{{ {layout_line(8)}
    .reg .pred p;
    setp.ne.b32 p, $2, 0;
    mov.b{size} $0, {least};
    @p ld.relaxed.gpu.global.b{size} $0, [$1];
    }}"""


@triton.jit
def order_in_tile(T: tl.constexpr, W: tl.constexpr):
    """Return the position in order of each element of a tile of W warps, [T]."""
    i = tl.arange(0, T)  # [T]
    order = i // 32 % W * (T // W) + i // (32 * W) * 32 + i % 32  # [T]
    # Hide the values so that the compiler does not vectorize loads, which would change the layout.
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [order], tl.int32, True, 1)


@triton.jit
def load_states(p, m):
    """Load the states [DIGITS] that other programs store, once per element. The least integer where m is not set."""
    tl.static_assert(p.shape[0] == DIGITS)
    SIZE: tl.constexpr = p.dtype.element_ty.primitive_bitwidth
    return tl.inline_asm_elementwise(
        load_text(SIZE), "=&l,l,r" if SIZE == 64 else "=&r,l,r", (p.to(tl.int64, bitcast=True), m.to(tl.int32)),
        p.dtype.element_ty, False, 1,
    )  # fmt: skip


@triton.jit
def sort_by_digit(digit, payloads, W: tl.constexpr):
    """Return one or two payloads [T] sorted stably by their digits, and the digits' counts, padded with 0 to [T].

    Tiles are in the order of `order_in_tile`.
    """
    N: tl.constexpr = digit.shape[0] // (32 * W)
    FIRST: tl.constexpr = payloads[0].dtype.primitive_bitwidth // 32
    if len(payloads) == 1:
        return tl.inline_asm_elementwise(
            step_text(W, N, FIRST), step_constraints(N, FIRST), (digit, payloads[0]), (payloads[0].dtype, tl.int32),
            False, N,
        )  # fmt: skip
    else:
        SECOND: tl.constexpr = payloads[1].dtype.primitive_bitwidth // 32
        return tl.inline_asm_elementwise(
            step_text(W, N, FIRST, SECOND), step_constraints(N, FIRST, SECOND), (digit, payloads[0], payloads[1]),
            (payloads[0].dtype, payloads[1].dtype, tl.int32), False, N,
        )  # fmt: skip


@triton.jit
def count_digits(p_counts, key, m, PASSES: tl.constexpr, W: tl.constexpr):
    """Add the keys [T] where m is set to counts[pass, digit]. Atomic additions of integers are exact in any order."""
    N: tl.constexpr = key.shape[0] // (32 * W)
    WIDE: tl.constexpr = key.dtype.primitive_bitwidth == 64
    LONG: tl.constexpr = p_counts.dtype.element_ty.primitive_bitwidth == 64
    tl.inline_asm_elementwise(
        count_text(W, N, PASSES, WIDE, LONG), count_constraints(N, WIDE),
        (key, m.to(tl.int32), p_counts.to(tl.int64, bitcast=True)), tl.int32, False, N,
    )  # fmt: skip


if is_interpreted():  # the interpreter has no inline assembly

    @triton.jit
    def order_in_tile(T: tl.constexpr, W: tl.constexpr):
        i = tl.arange(0, T)
        return i // 32 % W * (T // W) + i // (32 * W) * 32 + i % 32

    @triton.jit
    def load_states(p, m):
        LEAST: tl.constexpr = -(1 << (p.dtype.element_ty.primitive_bitwidth - 1))
        return tl.load(p, mask=m, other=LEAST)

    def sort_by_digit(digit: Any, payloads: Any, W: Any) -> Any:
        warps, values = getattr(W, "value", W), digit.handle.data
        i, count = np.arange(len(values)), len(values)
        order = i // 32 % warps * (count // warps) + i // (32 * warps) * 32 + i % 32
        element = np.argsort(order)
        ranked = element[np.argsort(values[element], kind="stable")][order]
        counts = np.zeros(count, np.int32)
        counts[:256] = np.bincount(values, minlength=256)
        moved = [tl.tensor(type(p.handle)(p.handle.data[ranked], p.dtype.scalar), p.type) for p in payloads]
        return (*moved, tl.tensor(type(digit.handle)(counts, tl.int32), digit.type))

    @triton.jit
    def count_digits(p_counts, key, m, PASSES: tl.constexpr, W: tl.constexpr):
        o = tl.arange(0, DIGITS)
        missing = tl.sum((m == 0).to(tl.int32), 0)
        for k in tl.static_range(PASSES):
            digit = tl.where(m, ((key >> (8 * k)) & 255).to(tl.int32), 255)
            count = tl.histogram(digit, DIGITS) - tl.where(o == 255, missing, 0)
            tl.atomic_add(p_counts + k * DIGITS + o, count.to(p_counts.dtype.element_ty))
