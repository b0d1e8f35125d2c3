"""Mixed precision per op: inside `autocast`, matmuls run in bfloat16 or float16, and ops that need range in float32.

This module holds the state of a thread; record.py casts. `Op.autocast` decides how the inputs of an op are cast. The
choices are torch's lists for CUDA plus those for the CPU, on every device, so a program has the same types everywhere.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from genesis.array import Array
from genesis.autograd.modes import Switch
from genesis.dtypes import DType, as_dtype, bfloat16, float16, float32, float64, promote_types
from genesis.errors import DTypeError, UsageError
from genesis.op import Op

DEVICES = ("cpu", "cuda")
CHOICES = (bfloat16, float16)


class CachedCast(NamedTuple):
    """The cast of a parameter. `source` keeps the parameter alive, so that no other tensor can reuse its id."""

    source: object
    array: Array
    version: int
    cast: Any

    def serves(self, array: Array, is_recording: bool) -> bool:
        """Whether the cast is still valid for `array`, and recorded on the tape if `is_recording`."""
        is_current = array is self.array and array.storage.version == self.version
        return is_current and (self.cast.node is not None or not is_recording)


class Settings(NamedTuple):
    """The settings of `autocast`."""

    low: Mapping[str, DType]  # the matmul type of device types where autocast is on
    types: Mapping[str, DType]  # the default matmul type of each device type
    keeps: bool  # whether casts of parameters are cached


class _State(threading.local):
    """The settings of a thread as single fields (every op reads `low`), the nesting depth, and the cached casts."""

    low: Mapping[str, DType] = {}
    types: Mapping[str, DType] = {"cpu": bfloat16, "cuda": float16}
    keeps = True
    depth = 0

    def __init__(self) -> None:
        self.casts: dict[tuple[int, DType], CachedCast] = {}


autocasting = _State()


def settings() -> Settings:
    """The settings of this thread, to be passed to `resumed`."""
    return Settings(autocasting.low, autocasting.types, autocasting.keeps)


def _set(values: Settings) -> None:
    autocasting.low, autocasting.types, autocasting.keeps = values


@contextmanager
def resumed(values: Settings) -> Iterator[None]:
    """Apply `values` inside the block. It starts with an empty cache of casts and restores the outer one."""
    outer, casts = settings(), autocasting.casts
    _set(values)
    autocasting.casts = {}
    autocasting.depth += 1
    try:
        yield
    finally:
        autocasting.depth -= 1
        autocasting.casts = casts
        _set(outer)


# --- The types of a call ----------------------------------------------------------------------------------------------


def low_precision_type(x: Any) -> DType | None:
    """The type that a matmul operand is cast to, or None to leave it."""
    low = autocasting.low.get(x.device.type) if _takes_part(x) else None
    return None if low is None or x.dtype is low else low


def fp32_type(x: Any) -> DType | None:
    """The type that an operand of an op that needs range is cast to, or None to leave it."""
    is_narrow = _takes_part(x) and x.dtype is not float32
    return float32 if is_narrow and x.device.type in autocasting.low else None


def _takes_part(x: Any) -> bool:
    return isinstance(x, Array) and x.dtype.is_floating_point and x.dtype is not float64


def wanted_types(op: Op, arrays: tuple[Any, ...]) -> list[DType | None]:
    """The type each input is cast to, or None to leave it. The list is empty if the op casts nothing."""
    if op.autocast == "low_precision":
        count = op.autocast_inputs
        return [low_precision_type(x) if count is None or i < count else None for i, x in enumerate(arrays)]
    if op.autocast == "fp32":
        return [fp32_type(x) for x in arrays]
    dtypes = [x.dtype for x in arrays if _takes_part(x) and x.device.type in autocasting.low] if op.autocast else []
    if not dtypes:
        return []
    widest = functools.reduce(promote_types, dtypes)
    return [widest if _takes_part(x) and x.dtype is not widest else None for x in arrays]


# --- What users call --------------------------------------------------------------------------------------------------


def _check_device_type(device_type: str) -> str:
    if device_type not in DEVICES:
        raise UsageError(f"autocast has no device type {device_type!r}", next='use "cpu" or "cuda", without a number')
    return device_type


def is_autocast_enabled(device_type: str = "cuda") -> bool:
    """Whether autocast is on for `device_type` ("cpu" or "cuda") in this thread."""
    return _check_device_type(device_type) in autocasting.low


def get_autocast_dtype(device_type: str) -> DType:
    """The default matmul type of a block: the enclosing block's, else bfloat16 on the CPU and float16 on CUDA."""
    return autocasting.types[_check_device_type(device_type)]


class autocast(Switch):  # noqa: N801  torch's name
    """Let ops choose their float types inside the block or the decorated function, in this thread.

    Matmuls (linear layers, attention and the ops fused with them) run in `dtype`. Softmax, norms, losses, sums, powers
    and the like run in float32. All other ops keep the type of their inputs. Casts are recorded on the tape, so each
    gradient has the type of its input. Backward runs outside autocast, in the types of forward. Autocast changes
    neither float64 inputs nor in-place ops nor calls with `out=`. An explicit `dtype=` wins.

    Args:
        device_type: "cpu" or "cuda": the devices whose tensors are cast.
        dtype: bfloat16 or float16; `get_autocast_dtype` by default. float16 needs `optim.GradScaler`.
        enabled: False switches autocast off inside the block.
        cache_enabled: cache casts of parameters until the outermost block ends or the parameter changes. By default
            as in the enclosing block, True in the outermost one.

    Raises:
        UsageError: for another device type.
        DTypeError: for another dtype.
    """

    def __init__(
        self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        super().__init__(enabled)
        self.device_type = _check_device_type(device_type)
        self.dtype = get_autocast_dtype(device_type) if dtype is None else as_dtype(dtype)
        if self.dtype not in CHOICES:
            raise DTypeError(f"autocast runs matmuls in bfloat16 or float16, not in {self.dtype.name}")
        self.keeps = autocasting.keeps if cache_enabled is None else cache_enabled

    def __enter__(self) -> None:
        self._outer.append(settings())
        low = {device: dtype for device, dtype in autocasting.low.items() if device != self.device_type}
        if self.value:
            low[self.device_type] = self.dtype
        _set(Settings(low, {**autocasting.types, self.device_type: self.dtype}, self.keeps))
        autocasting.depth += 1

    def __exit__(self, *error: object) -> None:
        autocasting.depth -= 1
        if autocasting.depth == 0:
            autocasting.casts.clear()
        _set(self._outer.pop())
