"""The types of sample rows for ops, and functions that make sample values. The checks are in `conformance.py`.

A row names an op, an oracle in float64 numpy that owes nothing to the op's reference, and cases. From it the suite
makes every dtype, memory layout and check; see `tests/ops/samples/` for the rows.

Tolerance of a result r whose oracle is e, stored in `dtype` and computed in `work` (float32 for 2-byte floats):

    |r - e| <= [2-byte: eps(dtype)/2 · |e|]  +  4 eps(work) (|e| + [n > 1: sqrt(n) · s])  +  smallest subnormal

      +  [2-byte, on CUDA: inner · eps(factors)/2 · s]

n is the row's `reduction`; factors are of `dtype` unless the row says otherwise; s is the largest magnitude among 1,
the finite inputs and the results: of the whole case, or of the same element where the op is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "FLOATS",
    "INTS",
    "Case",
    "Rows",
    "apart",
    "integers",
    "mask",
    "normal",
    "positive",
    "small_cases",
    "uniform",
]

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        inputs: float64 arrays (run in every dtype of the row), int64 and bool arrays (run as they are), Python numbers,
            None.
        attrs: keyword arguments of the op and of the oracle.
    """

    inputs: tuple[Any, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """All samples of one op.

    Attributes:
        op: its name in the registry.
        oracle: `oracle(*inputs, **attrs)` in float64 numpy gives the result (a tuple where there are several; for an op
            that mutates, the new values of the mutated inputs in order, behind its results). It gets the inputs after
            they were rounded to the dtype under test: float64, int64, bool arrays, or numbers. It must not write into
            them.
        cases: `cases(rng)`; include size 0, one element and 0-d where the op takes them.
        dtypes: what the float64 arrays are run in.
        int_dtypes: what they are run in besides, rounded to small integers, where the op takes integers. "bool" may
            stand here, too: it gives x > 0.
        grads: small cases away from kinks for the gradient check in float64; required when the op has a vjp.
        wrt: indices of inputs to check; None means all float64 arrays.
        errors: (case, exception, regular expression found in the message); arrays keep the numpy dtype they have.
        reduction: how many terms are added up in one result element; 1 means that nothing accumulates, and then only a
            relative error is allowed.
        inner: a bound of the sum of |computed factors| that meet in one result element as factors of a product and are
            rounded to a 2-byte dtype before it, because a GPU's matrix units take no wider ones (1 for the weights
            of a softmax). The CPU, which keeps float32 throughout, is not given this room.
        narrows: on CUDA a float32 operand is rounded to the 2-byte dtype of the operand that it meets; `inner` bounds
            the sum of its |factors|, and eps is that dtype's.
        exact: the op only moves values: results must be equal, to the bit.
        extremes: for elementwise ops: also run on all combinations of 0, -0, inf, NaN, largest, smallest and subnormal
            values of each dtype, with the attributes and other inputs of the first case. Say why where it is False.
        seen: what is compared with the oracle, made of the outputs, where those are not numbers by themselves (the
            halves of a number).
        strided: also run on inputs that are not contiguous; False where attributes speak of memory (as_strided).
    """

    op: str
    oracle: Callable[..., Any]
    cases: Callable[[np.random.Generator], list[Case]]
    dtypes: tuple[str, ...] = FLOATS
    int_dtypes: tuple[str, ...] = ()
    grads: Callable[[np.random.Generator], list[Case]] | None = None
    wrt: tuple[int, ...] | None = None
    errors: tuple[tuple[Case, type[Exception], str], ...] = ()
    reduction: Callable[[Case], int] = lambda case: 1
    inner: int = 0
    narrows: bool = False
    exact: bool = False
    extremes: bool = True
    strided: bool = True
    seen: Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, ...]] | None = None


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal values."""
    return np.asarray(rng.standard_normal(shape))


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    """Values in [low, high)."""
    return np.asarray(rng.uniform(low, high, shape))


def positive(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values in [0.5, 3)."""
    return uniform(rng, 0.5, 3.0, *shape)


def apart(rng: np.random.Generator, *shape: int, gap: float = 0.05) -> np.ndarray:
    """Distinct values in random order, at least `gap` apart and `gap`/2 from 0: safe for sort, max and abs."""
    count = int(np.prod(shape))
    return np.asarray((rng.permutation(count) - count // 2 + 0.5) * gap).reshape(shape)


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> np.ndarray:
    """int64 values in [low, high)."""
    return np.asarray(rng.integers(low, high, shape))


def mask(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random bools."""
    return np.asarray(rng.random(shape) < 0.5)


def small_cases(
    cases: Callable[[np.random.Generator], Any], most: int = 40
) -> Callable[[np.random.Generator], list[Case]]:
    """The small ones of the cases of a backward op, to check its own gradient."""
    return lambda rng: [c for c in cases(rng) if all(np.size(x) <= most for x in c.inputs)][:8]
