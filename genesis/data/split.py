"""Which documents are held out: a pure function of each document's content. It moves no text and no tokens.

A document is held out when a hash of (seed, content) is below the fraction. So identical documents never fall on both
sides, and adding documents moves none of the others. The fraction is kept on average over documents, not exactly.

A very large document would stand for the whole held-out set, so one with more than a quarter of the bytes that the
fraction asks for stays in training (as long as smaller ones are there to hold out). Only a document near that size can
change sides when others are added.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from genesis.errors import DataError

LARGEST_SHARE = 0.25  # of the bytes to hold out: the most that one document may have


def holdout_points(digests: npt.NDArray[np.uint8], seed: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each document's digest `[D, 32]`, uniform and independent between seeds."""
    key = seed.to_bytes(16, "little", signed=True)
    points = [hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in digests]
    # 53 bits, so that the division is exact and 1.0 is never reached.
    return (np.frombuffer(b"".join(points), "<u8") >> np.uint64(11)) / float(1 << 53)


def split(
    digests: npt.NDArray[np.uint8], text_bytes: npt.NDArray[np.int64], *, seed: int, fraction: float
) -> npt.NDArray[np.bool_]:
    """True for the documents that are held out.

    Args:
        digests: uint8 `[D, 32]`. text_bytes: int64 `[D]`.

    If chance holds out none, the one with the lowest hash is; if all, the one with the highest is not. A fraction of 0
    holds out none.

    Raises:
        DataError: a fraction above 0 of fewer than two different documents.
    """
    points = holdout_points(digests, seed)
    if fraction <= 0:
        return np.zeros(len(points), np.bool_)
    if len(points) == 0 or points.min() == points.max():
        found = "no document" if len(points) == 0 else "only one document, or copies of one"
        what = f"the training sources hold {found}, of which nothing can be held out"
        next = (
            "name held-out sources in data.eval, cut the text into files or JSONL records, or set data.eval_fraction=0"
        )
        raise DataError(what, where="data.train", next=next)
    small = text_bytes <= LARGEST_SHARE * fraction * int(text_bytes.sum())
    if not small.any():
        small = np.ones(len(points), np.bool_)
    held_out: npt.NDArray[np.bool_] = (points < fraction) & small
    held_out |= points == points[small].min()
    if held_out.all():
        held_out = points != points.max()
    return held_out
