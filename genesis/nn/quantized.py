"""Linear layers with 8-bit weights for generation, and the quantization of weights. Their op is quantized_linear.

In int8, the scale of a row is its largest magnitude / 127. In fp8 (e4m3), it is the power of two that brings this
magnitude to 448 or below; a power of two costs no accuracy, because it only shifts the exponents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import genesis.ops.quantized_linear as ops
from genesis.array import Array, empty
from genesis.autograd import apply, no_grad
from genesis.autograd.modes import fixed_weights
from genesis.backend import mode
from genesis.dtypes import DType, float32, int8, uint8
from genesis.errors import UsageError
from genesis.nn.layers import Linear
from genesis.nn.module import Module
from genesis.ops.elementwise import copy
from genesis.ops.fp8 import quantize_rows
from genesis.ops.shape import joined, slices
from genesis.tensor import Tensor

Kind = Literal["fp8", "int8"]
PIECE = 1 << 24  # elements of a weight that are quantized at once


class QuantizedLinear(Module):
    """x·(diag(scale)·codes)ᵀ + b on the last dimension, without gradients. `quantize_layers` builds it from a `Linear`.

    Attributes:
        codes: `[out_features, in_features]`, int8, or uint8 holding the bits of e4m3.
        scale: float32 `[out_features]`. A cast would round it, so cast a model before quantizing it.
        bias: `[out_features]` or None.
        dtype: type of the original weight.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: DType) -> None:
        super().__init__()
        self.dtype = dtype
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, (self,))

    @property
    def weight(self) -> Tensor:
        """diag(scale)·codes in the type of the original weight, computed at each access."""
        return Tensor(ops.dequantize_rows(self.codes.array, self.scale.array, dtype=self.dtype))

    def extra_repr(self) -> str:
        kind = "int8" if self.codes.dtype is int8 else "fp8"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


def quantized_linear(
    x: Tensor,
    layers: Sequence[QuantizedLinear],
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
) -> Tensor:
    """Run layers on rms_norm(x) and concatenate their results in the last dimension.

    `norm` is the weight of the norm; None means no norm. `residual` is added to the result. With `swiglu`, the layers
    are gate and up, and the result is silu(gate)·up. Layers that are not neighbours in memory are copied.
    """
    if mode.exact:
        raise UsageError("genesis.exact does not support 8-bit weights", next="load the model with bfloat16 weights")
    codes, scale = (_concatenated([getattr(each, name) for each in layers]) for name in ("codes", "scale"))
    bias = None if layers[0].bias is None else _concatenated([each.bias for each in layers])
    is_in_place = codes.array.storage is layers[0].codes.array.storage  # a copy is written right before its use
    with fixed_weights(mode.fixed_weights and is_in_place):
        y: Tensor = apply(ops.quantized_linear, x, codes, scale, bias, residual, norm, eps=eps, swiglu=swiglu)
    return y


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor over several: a view if they are neighbours in memory, else a copy."""
    if len(tensors) == 1:
        return tensors[0]
    arrays = [each.array for each in tensors]
    return Tensor(joined(arrays) or _to_run(arrays)[0])


def _to_run(arrays: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Copy arrays into one run of memory, and return the run and its parts."""
    first, sizes = arrays[0], [each.shape[0] for each in arrays]
    run = empty((sum(sizes), *first.shape[1:]), first.dtype, first.device)
    parts = slices(run, sizes)
    for part, source in zip(parts, arrays, strict=True):
        copy(source, out=part)
    return run, parts


def quantize_layers(layers: Sequence[Linear], kind: Kind) -> list[QuantizedLinear]:
    """Return quantized versions of layers on one input, as neighbours in memory. The layers do not change."""
    with no_grad():
        quantized = [_quantized(layer.weight.detach(), kind) for layer in layers]
    codes, scales = (_to_run([each[i] for each in quantized])[1] for i in range(2))
    kept = [None if layer.bias is None else layer.bias.detach().array for layer in layers]
    biases = iter(_to_run([each for each in kept if each is not None])[1] if any(b is not None for b in kept) else [])
    return [
        QuantizedLinear(Tensor(q), Tensor(s), None if b is None else Tensor(next(biases)), layer.weight.dtype)
        for q, s, b, layer in zip(codes, scales, kept, layers, strict=True)
    ]


def _quantized(weight: Tensor, kind: Kind) -> tuple[Array, Array]:
    """Return codes and scales of a weight `[out, in]`. A row with NaN or infinity gets a non-finite scale."""
    rows = max(PIECE // max(weight.shape[1], 1), 1)
    device = weight.device
    codes = empty(weight.shape, int8 if kind == "int8" else uint8, device)
    scale = empty(weight.shape[:1], float32, device)
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows]
        pieces = [slices(each, [start, len(part)])[1] for each in (codes, scale)]
        if kind == "int8":
            part = part.float()
            largest = part.abs().amax(-1)
            by_row = largest.where(largest != 0, 1.0) / 127
            quantized = (part / by_row.unsqueeze(-1)).round().to(dtype="int8").array, by_row.array
        else:
            bits, by_row = quantize_rows(part.array)  # tensors have no fp8 type, so its bits are stored as bytes
            quantized = Array(bits.storage, bits.shape, bits.strides, uint8, bits.device, bits.offset), by_row
        for piece, values in zip(pieces, quantized, strict=True):
            copy(values, out=piece)
    return codes, scale
