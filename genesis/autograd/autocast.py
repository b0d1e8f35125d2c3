"""Mixed precision by the op: inside `autocast` matmuls run in two bytes, and what needs range or sums in float32.

This is the state of a thread; record.py casts. Which ops are cast, their records say (`Op.autocast`): torch's lists for
CUDA with what those for the CPU add, the same on all devices, so that a program computes in the same types everywhere.
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


class Kept(NamedTuple):
    """A parameter's cast, with what it was made of: `source` is held so that no other tensor gets its id."""

    source: object
    array: Array
    version: int
    made: Any

    def serves(self, array: Array, is_recording: bool) -> bool:
        """Whether `array` is what was cast, unchanged, and the cast is on the tape where it must be."""
        is_current = array is self.array and array.storage.version == self.version
        return is_current and (self.made.node is not None or not is_recording)


class Settings(NamedTuple):
    """What `autocast` sets: the types of devices where it is on and of all, whether casts of parameters are kept."""

    low: Mapping[str, DType]
    types: Mapping[str, DType]
    keeps: bool


class _State(threading.local):
    """The thread's settings, one by one because every op looks at `low`; how deep blocks are nested; casts kept."""

    low: Mapping[str, DType] = {}
    types: Mapping[str, DType] = {"cpu": bfloat16, "cuda": float16}
    keeps = True
    depth = 0

    def __init__(self) -> None:
        self.kept: dict[tuple[int, DType], Kept] = {}


autocasting = _State()


def settings() -> Settings:
    """Those of this thread, for `resumed`."""
    return Settings(autocasting.low, autocasting.types, autocasting.keeps)


def _set(values: Settings) -> None:
    autocasting.low, autocasting.types, autocasting.keeps = values


@contextmanager
def resumed(values: Settings) -> Iterator[None]:
    """Inside the block autocast is as `values` say; it starts with no casts kept, and leaves those around it alone."""
    outer, kept = settings(), autocasting.kept
    _set(values)
    autocasting.kept = {}
    autocasting.depth += 1
    try:
        yield
    finally:
        autocasting.depth -= 1
        autocasting.kept = kept
        _set(outer)


# --- The types of a call ----------------------------------------------------------------------------------------------


def low_precision_type(x: Any) -> DType | None:
    """What an operand of a matmul is cast to, or None."""
    found = autocasting.low.get(x.device.type) if _takes_part(x) else None
    return None if found is None or x.dtype is found else found


def fp32_type(x: Any) -> DType | None:
    """What an operand that needs range is cast to, or None."""
    is_narrow = _takes_part(x) and x.dtype is not float32
    return float32 if is_narrow and x.device.type in autocasting.low else None


def _takes_part(x: Any) -> bool:
    return isinstance(x, Array) and x.dtype.is_floating_point and x.dtype is not float64


def wanted_types(op: Op, arrays: tuple[Any, ...]) -> list[DType | None]:
    """For each input the type that it is to be cast to, None to leave it as it is; empty where nothing is cast."""
    if op.autocast == "low_precision":
        count = op.autocast_inputs
        return [low_precision_type(x) if count is None or i < count else None for i, x in enumerate(arrays)]
    if op.autocast == "fp32":
        return [fp32_type(x) for x in arrays]
    found = [x.dtype for x in arrays if _takes_part(x) and x.device.type in autocasting.low] if op.autocast else []
    if not found:
        return []
    widest = functools.reduce(promote_types, found)
    return [widest if _takes_part(x) and x.dtype is not widest else None for x in arrays]


# --- What users call --------------------------------------------------------------------------------------------------


def _checked(device_type: str) -> str:
    if device_type not in DEVICES:
        raise UsageError(f"autocast has no device type {device_type!r}", next='use "cpu" or "cuda", without a number')
    return device_type


def is_autocast_enabled(device_type: str) -> bool:
    """Whether ops on such devices ("cpu" or "cuda") are cast, in this thread."""
    return _checked(device_type) in autocasting.low


def get_autocast_dtype(device_type: str) -> DType:
    """The type of matmuls in a block that names none: bfloat16 on the CPU, float16 on CUDA, or as a block around."""
    return autocasting.types[_checked(device_type)]


class autocast(Switch):  # noqa: N801  torch's name
    """Inside the block, or the decorated function, ops choose their float types themselves, in this thread.

    Matmuls (linear layers, attention and what is fused with them) run in `dtype`; softmax, norms, losses, sums, powers
    and the like in float32; all others in the type of their inputs. Inputs are cast on the tape, so that gradients have
    their types; backward runs outside of autocast, in the types of forward. float64 is left alone, as are changes in
    place and calls with `out=`. A result asked for with `dtype=` has that type.

    Args:
        device_type: "cpu" or "cuda": the devices whose tensors are meant.
        dtype: bfloat16 or float16; unless given, as `get_autocast_dtype` says. float16 needs `optim.GradScaler`.
        enabled: False switches it off inside the block.
        cache_enabled: keep casts of parameters until the outermost block ends, or the parameter changes; unless given,
            as around (at first, yes).

    Raises:
        UsageError: for another device type.
        DTypeError: for another dtype.
    """

    def __init__(
        self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        super().__init__(enabled)
        self.device_type = _checked(device_type)
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
            autocasting.kept.clear()
        _set(self._outer.pop())
