"""What follows a draw: the tokens are handed on to the next step, and sequences that are complete end.

The state of a batch is a few arrays with a row for each sequence. They live on the device, so that a step of generation
needs the host for nothing; the host reads the ring of drawn tokens some steps later.
"""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import BOOL, int64
from genesis.errors import DTypeError, ShapeError
from genesis.op import op

FAILED = -1  # what `sample` gives for logits that are not finite
INACTIVE = -2  # in the ring: the row drew nothing in this step


def _infer(
    drawn: Array, log_probs: Array, stops: Array, tokens: Array, lengths: Array, left: Array, keys: Array,
    seen: Array, ring: Array, ring_log_probs: Array, step: Array,
) -> tuple[Spec, ...]:  # fmt: skip
    if ring.ndim != 2 or not ring.shape[0] or drawn.ndim != 1:
        raise ShapeError(f"next_tokens takes drawn [B] and a ring [R, B] of steps, got {drawn.shape} and {ring.shape}")
    (places, rows), arrays = ring.shape, (drawn, tokens, lengths, left)
    if any(x.shape != (rows,) for x in arrays) or keys.shape != (rows, 3) or step.shape != (1,):
        found = ", ".join(str(x.shape) for x in (*arrays, keys, step))
        raise ShapeError(f"next_tokens takes [{rows}] four times, keys [{rows}, 3] and step [1], got {found}")
    if any(x.ndim != 2 or x.shape[0] != rows for x in (stops, seen)):
        raise ShapeError(f"next_tokens takes stops [{rows}, N] and seen [{rows}, V], got {stops.shape}, {seen.shape}")
    if (log_probs.shape, ring_log_probs.shape) not in (((0,), (places, 0)), ((rows,), (places, rows))):
        found = f"{log_probs.shape} and {ring_log_probs.shape}"
        raise ShapeError(f"next_tokens takes log_probs [{rows}] and their ring [{places}, {rows}], got {found}")
    integers = (*arrays, stops, keys, ring, step)
    if any(x.dtype is not int64 for x in integers) or seen.dtype.category != BOOL:
        found = ", ".join(str(x.dtype) for x in (*integers, seen))
        raise DTypeError(f"next_tokens takes int64 arrays and seen as bool, got {found}")
    if log_probs.dtype is not ring_log_probs.dtype or not ring_log_probs.dtype.is_floating_point:
        found = f"{log_probs.dtype} and {ring_log_probs.dtype}"
        raise DTypeError(f"next_tokens takes log-probabilities of one float type, got {found}")
    if not all(x.is_contiguous for x in (*integers, seen, log_probs, ring_log_probs)):
        raise ShapeError("next_tokens takes contiguous arrays: they are the state of a batch, not views of it")
    return ()


@op(
    "next_tokens",
    _infer,
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
    """Hand each row's drawn token on to the next step; `left` is 0 from then on where the row is complete.

    A row is active while its `left` is above 0. Of an active row:

    - the token goes to ring[step mod R, row], its log-probability to ring_log_probs[step mod R, row];
    - where it is `FAILED` (-1), `left` becomes 0, and nothing else changes, so that `tokens` stays a valid id;
    - else tokens[row] = token, lengths[row] += 1, keys[row, 2] += 1, seen[row, token] = True, and `left` becomes 0
      where the token is one of the row's stop ids, else it is one less.

    Of a row that is not active only the ring changes: to `INACTIVE` (-2) and NaN. At last step[0] += 1.

    All arrays are contiguous; integers are int64.

    Args:
        drawn, log_probs: `[B]` each, the outputs of `sample`; `log_probs` is `[0]` where it gave none.
        stops: ids that end each row, `[B, N]`, padded with -1.
        tokens: `[B]`, the last token of each row: the next step's input.
        lengths: `[B]`, tokens in the row's cache; the next step writes its key and value there.
        left: `[B]`, how many tokens the row may still draw. 0: it is complete, or not in use.
        keys: `[B, 3]`, seed, sequence and position of the row's next draw, as `sample` takes them.
        seen: `[B, V]` bool, the tokens that a row has; `[B, 0]` where nobody asks.
        ring: `[R, B]`, the tokens of the last R steps.
        ring_log_probs: `[R, B]` of a float type, which `log_probs` has, too; `[R, 0]` where it is `[0]`.
        step: `[1]`, how many steps were made.
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
