"""The heads of a generation step's token, prepared by all warps together: sums over a head, and the exchange through
shared memory that gives every warp all queries.

Plain reference: the functions for the interpreter below. The kernel: attention_step_mma.py.

Tiles are [BS * 8, 32], for BS warps. Of heads a thread has 8 neighbouring columns, so that SIZE / 8 lanes have a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.decode.few_rows_mma import layout_line
from genesis.kernels.types import converted


@triton.jit
def place_in_head(o_r, o_c, SIZE: tl.constexpr):
    """Of each element of a tile of heads the head, the column, and the column half a head away."""
    LANES: tl.constexpr = SIZE // 8
    o_thread = o_r * 4 + o_c // 8
    return o_thread // LANES, o_thread % LANES * 8 + o_c % 8, (o_thread + LANES // 2) % LANES * 8 + o_c % 8


@constexpr_function
def operands(of: str) -> str:
    """The constraints of so many operands of each kind."""
    words = of.split()
    return ",".join(kind for count, kind in zip(words[::2], words[1::2], strict=True) for _ in range(int(count)))


@constexpr_function
def table_text(warps: int) -> str:
    """The assembly of `load_table`: eight floats from where the first of eight pointers is."""
    return f"""{{ {layout_line(warps)}
    ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$8];
    ld.global.nc.v4.f32 {{$4, $5, $6, $7}}, [$8 + 16];
    }}"""


@triton.jit
def load_table(p, BS: tl.constexpr):
    """What is at pointers p, eight neighbours in each thread, which nothing writes. Triton would load four and exchange
    them between threads."""
    TEXT: tl.constexpr = table_text(BS)
    where: tl.constexpr = operands("8 =f 8 l")
    return tl.inline_asm_elementwise(TEXT, where, [p.to(tl.int64, bitcast=True)], tl.float32, is_pure=True, pack=8)


@constexpr_function
def sums_text(warps: int, lanes: int, count: int) -> str:
    """The assembly of `row_sums`: `count` sums from $0 on, terms from $8 on."""
    lines = [f"{{ {layout_line(warps)}", ".reg .f32 a, b, c, d;"]
    lines += [f"add.f32 {x}, ${8 + 2 * i}, ${9 + 2 * i};" for i, x in enumerate("abcd")]
    lines += ["add.f32 a, a, b;", "add.f32 c, c, d;", "add.f32 a, a, c;"]
    while lanes > 1:
        lanes //= 2
        lines += [f"shfl.sync.bfly.b32 b, a, {lanes}, 31, 0xffffffff;", "add.f32 a, a, b;"]
    return "\n".join([*lines, *(f"mov.f32 ${i}, {'a' if i < count else '0f80000000'};" for i in range(8)), "}"])


@triton.jit
def row_sums(x, BS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """The sum of each head's elements, in each thread at COUNT of them, where the others are -0."""
    TEXT: tl.constexpr = sums_text(BS, SIZE // 8, COUNT)
    return tl.inline_asm_elementwise(TEXT, operands("8 =&f 8 f"), [x], tl.float32, is_pure=True, pack=8)


@constexpr_function
def exchange_text(kind: tl.dtype, warps: int, size: int, cluster: int, part: int, share: int) -> str:
    """The assembly of `exchange`: queries from $0 on, then 8 scores and 8 columns of the value; behind them what is
    given, 4 words of queries, 8 scores and 4 words of the value.
    """
    count, lanes, stride = size // 32, size // 8, 2 * size + 64  # bytes between heads, for banks of their own
    score, value, given = 4 * count, 4 * count + 8, 4 * count + 16
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
        f"@some st.shared.v4.b32 [at], {four(given)};",
        f"@one st.shared.f32 [own + {scores}], ${given + 4};",
        f"@first st.shared.v4.b32 [at + {values}], {four(given + 12)};",
        "bar.sync 0;",
        "and.b32 lane, thread, 31;",
        "shr.u32 thread, thread, 5;",  # now the warp
        "shr.u32 head, lane, 2;",
        "and.b32 lane, lane, 3;",
        "mad.lo.u32 own, head, 4, base;",
        f"mad.lo.u32 head, head, {stride}, base;",
        "mad.lo.u32 at, lane, 16, head;",
        *(f"ld.shared.v4.b32 {four(4 * i)}, [at + {64 * i}];" for i in range(count)),
        f"ld.shared.f32 ${score}, [own + {scores}];",
        f"mul.lo.u32 thread, thread, {part};",  # the first of its elements
    ]
    if cluster > 1:
        lines += ["mov.u32 own, %cluster_ctarank;", f"mad.lo.u32 thread, own, {share}, thread;"]
    lines += [  # of element e the column 64·(e / 16) + 16·t + e % 16
        "shr.u32 own, thread, 4;",
        "and.b32 at, thread, 15;",
        "mad.lo.u32 at, own, 64, at;",
        "mad.lo.u32 at, lane, 16, at;",
        f"and.b32 at, at, {size - 1};",  # of a program without a share
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
def four(at: int) -> str:
    """Four operands."""
    return "{" + ", ".join(f"${at + i}" for i in range(4)) + "}"


@constexpr_function
def types_of(kind: tl.dtype, count: int) -> tuple[tl.dtype, ...]:
    """Of so many tiles of a type, then of two of floats."""
    return (kind,) * count + (tl.float32,) * 2


@triton.jit
def exchange(q, score, value, BS: tl.constexpr, SIZE: tl.constexpr, CLUSTER: tl.constexpr, PART: tl.constexpr,
             SHARE: tl.constexpr):  # fmt: skip
    """Of prepared queries tiles of 32 columns, with all heads in each warp; and two tiles more: for thread (g, t) of
    each warp head g's score, and of the value the columns that the thread has of the result, SHARE of PART in each
    program of a cluster. Both are -0 in the thread's other elements.

    Args:
        score: of each head, at its elements.
        value: of one head, in the place of each.
    """
    TEXT: tl.constexpr = exchange_text(q.dtype, BS, SIZE, CLUSTER, PART, SHARE)
    where: tl.constexpr = operands("8 =&r 16 =&f 4 r 8 f 4 r") if SIZE == 64 else operands("16 =&r 16 =&f 4 r 8 f 4 r")
    types: tl.constexpr = types_of(q.dtype, SIZE // 32)
    return tl.inline_asm_elementwise(TEXT, where, [q, score, value], types, is_pure=False, pack=8)


if is_interpreted():

    def changed(tile: Any, values: np.ndarray) -> Any:
        """A tile like this one of other values."""
        data = np.array(values, tile.handle.data.dtype).reshape(tile.handle.data.shape)
        return tl.tensor(type(tile.handle)(data, tile.dtype), tile.type)

    def value_of(constant: Any) -> int:
        number: int = getattr(constant, "value", constant)
        return number

    @triton.jit
    def load_table(p, BS: tl.constexpr):
        """The same, for the interpreter."""
        return tl.load(p)

    def row_sums(x: Any, BS: Any, SIZE: Any, COUNT: Any) -> Any:
        """The same on the numpy values."""
        sums = x.handle.data.reshape(-1, value_of(SIZE)).sum(1)
        kept = np.where(np.arange(8) < value_of(COUNT), sums[:, None, None], np.float32(-0.0))
        return changed(x, np.broadcast_to(kept, (len(sums), value_of(SIZE) // 8, 8)))

    def exchange(q: Any, score: Any, value: Any, BS: Any, SIZE: Any, CLUSTER: Any, PART: Any, SHARE: Any) -> Any:
        """The same on the numpy values, without clusters."""
        warps, size, part = (value_of(x) for x in (BS, SIZE, PART))
        heads, scores, columns = (
            tile.handle.data.reshape(-1, size) for tile in (q, score, converted(value, tl.float32))
        )
        tiles = [changed(q, np.broadcast_to(each, (warps, 8, 32))) for each in np.split(heads[:8], size // 32, 1)]
        element = np.arange(warps)[:, None, None, None] * part + np.arange(8)  # [w, 1, 1, 8]
        column = (element // 16 * 64 + np.arange(4)[:, None] * 16 + element % 16) % size  # [w, 1, t, 8]
        shape, is_own = (warps, 8, 4, 8), np.arange(8) < part
        found = np.broadcast_to(scores[:8, 0][:, None, None], shape), np.broadcast_to(columns[0][column], shape)
        return (*tiles, *(changed(score, np.where(is_own, each, np.float32(-0.0))) for each in found))
