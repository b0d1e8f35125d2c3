"""Programmatic dependent launch inside kernels: where a kernel waits for the previous one, and when the next may start.

By default (`compile.dependent`) a kernel waits in its first instruction, and the next one starts when its last programs
end. A short kernel in a chain is faster if it allows the next kernel at once, prefetches its weights to L2, and only
then waits. Before `wait_for_previous` it reads only data that no earlier kernel writes, and stores nothing. A
prefetch to L2 does not count as a read, because L2 is coherent, so the previous kernel may still write its lines.

Every program waits before it ends. The kernel before the previous one has therefore finished too, and memory can be
reused as in any stream.

Kernels overlap only in graphs and from Hopper on. Otherwise both calls do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted

FEW_ROWS = 512  # rows up to which a step's kernels are so short that they should overlap


def can_overlap(x: Array) -> bool:
    """Return whether kernels can overlap on x's device; kernels are compiled with this constant."""
    return backend_of(x.device).driver.properties.capability >= (9, 0) and not is_interpreted()


def largest_cluster(x: Array) -> int:
    """Return the most programs of a cluster on x's device, or 1 if the device has no clusters."""
    return 8 if can_overlap(x) else 1


@triton.jit
def allow_next(OVERLAP: tl.constexpr):
    """Allow the next kernel of the graph to start once all programs of this kernel have made this call."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until all earlier kernels have finished and their results can be read."""
    if OVERLAP:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(p, m, OVERLAP: tl.constexpr):
    """Prefetch the cache lines at the pointers p to L2, where m is set."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [p.to(tl.int64, bitcast=True), m.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
