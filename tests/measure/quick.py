"""Limits and plans that take no time, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from genesis.backend import CPU, Device
from genesis.dtypes import DType, float32
from genesis.measure import limits
from genesis.measure.limits import Limits
from genesis.measure.timing import Plan

__all__ = ["PLAN", "made_limits", "small_limits"]

PLAN = Plan(precision=0.5, seconds=0.002, warm_up=0.0, sample=1e-5)
_CACHED = (limits.limits_of, limits.copy_rate, limits._product_rate, limits._smallest_call)


def made_limits(device: Device = CPU, dtype: DType = float32) -> Limits:
    """A machine that copies 10 GB/s, multiplies at 100 GFLOP/s and takes 1 µs for the smallest call."""
    return Limits(device, dtype, 1e10, 1e11, 1e-6, 1e-7)


@contextmanager
def small_limits() -> Iterator[None]:
    """Limits inside the block are measured on little memory, and forgotten."""
    small = {"cpu": (1 << 12,), "cuda": (1 << 12,), "interpreter": (1 << 12,)}
    widths = {"cpu": (16,), "cuda": (16,), "interpreter": (16,)}
    for function in _CACHED:
        function.cache_clear()
    patches = mock.patch.multiple(limits, QUICK=PLAN, COPIED=small, WIDTHS=widths)
    with patches:
        yield
    for function in _CACHED:
        function.cache_clear()
