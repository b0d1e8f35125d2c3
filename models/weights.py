"""A model's weights: their dtype, whether they fit into memory, whether they are finite, and quantization to 8 bits.

Every command and `load` use these rules.
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
PIECE = 1 << 22  # elements that are checked at once
QUANTIZED: tuple[Kind, ...] = ("fp8", "int8")
M = TypeVar("M", bound=CausalLM)


@dataclass(frozen=True, slots=True)
class WeightType:
    """A dtype of weights and activations.

    Attributes:
        name: "float32", "bfloat16" or "float16".
        reason: why it was chosen; empty if the user named it.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} (auto: {self.reason})" if self.reason else self.name


def weight_type(asked: object, device: Device, stored: str | None, *, trains: bool = False) -> WeightType:
    """Return the dtype that `asked` means on `device`.

    "auto" and None mean float32 on the CPU, whose 16-bit arithmetic is slow. On a GPU they mean the dtype of the stored
    weights, and bfloat16 for a model from scratch.

    Args:
        asked: "auto", None, or a dtype by any of its names.
        stored: float dtype of the model folder; None for a model from scratch.
        trains: whether the weights are trained. Trained weights are never float16 by default, because its gradients
            underflow without loss scaling.

    Raises:
        DTypeError: weights cannot have the dtype `asked`.
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
        return WeightType("bfloat16", "the folder has float16, which training does not support")
    if stored not in WEIGHT_TYPES:
        return WeightType("float32", f"the folder has {stored}")
    return WeightType(stored, "the folder's type")


def check_fits(count: int, dtype: str, device: Device, *, where: str) -> None:
    """Raise OutOfMemoryError if `count` weights alone need more than all memory of `device`."""
    needed = count * as_dtype(dtype).itemsize
    total = host_memory() if device == CPU else cuda.mem_get_info(device)[1]
    if total is not None and needed > total:
        what = f"the model of this config has {count:,} parameters, {_readable(needed)} in {dtype}, but"
        what += f" {'this host' if device == CPU else device} has {_readable(total)} of memory"
        next = "check hidden_size, intermediate_size, num_hidden_layers and vocab_size, or use a smaller model"
        raise OutOfMemoryError(what, where=where, next=next)


def _readable(size: int) -> str:
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB")):
        if size >= 1 << 10 * power:
            return f"{size / (1 << 10 * power):,.1f} {unit}"
    return f"{size / 2**20:.1f} MiB"


def check_finite(model: CausalLM, *, where: str) -> None:
    """Raise NumericError if parameters hold a NaN or an infinity; it lists at most 10 of them, and their count."""
    with genesis.no_grad():
        found = list[str]()
        for name, parameter in model.named_parameters():
            flat, size = parameter.detach().flatten(), parameter.numel()
            pieces = (flat.narrow(0, i, min(PIECE, size - i)) for i in range(0, size, PIECE))
            if not all(bool(genesis.isfinite(piece).all().item()) for piece in pieces):
                found.append(name)
    if found:
        next = "download the model again, or use an older checkpoint: these weights are damaged"
        if model.head_weight.dtype is genesis.float16:
            next = "load them as float32 or bfloat16: float16 only reaches 65,504"
        raise NumericError(f"weights are NaN or infinite in tensors: {list_names(found)}", where=where, next=next)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has 8-bit weights."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def quantize(model: M, kind: Kind) -> M:
    """Convert a model's weights to 8 bits in place, and return it. It can then generate, but not be trained or saved.

    Args:
        kind: "fp8" (e4m3; on GPUs of compute capability 8.9 or later, and on the CPU) or "int8".

    Raises:
        UsageError: the kind is unknown, or the model is quantized already or has adapters.
    """
    if kind not in QUANTIZED:
        raise UsageError(f"the kind of weights is {kind!r}", next=f"use {' or '.join(QUANTIZED)}")
    if is_quantized(model):
        raise UsageError("the model is quantized already", next="load it again")
    if adapted_layers(model):
        raise UsageError("a model with adapters cannot be quantized", next="merge them first")
    if model.lm_head is None:  # the embedding is not quantized
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = model.model.embed_tokens.weight
        (model.lm_head,) = quantize_layers([layer], kind)
    for block in list(model.modules()):
        layers = {name: part for name, part in block.named_children() if type(part) is nn.Linear}
        for width in dict.fromkeys(layer.in_features for layer in layers.values()):
            names = [name for name, layer in layers.items() if layer.in_features == width]
            for name, made in zip(names, quantize_layers([layers[n] for n in names], kind), strict=True):
                setattr(block, name, made)
    return model.train(model.training)  # sets the mode of the new layers too
