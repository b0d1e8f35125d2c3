"""Programmatic dependent launch inside kernels: where a kernel waits for the one before it, and lets in the next.

A kernel that calls neither waits in its first instruction and lets nobody in before its last programs leave
(`compile.dependent`). A short kernel of a chain does better: it lets the next one in at once, asks for its weights to
be brought to L2, and only then waits. Between `wait_for_previous` and that point it reads and writes nothing, so that
a predecessor may have written any of its operands: a prefetch to L2, which is coherent, is no read.

Every program waits before it ends. So what the kernel before the previous one wrote and read is done, too, and memory
may be reused as in any stream.

In graphs alone kernels overlap; launched one by one, and before Hopper, both calls do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted

FEW_ROWS = 32  # of steps of generation, whose other kernels come too soon after one another to be brought in late


def can_overlap(x: Array) -> bool:
    """Whether kernels of x's device can overlap: the constant with which they are compiled."""
    return backend_of(x.device).driver.properties.capability >= (9, 0) and not is_interpreted()


def largest_cluster(x: Array) -> int:
    """How many programs a cluster on x's device can have; 1 where there are none."""
    return 8 if can_overlap(x) else 1


@triton.jit
def allow_next(OVERLAP: tl.constexpr):
    """Let the next kernel of the graph in, as soon as all programs of this one have come here."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until all kernels before this one are done and what they wrote can be read."""
    if OVERLAP:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(p, m, OVERLAP: tl.constexpr):
    """Ask for the lines at the pointers p where m is set, to be brought to L2."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [p.to(tl.int64, bitcast=True), m.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
