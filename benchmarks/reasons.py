"""Why a measured figure is not better, as far as that is known: what `benchmarks.performance` says beside it.

Only what was measured or what a kernel's own description says; docs/log.md has the attempts in full. What stands in no
row here is "not known".
"""

from __future__ import annotations

import re

__all__ = ["known_reason"]

# (pattern of the row's name, reason); the first that matches counts.
REASONS: tuple[tuple[str, str], ...] = (
    (
        r"(sum|max) (1|\(0, 1\)) \(16, 2048, 4864\)",
        "took 146 to 148 µs (fp32) and 76 (bf16) before kernels of a graph were brought to the processors early:"
        " programs of the next launch fill the places that a grid leaves, unevenly"
        " (log: dependent launches and grids that leave room)",
    ),
    (
        r"forward 8192x896 -> 1152",
        "other tiles, more programs a processor, a split along k and leftover tiles in halves were all slower; what"
        " cuBLAS does better is not known (log: matrix products on an H200)",
    ),
    (
        r"softmax .*151936",
        "a line of 151,936 does not fit into a program's registers and is read twice, so three passes over memory stand"
        " where two are counted (kernels/softmax.py)",
    ),
    (
        r"masked select",
        "the result's size is data: the mask is counted before it is used, the host waits once for the size, and that"
        " wait is in the time (kernels/select.py)",
    ),
    (
        r"wall, ",
        "the driver's launch is the first row of the table, the rest is Python: choosing the launch, memory, and"
        " tensors around it. A training step is one CUDA graph and pays none of it",
    ),
    # Of the ops of `genesis bench-ops`.
    (
        r"^(sort|topk|argsort)\b",
        "an order needs several passes: a line is sorted inside one program or by radix, where the limit counts one"
        " reading and one writing (kernels/sort.py)",
    ),
    (
        r"^cumsum\b",
        "few long lines take three launches: totals of stretches, their running totals, and the scan (kernels/scan.py)",
    ),
    (
        r"^(log_)?softmax .*(16384|151936)",
        "a line that does not fit into registers is read twice, where the limit counts once (kernels/softmax.py)",
    ),
)


def known_reason(name: str) -> str | None:
    """The reason for the row of that name, if one is known."""
    return next((reason for pattern, reason in REASONS if re.search(pattern, name)), None)
