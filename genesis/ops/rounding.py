"""float32 values stored as bfloat16: rounded stochastically, or split into a bfloat16 weight and a 16-bit residual.

A split master is the float32 value with bits (w << 16) + r, where w are the bits of the bfloat16 weight and r is the
residual, a signed 16-bit integer. The weight is the master rounded to nearest, halves away from zero, so nothing is
stored twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.dtypes import DType, bfloat16, float32, int16
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import BLOCK, UNIT
from genesis.random import philox
from genesis.shapes import Shape

COUNTED = 8  # elements whose noise comes from one counter
STREAMS = 3  # values per element that an optimizer step may round: the parameter and two averages


class Noise(NamedTuple):
    """Position of an optimizer step's noise, chosen so that no counter is used twice.

    Attributes:
        seed: seed of the generator.
        first: first counter of the tensor within a stream.
        each: counters of one stream of one step, for all parameters of the optimizer.
    """

    seed: int
    first: int
    each: int

    def counter(self, step: float, stream: int) -> int:
        """Return the first counter of step `step` (from 1) for stream 0 (the parameter), 1 or 2 (its averages)."""
        return self.first + ((int(step) - 1) * STREAMS + stream) * self.each


def flops_of(per_element: int) -> Callable[..., int]:
    """Return the `flops` function of an op with this many operations per element of its first input."""
    return lambda inputs, outputs, attrs: per_element * inputs[0].size


# --- Stochastic rounding ----------------------------------------------------------------------------------------------


def _rounding_infer(x: Array, *, dtype: DType, seed: int, offset: int) -> Spec:
    if x.dtype is not float32 or dtype is not bfloat16:
        raise DTypeError(f"stochastic_round converts float32 to bfloat16, not {x.dtype} to {dtype}")
    return Spec(x.shape, dtype)


def rounded_at_random(values: np.ndarray, seed: int, counter: int) -> np.ndarray:
    """Return float32 `[n]` rounded to bfloat16 with the noise of `stochastic_round` from `counter` on."""
    words = philox(seed, counter, -(-values.size // 8))
    noise = words.astype("<u4", copy=False).view("<u2").reshape(-1)[: values.size]
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + noise) >> np.uint32(16)).astype(np.uint16).view(bfloat16.numpy)
    return np.where(np.isfinite(values), rounded, values.astype(bfloat16.numpy))


@op("stochastic_round", _rounding_infer, flops=flops_of(12))
def stochastic_round(out: np.ndarray, x: np.ndarray, *, dtype: DType, seed: int, offset: int) -> None:
    """Round x up or down at random, with probabilities that make the expected value exact.

    Adds 16 random bits below bfloat16's last bit and truncates the 16 lowest bits. Element i uses half-word i of the
    generator's counters from `offset` on (eight half-words per counter). Infinities and NaN stay unchanged.
    """
    flat = x.reshape(-1)
    rounded = np.empty(flat.size, dtype.numpy)

    def round_units(first: int, last: int) -> None:
        for a in range(first * UNIT, min(last * UNIT, flat.size), BLOCK):
            b = min(a + BLOCK, last * UNIT, flat.size)
            rounded[a:b] = rounded_at_random(flat[a:b], seed, offset + a // 8)

    parallel(round_units, -(-flat.size // UNIT), flat.size)
    out[...] = rounded.reshape(x.shape)


def rounding_counters(shape: Shape, place: int = 32) -> int:
    """Return how many counters a tensor's noise needs; tensors start at multiples of `place` elements."""
    return -(-math.prod(shape) // place) * (place // 8)


# --- Weight and residual ----------------------------------------------------------------------------------------------


def joined(weight: np.ndarray, residual: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write the float32 masters of `[n]` bfloat16 weights and int16 residuals into `out`, and return it."""
    bits = out.view(np.uint32)
    np.copyto(bits, weight.view(np.uint16))
    bits <<= np.uint32(16)
    bits += residual.astype(np.int32).view(np.uint32)  # a negative residual wraps around, which subtracts
    return out


def split_into(weight: np.ndarray, residual: np.ndarray, master: np.ndarray) -> None:
    """Write `[n]` float32 masters into weights and residuals; every NaN becomes the same NaN with residual 0."""
    bits = np.where(np.isnan(master), np.uint32(0x7FC00000), master.view(np.uint32))
    np.copyto(residual.view(np.uint16), bits & np.uint32(0xFFFF), casting="unsafe")
    bits += np.uint32(0x8000)
    np.copyto(weight.view(np.uint16), bits >> np.uint32(16), casting="unsafe")


def check_residual(name: str, weight: Array, residual: Array) -> None:
    """Raise DTypeError or ShapeError unless these are a weight and its residual."""
    if weight.dtype is not bfloat16 or residual.dtype is not int16:
        raise DTypeError(
            f"{name} takes a bfloat16 weight and an int16 residual, got {weight.dtype} and {residual.dtype}"
        )
    if weight.shape != residual.shape:
        raise ShapeError(f"{name}: the weight has shape {weight.shape}, its residual has {residual.shape}")


def _join_infer(weight: Array, residual: Array) -> Spec:
    check_residual("join_master", weight, residual)
    return Spec(weight.shape, float32)


@op("join_master", _join_infer, flops=flops_of(2))
def join_master(out: np.ndarray, weight: np.ndarray, residual: np.ndarray) -> None:
    """Compute the float32 master with bits (w << 16) + r, where w are the bits of the weight."""
    flat = np.empty(weight.size, np.float32)
    joined(weight.reshape(-1), residual.reshape(-1), flat)
    out[...] = flat.reshape(weight.shape)


def _split_infer(weight: Array, residual: Array, master: Array) -> tuple[Spec, ...]:
    check_residual("split_master", weight, residual)
    if master.dtype is not float32 or master.shape != weight.shape:
        raise DTypeError(f"split_master: a {master.dtype} master {master.shape} does not fit weights {weight.shape}")
    return ()


@op("split_master", _split_infer, mutates=(0, 1), flops=flops_of(3))
def split_master(out: tuple[()], weight: np.ndarray, residual: np.ndarray, master: np.ndarray) -> None:
    """Write a float32 master into weight and residual: w = (bits + 0x8000) >> 16 and r = bits - (w << 16)."""
    parts = np.empty(weight.size, weight.dtype), np.empty(weight.size, residual.dtype)
    split_into(*parts, np.ascontiguousarray(master).reshape(-1))
    weight[...], residual[...] = (part.reshape(weight.shape) for part in parts)
