"""Why a measured figure is not better, as far as that is known: what `benchmarks.performance` says next to it.

Only what was measured or what a kernel's own description says; docs/log.md has the attempts in full. What is in no
row here is "not known".
"""

from __future__ import annotations

import re

__all__ = ["known_reason"]

# (pattern of the row's name, reason); the first that matches counts.
REASONS: tuple[tuple[str, str], ...] = (
    (
        r"(sum|max) (-1|1|None|\(0, 1\)) \(4, 512, 896\)",
        "latency: the input lies in the L2, and a program's loads (1 to 4 steps), its tree of 5 to 10"
        " rounds over lanes and warps, and its store come one behind another; torch's take longer",
    ),
    (
        r"matmul (512|1024) ",
        "latency: one round of tiles, in which the first loads, 4 to 16 steps along k and the store come one behind"
        " another; torch's take longer",
    ),
    (
        r"forward 8192x896 -> 1152",
        "other tiles, more programs an SM, a split along k and leftover tiles in halves were all slower; what"
        " cuBLAS does better is not known (log: matmuls on an H200)",
    ),
    (
        r"softmax .*151936",
        "a line of 151,936 does not fit into a program's registers and is read twice, so memory is passed three times"
        " where two are counted (kernels/reduce/softmax.py)",
    ),
    (
        r"masked select",
        "the result's size is data: the mask is counted before it is used, the host waits once for the size, and that"
        " wait is in the time (kernels/index/select.py)",
    ),
    (
        r"wall, ",
        "the driver's launch is the first row of the table, the rest is Python: choosing the launch, memory, and"
        " tensors around it. A training step is one CUDA graph and pays none of it",
    ),
    # Of fused ops.
    (
        r"^fused attention \(.*,128\) cudnn starts",
        "the warp-specialized kernel is faster where there are no document boundaries; with them it was"
        " slower than this one, whose programs go wherever there is room (log)",
    ),
    (
        r"^fused attention backward .*,128\)",
        "the gradient of the scores goes through memory: with it dQ is one matmul instead of"
        " three, for which the dK/dV kernel takes 1.16 times as long (log)",
    ),
    (r"^fused attention \(.*,64\) cudnn starts", "cuDNN is not told where documents begin"),
    (
        r"^fused attention backward .*,64\)",
        "two kernels recompute the scores and their exponentials, seven matmuls in all; one would make five, but"
        " several of its programs would add to the same gradients, in no fixed order",
    ),
    (
        r"^fused .*( (128|512)|\(1,128,\d+,\d+\))$",
        "few tokens: a kernel takes 0.85 us at the least, and these have one to three",
    ),
    (
        r"^fused embedding_add_",
        "rows of the same token are added in a fixed order: one kernel ranks the tokens, one adds up stretches, one"
        " joins them",
    ),
    (r"^fused norm_rope backward", "two more kernels add up the weights' gradients"),
    (r"^fused norm_rope", "the rotation alone is no nearer than 86 % at this size; what the norm adds is not known"),
    (
        r"^fused quantized_matmul 896 to 896",
        "three kernels quantize and transpose the operands first; training leaves matmuls of fewer than 2048"
        " columns as they are (0006)",
    ),
    (
        r"^fused dropout",
        "the generator's ten rounds: 24 instructions an element are 32 µs of issue slots against 38 of memory (counted"
        " from the machine code)",
    ),
    (r"^fused rms_norm backward", "the weight's gradient takes a second kernel, which adds up 396 programs' parts"),
    # Of the ops of `genesis bench-ops`.
    (
        r"^(sort|topk|argsort)\b",
        "an order needs several passes: a line is sorted inside one program or by radix, where the limit counts one"
        " reading and one writing (kernels/index/sort.py)",
    ),
    (
        r"^cumsum\b.* float32",
        "running sums are float64: 97 additions and 32 conversions for 16 elements are 23 µs of instructions against 32"
        " of memory, and a line's load, scan and store come one after the other (counted from the machine code)",
    ),
    (
        r"^cumsum\b",
        "few long lines take three launches: totals of stretches, their running totals, and the scan"
        " (kernels/reduce/scan.py)",
    ),
    (
        r"^(std|var)\b",
        "the lanes' counts, means and squared distances are merged by pairs, with a division each, and a row lies in a"
        " tile of the next power of 2: for 16x2048x4864 over -1 in bfloat16 297 µs of instructions against 76 of memory"
        " (counted from the machine code)",
    ),
    (
        r"^logsumexp .*over (-1|0,1)",
        "an exponential right to float32's last place and what chooses the maximum are 25 to 45 instructions an"
        " element, also of 2-byte types, and a row lies in a tile of the next power of 2: for 16x2048x4864 over -1"
        " 217 µs of instructions against 76 of memory in bfloat16, 226 against 152 in float32 (counted from the machine"
        " code)",
    ),
    (
        r"^attention(_packed)?\b.* (bfloat16|float16)",
        "of a score for heads of 64 the tensor cores' part takes 0.06 cycles of an SM and its exponential, on 16"
        " lanes, 0.0625: a half, but for what runs side by side, and less where few blocks or the diagonal's halves"
        " count; a quarter of the exponentials as polynomials is no faster, so instructions count as much as their unit"
        " (log); cuDNN's takes as long, see its own table",
    ),
    (
        r"^linear_cross_entropy\b.* (bfloat16|float16)",
        "when this was measured, the random weight was so large that logits lay too far apart for one pass, and a"
        " second one was made (kernels/loss/lm_head.py); in a training step 8192 x 896 x 151936 takes 10.1 ms",
    ),
    (
        r"^pow\b.* (bfloat16|float16)",
        "as exact as float32's: 88 issue slots an element, 26 of them float64, are 50 µs for 4096x4096 against 24 of"
        " memory (counted from the machine code)",
    ),
    (
        r"^(gelu|erf|gelu_backward|cos|sin)\b.* (bfloat16|float16)",
        "as exact as float32's: an element of gelu, erf and gelu_backward takes 39, 35 and 55 issue slots, 22, 20 and"
        " 31 µs for 4096x4096 against 16, 16 and 24 of memory (counted from the machine code); cos and sin reduce their"
        " argument first",
    ),
    (r"^matmul 256\b.* float32", "16 tiles of 64 x 64 for 132 SMs"),
    (
        r"^(packed_)?linear\b.* float32",
        "exact float32 is bound by shared memory: in a tile of 64 x 64 x 16 the operands are read in 768 cycles beside"
        " 512 of multiply-adds",
    ),
    (
        r"^attention(_packed)?\b.* float32",
        "exact float32 is bound by shared memory: tiles of 32 x 32 take 2612 cycles of reading against 1560 of"
        " instructions, at most 61 % of the measured matmul",
    ),
    (
        r"^linear_cross_entropy\b.* float32",
        "three matmuls in exact float32, one of them with only 112 tiles for 132 SMs, and the logits go through"
        " memory twice",
    ),
    (
        r"^pow\b.* float32",
        "126 issue slots an element, half of them float64 for a result right to the rounding: 63 µs at the GPU's clock"
        " against 48 of memory",
    ),
    (
        r"^cross_entropy 256x",
        "256 rows are 256 programs for 132 SMs: each has two, whose steps of 16 KiB are all that is on its way",
    ),
    (
        r"^logsumexp .*over all",
        "9 µs do not depend on the size: two launches, the second of one program that merges 1024 partial results",
    ),
    (
        r"^(log_)?softmax .*(16384|151936)",
        "a line that does not fit into registers is read twice, where the limit counts once"
        " (kernels/reduce/softmax.py)",
    ),
)


def known_reason(name: str) -> str | None:
    """The reason for the row of that name, if one is known."""
    return next((reason for pattern, reason in REASONS if re.search(pattern, name)), None)
