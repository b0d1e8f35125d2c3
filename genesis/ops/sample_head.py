"""Draws tokens from hidden states: one op computes the head's matmul and the draw, and stores no logits.

Tokens are drawn from float32 logits, in the distribution whose log-probability is returned. Classes are summed in
blocks, as in the losses of the head, so the log-probability has the bits that `linear_token_log_probs` gives under
`genesis.exact` (docs/decisions/0014-exact.md). `sample` draws from given logits, with filters and penalties.
"""

from __future__ import annotations

import math

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import bfloat16, float16, float32, int64
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import upcast
from genesis.ops.sample import FAILED, uniforms

BLOCK = 128  # classes of a block
LOG2_E = 1.4426950408889634
LN_2 = np.float32(0.6931471805599453)


def _infer(hidden: Array, weight: Array, keys: Array, settings: Array) -> tuple[Spec, Spec]:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or not weight.size:
        raise ShapeError(f"sample_head takes hidden [B, H] and a weight [V, H], got {hidden.shape} and {weight.shape}")
    rows = hidden.shape[0]
    if keys.shape != (rows, 3) or settings.shape != (rows, 4):
        shapes = f"{keys.shape} and {settings.shape}"
        raise ShapeError(f"sample_head takes keys [{rows}, 3] and settings [{rows}, 4], got {shapes}")
    if hidden.dtype not in (bfloat16, float16, float32) or weight.dtype is not hidden.dtype:
        raise DTypeError(f"sample_head takes floats of at most 4 bytes, got {hidden.dtype} and {weight.dtype}")
    if keys.dtype is not int64 or not settings.dtype.is_floating_point:
        raise DTypeError(f"sample_head takes int64 keys and settings of a float type, got {keys.dtype}"
                         f" and {settings.dtype}")  # fmt: skip
    return Spec((rows,), int64), Spec((rows,), float32)


def unit_of(vocabulary: int) -> float:
    """Return the integer weight of the likeliest class, so that the weights of all classes sum to less than 2^62."""
    return float(2 ** min(44, 61 - (vocabulary - 1).bit_length()))


@op("sample_head", _infer, auxiliary=(0, 1))
def sample_head(
    out: tuple[np.ndarray, np.ndarray], hidden: np.ndarray, weight: np.ndarray, keys: np.ndarray, settings: np.ndarray
) -> None:
    """Draw a token of each row from softmax(hidden·weightᵀ / temperature), and return its log-probability in float32.

    The draw inverts the cumulative distribution in the order of the ids: first over blocks of 128 classes, then in the
    block. At temperature 0 it takes the likeliest token, and the log-probability is taken at temperature 1. A row whose
    largest logit is not finite returns -1 and NaN.

    Args:
        hidden: `[B, H]`.
        weight: `[V, H]`.
        keys: seed, sequence and position of each draw, int64 `[B, 3]`, as for `sample`.
        settings: `[B, 4]`, as for `sample`; only the temperature is used.
    """
    tokens, log_probs = out
    unit, draws = unit_of(len(weight)), uniforms(keys)
    logits = upcast(hidden) @ upcast(weight).T  # [B, V]
    blocks = np.full((len(hidden), -(-len(weight) // BLOCK) * BLOCK), -np.inf, np.float32)
    for row, line in enumerate(logits):
        temperature = float(settings[row, 0])
        scale = np.float32(LOG2_E / (temperature or 1.0))
        blocks[row, : len(line)] = line * scale
        z = blocks[row].reshape(-1, BLOCK)
        best = z.max(axis=1)  # of each block, in powers of 2
        top = best.max()
        if not np.isfinite(top) or not np.isfinite(line).all():
            tokens[row], log_probs[row] = FAILED, np.nan
            continue
        sums = np.exp2(z - best[:, None]).sum(axis=1) * np.exp2(best - top)
        if temperature == 0:
            tokens[row] = token = int(line.argmax())
        else:
            tokens[row] = token = _drawn(z, best, sums, unit, float(draws[row]), len(line))
        log_probs[row] = (blocks[row, token] - top) * LN_2 - np.float32(math.log(sums.sum()))


def _drawn(z: np.ndarray, best: np.ndarray, sums: np.ndarray, unit: float, uniform: float, classes: int) -> int:
    """Return the class in whose interval the uniform number falls."""
    heights = np.cumsum((sums.astype(np.float64) * unit).astype(np.int64))
    target = min(int(uniform * float(heights[-1])), int(heights[-1]) - 1)
    block = int(np.searchsorted(heights, target, side="right"))
    before = int(heights[block - 1]) if block else 0
    share = (target - before + 0.5) / float(heights[block] - before)
    inside = np.cumsum((np.exp2(z[block] - best[block]).astype(np.float64) * unit).astype(np.int64))
    at = int(np.searchsorted(inside, min(int(share * float(inside[-1])), int(inside[-1]) - 1), side="right"))
    return min(block * BLOCK + at, classes - 1)
