"""Settings of the process under torch's names, such as the default dtype and random states, and facts of tensors."""

from __future__ import annotations

import secrets
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from genesis import backend, dtypes, random
from genesis.array import from_numpy
from genesis.autograd.record import TensorBase
from genesis.backend import Device, cpu
from genesis.dtypes import BOOL, FLOAT, INTEGER, DType, as_dtype
from genesis.errors import DTypeError, UsageError
from genesis.functions.surface import DeviceLike, DTypeLike, Tensor, array_of, public
from genesis.random import default_generator

_PRECISIONS = ("highest", "high", "medium")
_chosen: dict[str, Any] = {"precision": "highest", "deterministic": False, "warn_only": False, "interop": 1}


# --- Defaults ---------------------------------------------------------------------------------------------------------


@public(method=False)
def get_default_dtype() -> DType:
    """Return the dtype of tensors made from Python floats, and of factories without `dtype`."""
    return dtypes.default_dtype()


@public(method=False)
def set_default_dtype(d: DTypeLike) -> None:
    """Set the default float dtype: of factories, Python floats, and float results of integers.

    >>> genesis.set_default_dtype(genesis.float64)
    >>> genesis.tensor([0.5]).dtype
    genesis.float64
    >>> genesis.set_default_dtype(genesis.float32)
    """
    dtypes.set_default_dtype(as_dtype(d))
    cuda = sys.modules.get("genesis.backend.cuda")
    if cuda is not None:  # recorded launches depend on the default
        cuda.forget_calls()


@public(method=False)
def get_default_device() -> Device:
    """Return the device of factories without `device`."""
    return backend.as_device(None)


@public(method=False)
def set_default_device(device: DeviceLike) -> None:
    """Set the device of factories without `device`; None means the CPU."""
    backend.set_default_device(device)


# --- Random state -----------------------------------------------------------------------------------------------------


@public(method=False)
def seed() -> int:
    """Seed the default generator from the system's entropy, and return the seed."""
    return default_generator.manual_seed(secrets.randbits(63)).initial_seed()


@public(method=False)
def initial_seed() -> int:
    """Return the seed of the default generator."""
    return default_generator.initial_seed()


@public(method=False)
def get_rng_state() -> Tensor:
    """Return the state of the default generator: uint8 `[16]`, the seed and the position.

    >>> state = genesis.get_rng_state()
    >>> first = genesis.rand(3)
    >>> genesis.set_rng_state(state)
    >>> genesis.equal(first, genesis.rand(3))
    True
    """
    return default_generator.get_state()


@public(method=False)
def set_rng_state(new_state: Tensor) -> None:
    """Restore a state that `get_rng_state` returned."""
    default_generator.set_state(new_state)


def _pack(state: dict[str, int]) -> Any:
    packed = np.frombuffer(struct.pack("<QQ", state["seed"], state["offset"]), np.uint8)
    return TensorBase.wrap(from_numpy(packed, share=False))


def _unpack(state: Any) -> dict[str, int]:
    array = array_of(state, "set_rng_state")
    if array.dtype is not dtypes.uint8:
        raise DTypeError(f"a random state is uint8, got {array.dtype}", next="pass what get_rng_state() returned")
    if array.shape != (16,):
        raise UsageError(f"a random state has 16 bytes, got shape {array.shape}", next="use get_rng_state()'s value")
    seed_value, offset = struct.unpack("<QQ", np.ascontiguousarray(array.numpy()).tobytes())
    return {"seed": seed_value, "offset": offset}


@contextmanager
def fork_rng(devices: Any = None, enabled: bool = True, *rest: Any, device_type: Any = None) -> Iterator[None]:
    """Restore the state of the default generator, which serves all devices, at the end of the block."""
    state = default_generator.get_state()
    try:
        yield
    finally:
        if enabled:
            default_generator.set_state(state)


random._hooks.update(device=backend.as_device, pack=_pack, unpack=_unpack)
for _function in (fork_rng, seed, initial_seed, get_rng_state, set_rng_state):
    setattr(random, _function.__name__, _function)


# --- Facts ------------------------------------------------------------------------------------------------------------


@public(method=False)
def is_tensor(obj: Any) -> bool:
    """Return whether `obj` is a tensor."""
    return isinstance(obj, TensorBase)


@public(method=False)
def is_floating_point(x: Tensor) -> bool:
    """Return whether x has a float dtype."""
    return array_of(x, "is_floating_point").dtype.is_floating_point


@public(method=False)
def numel(x: Tensor) -> int:
    """Return the number of elements of x."""
    return array_of(x, "numel").size


@public(method=False)
def can_cast(from_: DTypeLike, to: DTypeLike) -> bool:
    """Return whether promotion may cast `from_` to `to`: never to a lower category, and to bool only from bool.

    >>> genesis.can_cast(genesis.float64, genesis.int32)
    False
    """
    a, b = as_dtype(from_), as_dtype(to)
    if a.category == FLOAT:
        return b.category == FLOAT
    return b.category != BOOL if a.category == INTEGER else True


# --- Execution --------------------------------------------------------------------------------------------------------


@public(method=False)
def use_deterministic_algorithms(mode: bool, *, warn_only: bool = False) -> None:
    """Record the choice; every algorithm here is deterministic in either case."""
    _chosen["deterministic"], _chosen["warn_only"] = mode, warn_only


@public(method=False)
def are_deterministic_algorithms_enabled() -> bool:
    """Return what `use_deterministic_algorithms` recorded."""
    return bool(_chosen["deterministic"])


@public(method=False)
def is_deterministic_algorithms_warn_only_enabled() -> bool:
    """Return the `warn_only` that `use_deterministic_algorithms` recorded."""
    return bool(_chosen["deterministic"] and _chosen["warn_only"])


@public(method=False)
def get_num_threads() -> int:
    """Return how many threads split elementwise work on the CPU."""
    return cpu.threads()


@public(method=False)
def set_num_threads(threads: int) -> None:
    """Set how many threads elementwise work and matmuls on the CPU may use."""
    _positive("set_num_threads", threads)
    cpu.set_threads(threads)
    cpu.set_blas_threads(threads)


@public(method=False)
def get_num_interop_threads() -> int:
    """Return what `set_num_interop_threads` recorded, by default 1: ops run one after another."""
    return int(_chosen["interop"])


@public(method=False)
def set_num_interop_threads(threads: int) -> None:
    """Record a number of threads; it has no effect, because ops run one after another."""
    _positive("set_num_interop_threads", threads)
    _chosen["interop"] = threads


def _positive(function: str, count: int) -> None:
    if count < 1:
        raise UsageError(f"{function} takes a positive number of threads, got {count}")


@public(method=False)
def get_float32_matmul_precision() -> str:
    """Return the precision of float32 matmuls on CUDA: "highest", "high" or "medium"."""
    return str(_chosen["precision"])


@public(method=False)
def set_float32_matmul_precision(precision: str) -> None:
    """Let float32 matmuls on CUDA round their operands to TF32 ("high", "medium"), or not ("highest", the default).

    "medium" equals "high": no matmul rounds to bfloat16.
    """
    from genesis.backend.cuda.dispatch import allow_tf32

    if precision not in _PRECISIONS:
        raise UsageError(f"the precision is {precision!r}", next="use one of " + ", ".join(_PRECISIONS))
    _chosen["precision"] = precision
    allow_tf32.set(precision != "highest")
