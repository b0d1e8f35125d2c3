"""In which type a model's weights are held where nobody names one: the one rule of every command and of `load`."""

from __future__ import annotations

from dataclasses import dataclass

from genesis.backend import CPU, Device
from genesis.dtypes import as_dtype
from genesis.errors import DTypeError

AUTO = "auto"
WEIGHT_TYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class WeightType:
    """A type of weights and activations.

    Attributes:
        name: "float32", "bfloat16" or "float16".
        reason: why, where the type was not named; else empty.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} (auto: {self.reason})" if self.reason else self.name


def weight_type(asked: object, device: Device, stored: str | None, *, trains: bool = False) -> WeightType:
    """The type that `asked` means on `device`.

    "auto" and None are float32 on the CPU, whose 16-bit arithmetic is slow. On a GPU they are the type in which the
    weights are stored, and bfloat16 for a model from scratch.

    Args:
        asked: "auto", None, or a dtype by any of its names.
        stored: the float type of the model folder; None for a model from scratch.
        trains: weights that are trained are never float16, whose gradients underflow without loss scaling.

    Raises:
        DTypeError: weights cannot have the type that was asked for.
    """
    if asked is not None and asked != AUTO:
        name = as_dtype(asked).name
        if name not in WEIGHT_TYPES:
            raise DTypeError(f"weights cannot be {name}", next=f"use one of {', '.join((AUTO, *WEIGHT_TYPES))}")
        return WeightType(name)
    if device == CPU:
        return WeightType("float32", "on the CPU")
    if stored is None:
        return WeightType("bfloat16", "from scratch on a GPU")
    if stored == "float16" and trains:
        return WeightType("bfloat16", "the folder's float16 is not trained in")
    if stored not in WEIGHT_TYPES:
        return WeightType("float32", f"the folder has {stored}")
    return WeightType(stored, "the folder's type")
