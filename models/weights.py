"""A model's weights: the type in which they are held, whether they fit and are finite, and how they become 8 bits.

These are the rules of every command and of `load`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import genesis
from genesis import cuda, nn
from genesis.backend import CPU, Device
from genesis.backend.host import host_memory
from genesis.dtypes import as_dtype
from genesis.errors import DTypeError, NumericError, OutOfMemoryError, UsageError
from genesis.files.hf import list_names
from genesis.nn.quantized import Kind, QuantizedLinear, quantize_layers
from genesis_models.adapters.layers import adapted_layers
from genesis_models.blocks import CausalLM

AUTO = "auto"
WEIGHT_TYPES = ("float32", "bfloat16", "float16")
PIECE = 1 << 22  # elements that are looked at together
QUANTIZED: tuple[Kind, ...] = ("fp8", "int8")
M = TypeVar("M", bound=CausalLM)


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


def check_fits(count: int, dtype: str, device: Device, *, where: str) -> None:
    """Raises: OutOfMemoryError, where `count` weights alone need more than all memory of `device`."""
    needed = count * as_dtype(dtype).itemsize
    total = host_memory() if device == CPU else cuda.mem_get_info(device)[1]
    if total is not None and needed > total:
        what = f"the model of this config has {count:,} parameters, {_readable(needed)} in {dtype}, and"
        what += f" {'this host' if device == CPU else device} has {_readable(total)} of memory"
        next = "check hidden_size, intermediate_size, num_hidden_layers and vocab_size, or take a smaller model"
        raise OutOfMemoryError(what, where=where, next=next)


def _readable(size: int) -> str:
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB")):
        if size >= 1 << 10 * power:
            return f"{size / (1 << 10 * power):,.1f} {unit}"
    return f"{size / 2**20:.1f} MiB"


def check_finite(model: CausalLM, *, where: str) -> None:
    """Raises: NumericError, naming at most 10 parameters that hold a NaN or an infinity, with their count."""
    with genesis.no_grad():
        found = list[str]()
        for name, parameter in model.named_parameters():
            flat, size = parameter.detach().flatten(), parameter.numel()
            pieces = (flat.narrow(0, i, min(PIECE, size - i)) for i in range(0, size, PIECE))
            if not all(bool(genesis.isfinite(piece).all().item()) for piece in pieces):
                found.append(name)
    if found:
        next = "take the model again, or an older checkpoint: these weights are damaged"
        if model.head_weight.dtype is genesis.float16:
            next = "load them as float32 or bfloat16: float16 ends at 65,504"
        raise NumericError(f"weights are NaN or infinite in tensors: {list_names(found)}", where=where, next=next)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has weights in 8 bits."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def quantize(model: M, kind: Kind) -> M:
    """Give a model weights in 8 bits, in place; returns it. It then generates, and cannot be trained, cast or saved.

    Args:
        kind: "fp8" (e4m3; on GPUs of compute capability 8.9 and later, and on the CPU) or "int8".

    Raises:
        UsageError: another kind, or a model that is quantised already or has adapters.
    """
    if kind not in QUANTIZED:
        raise UsageError(f"weights in {kind!r}", next=f"use {' or '.join(QUANTIZED)}")
    if is_quantized(model):
        raise UsageError("the model is quantized already", next="load it again")
    if adapted_layers(model):
        raise UsageError("a model with adapters cannot be quantized", next="merge them first")
    if model.lm_head is None:  # the embedding stays as it is
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = model.model.embed_tokens.weight
        (model.lm_head,) = quantize_layers([layer], kind)
    for block in list(model.modules()):
        layers = {name: part for name, part in block.named_children() if type(part) is nn.Linear}
        for width in dict.fromkeys(layer.in_features for layer in layers.values()):
            names = [name for name, layer in layers.items() if layer.in_features == width]
            for name, made in zip(names, quantize_layers([layers[n] for n in names], kind), strict=True):
                setattr(block, name, made)
    return model.train(model.training)  # the new layers, too
