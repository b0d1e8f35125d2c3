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
        "when this was measured, kernels of a graph were let in while the one before ran; since then 143 to 145 µs"
        " (fp32) and 75 to 77 (bf16) (log: the next kernel let in at once)",
    ),
    (
        r"scatter-add .* bf16",
        "when this was measured, kernels of a graph were let in while the one before ran; since then 171 µs where torch"
        " takes 195 (log: the next kernel let in at once)",
    ),
    (
        r"wgrad 8192x(896 -> (896|1152)|4864 -> 896)",
        "when this was measured, kernels of a graph were let in while the one before ran; since then 23.1, 26.0 and"
        " 103 µs for 896, 1152 and 4864 -> 896, where cuBLAS takes 22.7, 26.6 and 109 (log: the next kernel let in at"
        " once)",
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
        r"^cumsum\b.* float32",
        "running sums are float64: 97 additions and 32 conversions for 16 elements are 23 µs of instructions beside 32"
        " of memory, and a line's load, scan and store come one after the other (counted from the machine code)",
    ),
    (
        r"^cumsum\b",
        "few long lines take three launches: totals of stretches, their running totals, and the scan (kernels/scan.py)",
    ),
    (
        r"^(packed_)?linear\b.* float32",
        "exact float32 is bound by shared memory: in a tile of 64 x 64 x 16 the factors are read in 768 cycles beside"
        " 512 of multiply-adds",
    ),
    (
        r"^attention(_packed)?\b.* float32",
        "exact float32 is bound by shared memory: tiles of 32 x 32 take 2612 cycles of reading beside 1560 of"
        " instructions, at most 61 % of the measured product",
    ),
    (
        r"^linear_cross_entropy\b.* float32",
        "three products in exact float32, one of them with only 112 tiles for 132 processors, and the logits go through"
        " memory twice",
    ),
    (
        r"^pow\b.* float32",
        "126 issue slots an element, half of them float64 for a result right to the rounding: 63 µs at the GPU's clock"
        " beside 48 of memory",
    ),
    (
        r"^cross_entropy 256x",
        "256 rows are 256 programs for 132 processors: each has two, whose steps of 16 KiB are all that is on its way",
    ),
    (
        r"^logsumexp .*over all",
        "9 µs do not depend on the size: two launches, the second of one program that merges 1024 partial results",
    ),
    (
        r"^(log_)?softmax .*(16384|151936)",
        "a line that does not fit into registers is read twice, where the limit counts once (kernels/softmax.py)",
    ),
)


def known_reason(name: str) -> str | None:
    """The reason for the row of that name, if one is known."""
    return next((reason for pattern, reason in REASONS if re.search(pattern, name)), None)
