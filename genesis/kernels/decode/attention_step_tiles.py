"""Assembly for the attention of a generation step with operands in registers: products of tiles, sums over warps, and
the token's heads, which all warps prepare together and exchange through shared memory.

Plain reference: the functions for the interpreter in this file. attention_step_mma.py lists the elements of each tile
that a thread holds. Of the token's heads a thread holds 8 consecutive columns, so SIZE / 8 lanes hold one head.

Tiles are [BS * 8, 32], for BS warps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.decode.few_rows_mma import constraints, layout_line, mma_of, quad_text
from genesis.kernels.elements import converted


@constexpr_function
def prologue_text(warps: int) -> str:
    """Return the first lines of an assembly with MMAs. Rows 8 to 15 of A and C are zero; the result's are unused."""
    registers = ".reg .b32 none, b0, b1; .reg .f32 c2, c3, zero;"
    return f"{{ {layout_line(warps)}\n{registers} mov.b32 none, 0; mov.f32 zero, 0f00000000;"


@constexpr_function
def scores_text(kind: tl.dtype, warps: int, blocks: int) -> str:
    """Return the assembly of `scores`: sums $0 to $7, queries $8 to $11, the blocks' keys from $12, then old sums."""
    lines = [prologue_text(warps)]
    for i in range(4):
        d, k, c = 2 * i, 12 + 4 * i, 12 + 4 * blocks + 2 * i
        if i >= blocks:
            lines += [f"mov.f32 ${d + j}, ${c + j};" for j in range(2)]
            continue
        lines += [
            f"{mma_of(kind)} {{${d}, ${d + 1}, c2, c3}}, {{$8, none, $9, none}}, {{${k}, ${k + 1}}},"
            f" {{${c}, ${c + 1}, zero, zero}};",
            f"{mma_of(kind)} {{${d}, ${d + 1}, c2, c3}}, {{$10, none, $11, none}}, {{${k + 2}, ${k + 3}}},"
            f" {{${d}, ${d + 1}, zero, zero}};",
        ]
    return "\n".join([*lines, "}"])


@constexpr_function
def weighted_text(kind: tl.dtype, warps: int, blocks: int) -> str:
    """Return the assembly of `weighted`: sums $0 to $15, probabilities from $16, values from $20, then old sums."""
    lines, before = [prologue_text(warps)], 20 + 8 * blocks
    for j in range(8):
        halves, d = ("0x5410", "0x7632")[j % 2], f"{{${j}, ${8 + j}, c2, c3}}"
        for pair in range(blocks // 2):
            v, p, first = 20 + 16 * pair + j // 2, 16 + 2 * pair, before if pair == 0 else 0
            c = f"{{${first + j}, ${first + 8 + j}, zero, zero}}"
            lines += [
                f"prmt.b32 b0, ${v}, ${v + 4}, {halves};",
                f"prmt.b32 b1, ${v + 8}, ${v + 12}, {halves};",
                f"{mma_of(kind)} {d}, {{${p}, none, ${p + 1}, none}}, {{b0, b1}}, {c};",
            ]
    return "\n".join([*lines, "}"])


@triton.jit
def scores(q, keys, acc, BS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return acc + the products of the group's queries with two or four blocks of keys, over 32 columns."""
    TEXT: tl.constexpr = scores_text(q.dtype, BS, BLOCKS)
    where: tl.constexpr = constraints(8, 4 + 4 * BLOCKS, 8)
    inputs = (q,)
    inputs += keys
    inputs += (acc,)
    return tl.inline_asm_elementwise(TEXT, where, inputs, tl.float32, is_pure=True, pack=8)


@triton.jit
def weighted(p, values, low, high, BS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return low and high + the products of probabilities with the values of two or four blocks, in 64 columns."""
    TEXT: tl.constexpr = weighted_text(p.dtype, BS, BLOCKS)
    where: tl.constexpr = constraints(16, 4 + 8 * BLOCKS, 16)
    inputs = (p,)
    inputs += values
    inputs += (low, high)
    return tl.inline_asm_elementwise(TEXT, where, inputs, (tl.float32, tl.float32), is_pure=True, pack=8)


@constexpr_function
def combined_text(warps: int, count: int) -> str:
    """Return the assembly of `combine`.

    The results start at $0, $8 and $16: a thread's part of each, followed by -0. Inputs: $24 is the warp's greatest
    score, $32 its sum, and count * 8 elements of o start at $40. A thread stores its elements at [warp, element / 4,
    lane, element % 4], and one thread of each row stores score and sum at [warp, g]. Then every warp adds its part of
    the elements over all warps, in order.
    """
    elements = 8 * count
    part, states = elements // warps, warps * elements * 128  # bytes of all elements
    registers = ", ".join([*(f"m{w}" for w in range(warps)), "v0, v1, v2, v3, most"])
    lines = [
        f"{{ {layout_line(warps)}",
        f".shared .align 16 .b8 warps[{states + warps * 64}];",
        f".reg .b32 warp, lane, at, own, head; .reg .pred first, none; .reg .f32 {registers};",
        "mov.u32 own, warps;",
        "mov.u32 warp, %tid.x;",
        "and.b32 lane, warp, 31;",
        "shr.u32 warp, warp, 5;",
        "shr.u32 head, lane, 2;",
        "mad.lo.u32 head, head, 8, own;",
        "mad.lo.u32 own, lane, 16, own;",
        "and.b32 lane, lane, 3;",
        "setp.eq.u32 first, lane, 0;",
        "mad.lo.u32 at, warp, 64, head;",
        f"@first st.shared.v2.f32 [at + {states}], {{$24, $32}};",
        f"mad.lo.u32 at, warp, {elements * 128}, own;",
    ]
    # Store the elements, and find the greatest score of all warps.
    for i in range(0, elements, 4):
        lines.append(f"st.shared.v4.f32 [at + {i * 128}], {{{', '.join(f'${40 + i + j}' for j in range(4))}}};")
    lines += ["bar.sync 0;", f"ld.shared.f32 m0, [head + {states}];", "mov.f32 most, m0;"]
    for w in range(1, warps):
        lines += [f"ld.shared.f32 m{w}, [head + {states + 64 * w}];", f"max.f32 most, most, m{w};"]
    lines += ["setp.eq.f32 none, most, 0fFF800000;", "mov.f32 $0, most;", "@none mov.f32 most, 0f00000000;"]
    lines += [
        f"mul.lo.u32 warp, warp, {part};",  # the first element of this warp's part
        "and.b32 at, warp, 3;",
        "shr.u32 warp, warp, 2;",
        "mad.lo.u32 own, warp, 512, own;",
        "mad.lo.u32 own, at, 4, own;",
    ]
    # Add this warp's part over all warps, relative to the greatest score.
    for w in range(warps):
        lines += [f"sub.f32 m{w}, m{w}, most;", f"ex2.approx.ftz.f32 m{w}, m{w};"]
        lines += [f"ld.shared.f32 v0, [head + {states + 64 * w + 4}];", add_text(8, "v0", w)]
        for i in range(0, part, 4):
            width = min(part, 4)
            vector = ", ".join(f"v{j}" for j in range(width))
            where = f"[own + {w * elements * 128 + i * 128}]"
            lines.append(
                f"ld.shared.v{width}.f32 {{{vector}}}, {where};" if width > 1 else f"ld.shared.f32 v0, {where};"
            )
            lines += [add_text(16 + i + j, f"v{j}", w) for j in range(width)]
    lines += [f"mov.f32 ${8 * k + i}, ${8 * k};" for k in range(2) for i in range(1, part)]
    lines += [f"mov.f32 ${8 * k + i}, 0f80000000;" for k in range(3) for i in range(part, 8)]
    return "\n".join([*lines, "}"])


@constexpr_function
def add_text(to: int, value: str, warp: int) -> str:
    """Return the instruction that adds a warp's value relative to the greatest score of all warps."""
    return f"fma.rn.f32 ${to}, {value}, m{warp}, ${to};" if warp else f"mul.f32 ${to}, {value}, m0;"


@triton.jit
def combine(b_max, b_sum, tiles, BS: tl.constexpr, COUNT: tl.constexpr):
    """Reduce over all warps. Return the greatest score, the sum, and this warp's part of o."""
    TEXT: tl.constexpr = combined_text(BS, COUNT)
    where: tl.constexpr = constraints(24, 0, 8 * (2 + COUNT))
    inputs = (b_max, b_sum)
    inputs += tiles
    return tl.inline_asm_elementwise(TEXT, where, inputs, (tl.float32, tl.float32, tl.float32), is_pure=False, pack=8)


if is_interpreted():

    def thread_values(tile: Any) -> np.ndarray:
        """Return a tile's values [warp, g, t, j]."""
        values: np.ndarray = converted(tile, tl.float32).handle.data.reshape(-1, 8, 4, 8)
        return values

    def with_values(tile: Any, values: np.ndarray) -> Any:
        """Return a tile of the same shape and type with other values."""
        data = np.array(values, tile.handle.data.dtype).reshape(tile.handle.data.shape)
        return tl.tensor(type(tile.handle)(data, tile.dtype), tile.type)

    def scores(q: Any, keys: Any, acc: Any, BS: Any, BLOCKS: Any) -> Any:
        with np.errstate(all="ignore"):
            products = [np.einsum("whte,wkte->whk", thread_values(q), thread_values(k)) for k in keys]
        products += [np.zeros_like(products[0])] * (4 - len(products))
        by_block = np.stack([each.reshape(*each.shape[:2], 4, 2) for each in products], 3)  # [w, head, t, block, b]
        return acc + with_values(acc, by_block)

    def weighted(p: Any, values: Any, low: Any, high: Any, BS: Any, BLOCKS: Any) -> Any:
        values_of_key = np.stack([thread_values(each) for each in values])  # [(block, b), w, g, t, j]
        with np.errstate(all="ignore"):
            sums = np.einsum("whti,iwgtj->whgj", thread_values(p)[..., : len(values_of_key)], values_of_key)
        return low + with_values(low, sums[:, :, 0::2]), high + with_values(high, sums[:, :, 1::2])

    def combine(b_max: Any, b_sum: Any, tiles: Any, BS: Any, COUNT: Any) -> Any:
        m, total = thread_values(b_max)[:, :, 0, 0], thread_values(b_sum)[:, :, 0, 0]  # [w, g]
        o = np.concatenate([thread_values(each) for each in tiles], -1)  # [w, g, t, elements]
        with np.errstate(all="ignore"):
            most = m.max(0)
            factor = np.exp2(m - np.where(most == -np.inf, 0, most))
            results = most, (factor * total).sum(0), (factor[:, :, None, None] * o).sum(0)
        part, shares = o.shape[-1] // len(o), []
        for i, each in enumerate(results):
            own = np.full((*o.shape[:3], 8), -0.0, np.float32)
            for w in range(len(o)):
                own[w, ..., :part] = each[:, None, None] if i < 2 else each[..., w * part : (w + 1) * part]
            shares.append(with_values(b_max, own))
        return tuple(shares)


# --- The token's heads ------------------------------------------------------------------------------------------------


@triton.jit
def place_in_head(o_r, o_c, SIZE: tl.constexpr):
    """Return for each element of a tile of heads its head, its column, and the column half a head away."""
    LANES: tl.constexpr = SIZE // 8
    o_thread = o_r * 4 + o_c // 8
    return o_thread // LANES, o_thread % LANES * 8 + o_c % 8, (o_thread + LANES // 2) % LANES * 8 + o_c % 8


@constexpr_function
def operands(of: str) -> str:
    """Return the constraints for a text such as "8 =f 8 l": counts and kinds of operands."""
    words = of.split()
    return ",".join(kind for count, kind in zip(words[::2], words[1::2], strict=True) for _ in range(int(count)))


@constexpr_function
def table_text(warps: int) -> str:
    """Return the assembly of `load_table`, which loads eight floats at the first of eight pointers."""
    return f"""{{ {layout_line(warps)}
    ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$8];
    ld.global.nc.v4.f32 {{$4, $5, $6, $7}}, [$8 + 16];
    }}"""


@triton.jit
def load_table(p, BS: tl.constexpr):
    """Load the elements at pointers p, eight neighbours per thread, from memory that no kernel writes meanwhile. Triton
    would load four and exchange them between threads.
    """
    TEXT: tl.constexpr = table_text(BS)
    where: tl.constexpr = operands("8 =f 8 l")
    return tl.inline_asm_elementwise(TEXT, where, [p.to(tl.int64, bitcast=True)], tl.float32, is_pure=True, pack=8)


@constexpr_function
def sums_text(warps: int, lanes: int, count: int) -> str:
    """Return the assembly of `row_sums`: `count` sums from $0, terms from $8."""
    lines = [f"{{ {layout_line(warps)}", ".reg .f32 a, b, c, d;"]
    lines += [f"add.f32 {x}, ${8 + 2 * i}, ${9 + 2 * i};" for i, x in enumerate("abcd")]
    lines += ["add.f32 a, a, b;", "add.f32 c, c, d;", "add.f32 a, a, c;"]
    while lanes > 1:
        lanes //= 2
        lines += [f"shfl.sync.bfly.b32 b, a, {lanes}, 31, 0xffffffff;", "add.f32 a, a, b;"]
    return "\n".join([*lines, *(f"mov.f32 ${i}, {'a' if i < count else '0f80000000'};" for i in range(8)), "}"])


@triton.jit
def row_sums(x, BS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum of each head's elements, in the first COUNT elements of each thread; the others are -0."""
    TEXT: tl.constexpr = sums_text(BS, SIZE // 8, COUNT)
    return tl.inline_asm_elementwise(TEXT, operands("8 =&f 8 f"), [x], tl.float32, is_pure=True, pack=8)


@constexpr_function
def exchange_text(kind: tl.dtype, warps: int, size: int, cluster: int, part: int, share: int) -> str:
    """Return the assembly of `exchange`. Outputs: queries from $0, 8 scores and 8 columns of the value. Inputs follow:
    4 words of queries, 8 scores and 4 words of the value.
    """
    count, lanes, stride = size // 32, size // 8, 2 * size + 64  # the stride (bytes per head) avoids bank conflicts
    score, value, inputs = 4 * count, 4 * count + 8, 4 * count + 16
    values, scores = 8 * stride, 9 * stride
    lines = [
        f"{{ {layout_line(warps)}",
        f".shared .align 16 .b8 heads[{scores + 32}];",
        ".reg .b32 base, thread, lane, head, at, own; .reg .pred some, one, first; .reg .b16 b, zero;",
        "mov.u32 base, heads;",
        "mov.u32 thread, %tid.x;",
        f"shr.u32 head, thread, {lanes.bit_length() - 1};",
        f"and.b32 at, thread, {lanes - 1};",
        "setp.lt.u32 some, head, 8;",
        "setp.eq.u32 first, head, 0;",
        "setp.eq.and.u32 one, at, 0, some;",
        "mad.lo.u32 own, head, 4, base;",
        f"mad.lo.u32 head, head, {stride}, base;",
        "mad.lo.u32 at, at, 16, head;",
        f"@some st.shared.v4.b32 [at], {quad_text(inputs)};",
        f"@one st.shared.f32 [own + {scores}], ${inputs + 4};",
        f"@first st.shared.v4.b32 [at + {values}], {quad_text(inputs + 12)};",
        "bar.sync 0;",
        "and.b32 lane, thread, 31;",
        "shr.u32 thread, thread, 5;",  # the warp
        "shr.u32 head, lane, 2;",
        "and.b32 lane, lane, 3;",
        "mad.lo.u32 own, head, 4, base;",
        f"mad.lo.u32 head, head, {stride}, base;",
        "mad.lo.u32 at, lane, 16, head;",
        *(f"ld.shared.v4.b32 {quad_text(4 * i)}, [at + {64 * i}];" for i in range(count)),
        f"ld.shared.f32 ${score}, [own + {scores}];",
        f"mul.lo.u32 thread, thread, {part};",  # the first element of this warp's part
    ]
    if cluster > 1:
        lines += ["mov.u32 own, %cluster_ctarank;", f"mad.lo.u32 thread, own, {share}, thread;"]
    # Load the value's columns: element e is column 64·(e / 16) + 16·t + e % 16.
    lines += [
        "shr.u32 own, thread, 4;",
        "and.b32 at, thread, 15;",
        "mad.lo.u32 at, own, 64, at;",
        "mad.lo.u32 at, lane, 16, at;",
        f"and.b32 at, at, {size - 1};",  # keeps the address valid in a program without a share
        "mad.lo.u32 at, at, 2, base;",
        "mov.b16 zero, 0;",
    ]
    as_float = "mov.b32 {}, {{zero, b}};" if kind.is_bf16() else "cvt.f32.f16 {}, b;"
    for i in range(share):
        lines += [f"ld.shared.b16 b, [at + {values + 2 * i}];", as_float.format(f"${value + i}")]
    lines += [f"mov.f32 ${score + i}, {f'${score}' if i < share else '0f80000000'};" for i in range(1, 8)]
    lines += [f"mov.f32 ${value + i}, 0f80000000;" for i in range(share, 8)]
    return "\n".join([*lines, "}"])


@constexpr_function
def types_of(kind: tl.dtype, count: int) -> tuple[tl.dtype, ...]:
    """Return the types of `count` tiles of a type, followed by two float32 tiles."""
    return (kind,) * count + (tl.float32,) * 2


@triton.jit
def exchange(q, score, value, BS: tl.constexpr, SIZE: tl.constexpr, CLUSTER: tl.constexpr, PART: tl.constexpr,
             SHARE: tl.constexpr):  # fmt: skip
    """Return tiles of 32 columns of the prepared queries, with all heads in each warp, followed by two other tiles.

    In thread (g, t) of each warp the first of these two holds head g's score. The second holds the value at the
    columns of the result that the thread has: SHARE of PART in each program of a cluster. The thread's other elements
    are -0.

    Args:
        q: prepared queries.
        score: the score of each head, at all its elements.
        value: the value of one head, repeated for each head.
    """
    TEXT: tl.constexpr = exchange_text(q.dtype, BS, SIZE, CLUSTER, PART, SHARE)
    where: tl.constexpr = operands("8 =&r 16 =&f 4 r 8 f 4 r") if SIZE == 64 else operands("16 =&r 16 =&f 4 r 8 f 4 r")
    types: tl.constexpr = types_of(q.dtype, SIZE // 32)
    return tl.inline_asm_elementwise(TEXT, where, [q, score, value], types, is_pure=False, pack=8)


if is_interpreted():

    def value_of(constant: Any) -> int:
        number: int = getattr(constant, "value", constant)
        return number

    @triton.jit
    def load_table(p, BS: tl.constexpr):
        return tl.load(p)

    def row_sums(x: Any, BS: Any, SIZE: Any, COUNT: Any) -> Any:
        sums = x.handle.data.reshape(-1, value_of(SIZE)).sum(1)
        kept = np.where(np.arange(8) < value_of(COUNT), sums[:, None, None], np.float32(-0.0))
        return with_values(x, np.broadcast_to(kept, (len(sums), value_of(SIZE) // 8, 8)))

    def exchange(q: Any, score: Any, value: Any, BS: Any, SIZE: Any, CLUSTER: Any, PART: Any, SHARE: Any) -> Any:
        warps, size, part = (value_of(x) for x in (BS, SIZE, PART))
        heads, scores, columns = (
            tile.handle.data.reshape(-1, size) for tile in (q, score, converted(value, tl.float32))
        )
        tiles = [with_values(q, np.broadcast_to(each, (warps, 8, 32))) for each in np.split(heads[:8], size // 32, 1)]
        element = np.arange(warps)[:, None, None, None] * part + np.arange(8)  # [w, 1, 1, 8]
        column = (element // 16 * 64 + np.arange(4)[:, None] * 16 + element % 16) % size  # [w, 1, t, 8]
        shape, is_own = (warps, 8, 4, 8), np.arange(8) < part
        extra = np.broadcast_to(scores[:8, 0][:, None, None], shape), np.broadcast_to(columns[0][column], shape)
        return (*tiles, *(with_values(score, np.where(is_own, each, np.float32(-0.0))) for each in extra))
