"""How references add up rows that go to the same place: in the order of their positions, so that results repeat.

numpy's own `add.at` is slow for rows and `add.reduceat` does not vectorise over them; wide rows are therefore sorted by
their target and each run is added with one call.
"""

from __future__ import annotations

import numpy as np

from genesis.ops.blocks import as_type, work_type

_WIDE = 32  # elements; from here on one call for each run of rows is faster than element by element


def _spread(keys: np.ndarray, width: int) -> np.ndarray:
    """Flat places of the elements of rows `keys` in a `[rows, width]` array."""
    return keys if width == 1 else (keys[:, None] * width + np.arange(width)).reshape(-1)


def sum_rows(keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows added up by key.

    Args:
        keys: `[N]` int64.
        rows: `[N, W]`; 2-byte floats are added in float32.

    Returns:
        The distinct keys `[U]` in rising order, and their sums `[U, W]`.
    """
    order = np.argsort(keys, kind="stable")
    ranked = keys[order]
    first = np.ones(len(ranked), bool)
    np.not_equal(ranked[1:], ranked[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=len(ranked))
    width, dtype = rows.shape[1], work_type(rows.dtype)
    if width < _WIDE:
        sums = np.zeros((len(starts), width), dtype)
        number = np.empty(len(keys), np.int64)  # of each row's key among the distinct ones
        number[order] = np.repeat(np.arange(len(starts)), counts)
        np.add.at(sums.reshape(-1), _spread(number, width), as_type(rows, dtype).reshape(-1))
        return ranked[starts], sums
    sums = as_type(rows[order[starts]], dtype)
    for i in np.flatnonzero(counts > 1).tolist():
        run = as_type(rows[order[starts[i] : starts[i] + counts[i]]], dtype)
        np.add.reduce(run, axis=0, out=sums[i])
    return ranked[starts], sums


def add_rows(target: np.ndarray, places: tuple[np.ndarray, ...], rows: np.ndarray) -> None:
    """target[places[0][n], places[1][n], ...] += rows[n] for n in order; places may repeat.

    Args:
        target: `[M1, ..., Mk, *R]`, of any strides.
        places: k arrays `[N]` of int64 within bounds.
        rows: `[N, *R]`.
    """
    sizes, rest = target.shape[: len(places)], target.shape[len(places) :]
    keys = np.ravel_multi_index(places, sizes) if len(places) > 1 else places[0]
    width = int(np.prod(rest, dtype=np.int64))
    if keys.size == 0 or width == 0:
        return
    dtype = work_type(target.dtype)
    flat = rows.reshape(len(keys), width)
    if width < _WIDE and target.dtype == dtype and target.flags.c_contiguous:
        np.add.at(target.reshape(-1), _spread(keys, width), as_type(flat, dtype).reshape(-1))
        return
    found, sums = sum_rows(keys, flat if flat.dtype == target.dtype else as_type(flat, dtype))
    where = np.unravel_index(found, sizes)
    target[where] = as_type(target[where], dtype) + sums.reshape(len(found), *rest)
