"""A model with weights in 8 bits, for generation: half the bytes that a step reads, on any device.

The linear layers and the head are quantised by rows; embedding, norms and biases stay, and so does what is computed:
codes become numbers of the model's type as they are multiplied.
"""

from __future__ import annotations

from typing import TypeVar

from genesis import nn
from genesis.errors import UsageError
from genesis.nn.quantized import Kind, QuantizedLinear, quantize_layers
from genesis_models.adapters.layers import adapted_layers
from genesis_models.blocks import CausalLM

QUANTIZED: tuple[Kind, ...] = ("fp8", "int8")
M = TypeVar("M", bound=CausalLM)


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
