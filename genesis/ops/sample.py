"""Sampling each sequence's next token from its logits: penalties, temperature, top-k, top-p, min-p.

A token's random number depends only on seed, sequence and position, so it is the same in every batch and row. No step
sorts the whole vocabulary: only the likeliest tokens are sorted, and more of them if the draw goes beyond.

`next_tokens` passes the tokens to the next step and ends sequences that are complete. The state of a batch consists of
a few arrays with one row per sequence. They stay on the device, so a generation step does not synchronize with the
host; the host reads the ring of drawn tokens some steps later.
"""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import BOOL, INTEGER, float32, float64, int64
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.random import philox_rounds

FAILED = -1  # token of a row whose logits are not finite
INACTIVE = -2  # entry in the ring of `next_tokens` for a row that drew no token in the step
FEW = 256  # tokens sorted in the first attempt
LOW = np.uint64(0xFFFFFFFF)


def _infer(
    logits: Array, keys: Array, settings: Array, top_k: Array, seen: Array | None = None, log_probs: bool = False
) -> tuple[Spec, Spec]:
    if logits.ndim != 2 or not logits.shape[1]:
        raise ShapeError(f"sample takes logits [B, V] of a vocabulary that is not empty, got {logits.shape}")
    rows, vocabulary = logits.shape
    if keys.shape != (rows, 3) or settings.shape != (rows, 4) or top_k.shape != (rows,):
        shapes = f"{keys.shape}, {settings.shape} and {top_k.shape}"
        raise ShapeError(f"sample takes keys [{rows}, 3], settings [{rows}, 4] and top_k [{rows}], got {shapes}")
    if seen is not None and (seen.shape != (rows, vocabulary) or seen.dtype.category != BOOL):
        raise ShapeError(f"sample: seen must be bool [{rows}, {vocabulary}], got {seen.dtype} {seen.shape}")
    if not (logits.dtype.is_floating_point and settings.dtype.is_floating_point):
        raise DTypeError(f"sample takes logits and settings of float types, got {logits.dtype} and {settings.dtype}")
    if keys.dtype is not int64 or top_k.dtype.category != INTEGER:
        raise DTypeError(f"sample takes int64 keys and integer top_k, got {keys.dtype} and {top_k.dtype}")
    return Spec((rows,), int64), Spec((rows if log_probs else 0,), float64 if logits.dtype is float64 else float32)


def uniforms(keys: np.ndarray) -> np.ndarray:
    """Return a float64 in [0, 1) with 53 random bits for each (seed, sequence, position) of `keys` `[B, 3]`.

    Philox's key is the seed; its counter is the position and, 64 bits higher, the sequence.
    """
    words = keys.astype(np.int64).view(np.uint64)
    seed, sequence, position = words[:, 0], words[:, 1], words[:, 2]
    uniform = np.empty(len(keys))
    for each in np.unique(seed).tolist():
        rows = seed == each
        low = (position[rows], sequence[rows])
        counter = tuple(half for word in low for half in (word & LOW, word >> np.uint64(32)))
        bits = philox_rounds(counter, (each & 0xFFFFFFFF, each >> 32))
        high, rest = bits[:, 0].astype(np.uint64), bits[:, 1].astype(np.uint64)
        uniform[rows] = ((high << np.uint64(21)) | (rest >> np.uint64(11))).astype(np.float64) * 2.0**-53
    return uniform


@op("sample", _infer, auxiliary=(0, 1))
def sample(
    out: tuple[np.ndarray, np.ndarray],
    logits: np.ndarray,
    keys: np.ndarray,
    settings: np.ndarray,
    top_k: np.ndarray,
    seen: np.ndarray | None = None,
    log_probs: bool = False,
) -> None:
    """Draw the next token of each row; with `log_probs`, also return its log-probability under the unmodified logits.

    The `top_k` likeliest tokens at the temperature are kept; of these the fewest whose total probability reaches top-p;
    of these the ones at least min-p times as likely as the likeliest. The draw inverts their cumulative distribution,
    ordered from the likeliest token on, equal ones by id; in the order of the ids if top-k, top-p and min-p keep all. A
    row with NaN or infinite logits returns -1.

    Args:
        logits: `[B, V]`.
        keys: seed, sequence and position of each draw, int64 `[B, 3]`; a seed of 2^63 or more as its bits.
        settings: `[B, 4]`: temperature (0 selects the likeliest token), top-p (1 keeps all), min-p (0 keeps all) and
            repetition penalty (1 disables it; Keskar et al., "CTRL", 2019: divides positive logits of seen tokens and
            multiplies negative ones).
        top_k: integers `[B]`; 0 keeps all.
        seen: tokens that occur in the sequence, bool `[B, V]`; None without penalties.
    """
    tokens, chances = out
    draws = uniforms(keys)
    for row, line in enumerate(logits):
        temperature, top_p, min_p, penalty = (float(number) for number in settings[row])
        if not np.isfinite(line).all():
            tokens[row] = FAILED
            chances[row : row + log_probs] = np.nan
            continue
        scores = line if line.dtype.itemsize >= 4 else line.astype(np.float32)
        if seen is not None and penalty != 1:
            scores = _penalized(scores, seen[row], penalty)
        if temperature == 0:
            tokens[row] = scores.argmax()
        else:
            tokens[row] = _draw(scores, temperature, int(top_k[row]), top_p, min_p, float(draws[row]))
        if log_probs:
            chances[row] = _log_prob(line, int(tokens[row]))


def _penalized(scores: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    changed = scores.astype(np.float64)
    part = changed[seen]
    changed[seen] = np.where(part > 0, part / penalty, part * penalty)
    return changed


def _log_prob(line: np.ndarray, token: int) -> float:
    wide = line.astype(np.float64)
    wide -= wide.max()
    return float(wide[token] - np.log(np.exp(wide).sum()))


def _draw(scores: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    vocabulary = len(scores)
    most = min(top_k, vocabulary) if top_k > 0 else vocabulary
    if most == vocabulary and top_p >= 1 and min_p <= 0:
        cumulated = np.cumsum(_weights(scores, scores.max(), temperature))
        return min(int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right")), vocabulary - 1)
    total = None if most < vocabulary else float(_weights(scores, scores.max(), temperature).sum())
    count = most if most < vocabulary else min(FEW, most)
    # Sort more and more tokens until the cut is among them.
    while True:
        order = _likeliest(scores, count)
        weights = _weights(scores[order], scores[order[0]], temperature)
        cumulated = np.cumsum(weights / (weights.sum() if total is None or count == most else total))
        kept = len(order)
        if top_p < 1:
            kept = min(int(np.searchsorted(cumulated, top_p)) + 1, kept)
        if min_p > 0:
            kept = min(kept, int(np.count_nonzero(weights >= min_p)))  # the likeliest has weight 1
        if kept < len(order) or count == most:
            position = int(np.searchsorted(cumulated[:kept], uniform * cumulated[kept - 1], side="right"))
            return int(order[min(position, kept - 1)])
        count = min(8 * count, most)


def _weights(scores: np.ndarray, top: float, temperature: float) -> np.ndarray:
    """Return probabilities relative to the likeliest token's."""
    weights: np.ndarray = np.exp((scores.astype(np.float64) - float(top)) / temperature)
    return weights


def _likeliest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` likeliest tokens in order; equal ones by id, lowest first."""
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    candidates = np.flatnonzero(scores >= least)  # by id; more than `count` if the last ones are equal
    order: np.ndarray = candidates[np.argsort(-scores[candidates], kind="stable")][:count]
    return order


# --- After a draw -----------------------------------------------------------------------------------------------------


def _next_infer(
    drawn: Array, log_probs: Array, stops: Array, tokens: Array, lengths: Array, left: Array, keys: Array,
    seen: Array, ring: Array, ring_log_probs: Array, step: Array,
) -> tuple[Spec, ...]:  # fmt: skip
    if ring.ndim != 2 or not ring.shape[0] or drawn.ndim != 1:
        raise ShapeError(f"next_tokens takes drawn [B] and a ring [R, B] of steps, got {drawn.shape} and {ring.shape}")
    (places, rows), arrays = ring.shape, (drawn, tokens, lengths, left)
    if any(x.shape != (rows,) for x in arrays) or keys.shape != (rows, 3) or step.shape != (1,):
        listed = ", ".join(str(x.shape) for x in (*arrays, keys, step))
        raise ShapeError(f"next_tokens takes [{rows}] four times, keys [{rows}, 3] and step [1], got {listed}")
    if any(x.ndim != 2 or x.shape[0] != rows for x in (stops, seen)):
        raise ShapeError(f"next_tokens takes stops [{rows}, N] and seen [{rows}, V], got {stops.shape}, {seen.shape}")
    if (log_probs.shape, ring_log_probs.shape) not in (((0,), (places, 0)), ((rows,), (places, rows))):
        listed = f"{log_probs.shape} and {ring_log_probs.shape}"
        raise ShapeError(f"next_tokens takes log_probs [{rows}] and their ring [{places}, {rows}], got {listed}")
    integers = (*arrays, stops, keys, ring, step)
    if any(x.dtype is not int64 for x in integers) or seen.dtype.category != BOOL:
        listed = ", ".join(str(x.dtype) for x in (*integers, seen))
        raise DTypeError(f"next_tokens takes int64 arrays and seen as bool, got {listed}")
    if log_probs.dtype is not ring_log_probs.dtype or not ring_log_probs.dtype.is_floating_point:
        listed = f"{log_probs.dtype} and {ring_log_probs.dtype}"
        raise DTypeError(f"next_tokens takes log-probabilities of one float type, got {listed}")
    if not all(x.is_contiguous for x in (*integers, seen, log_probs, ring_log_probs)):
        raise ShapeError("next_tokens takes contiguous arrays: they are the state of a batch, not views of it")
    return ()


@op(
    "next_tokens",
    _next_infer,
    mutates=(3, 4, 5, 6, 7, 8, 9, 10),
    nbytes=lambda i, o, a: 8 * i[0].shape[0] * (12 + i[2].shape[1]),
)
def next_tokens(
    out: tuple[()],
    drawn: np.ndarray,
    log_probs: np.ndarray,
    stops: np.ndarray,
    tokens: np.ndarray,
    lengths: np.ndarray,
    left: np.ndarray,
    keys: np.ndarray,
    seen: np.ndarray,
    ring: np.ndarray,
    ring_log_probs: np.ndarray,
    step: np.ndarray,
) -> None:
    """Pass each row's drawn token to the next step; `left` becomes 0 for rows that are complete.

    A row is active while its `left` is above 0. For an active row:

    - the token is written to ring[step mod R, row], its log-probability to ring_log_probs[step mod R, row];
    - if it is `FAILED` (-1), `left` becomes 0 and nothing else changes, so that `tokens` stays a valid id;
    - otherwise tokens[row] = token, lengths[row] += 1, keys[row, 2] += 1, seen[row, token] = True, and `left` becomes
      0 if the token is one of the row's stop ids, else it decreases by 1.

    For an inactive row, only the ring changes: to `INACTIVE` (-2) and NaN. Finally step[0] += 1.

    All arrays are contiguous; integers are int64.

    Args:
        drawn: `[B]`, tokens from `sample`.
        log_probs: `[B]`, log-probabilities from `sample`; `[0]` if it returned none.
        stops: ids that end each row, `[B, N]`, padded with -1.
        tokens: `[B]`, the last token of each row, which is the next step's input.
        lengths: `[B]`, tokens in the row's cache; the next step writes its key and value at this position.
        left: `[B]`, number of tokens that the row may still draw; 0 for a complete or unused row.
        keys: `[B, 3]`, seed, sequence and position of the row's next draw, for `sample`.
        seen: `[B, V]` bool, the tokens that occur in a row; `[B, 0]` if no row has a penalty.
        ring: `[R, B]`, the tokens of the last R steps.
        ring_log_probs: `[R, B]`, in the float dtype of `log_probs`; `[R, 0]` if that is `[0]`.
        step: `[1]`, number of steps so far.
    """
    place = int(step[0]) % len(ring)
    active, failed = left > 0, drawn == FAILED
    ring[place] = np.where(active, drawn, INACTIVE)
    if log_probs.size:
        ring_log_probs[place] = np.where(active, log_probs, np.nan)
    ends = failed | (stops == drawn[:, None]).any(axis=1)
    left[active] = np.where(ends, 0, left - 1)[active]
    goes_on = active & ~failed
    tokens[goes_on] = drawn[goes_on]
    lengths[goes_on] += 1
    keys[goes_on, 2] += 1
    if seen.size:
        seen[goes_on, drawn[goes_on]] = True
    step += 1
