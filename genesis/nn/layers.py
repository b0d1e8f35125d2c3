"""Layers: linear, embedding and norms, then layers without parameters: activations and dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from genesis.array import Array
from genesis.autograd import is_grad_enabled, no_grad
from genesis.errors import ShapeError, UsageError
from genesis.functions.surface import functional
from genesis.nn import functional as F
from genesis.nn import init
from genesis.nn.module import Module
from genesis.nn.parameter import Parameter
from genesis.op import Op, registry
from genesis.random import Generator
from genesis.shapes import Shape
from genesis.tensor import Tensor


class Linear(Module):
    """x·Wᵀ + b: maps the last dimension from `in_features` to `out_features`.

    Attributes:
        weight: `[out_features, in_features]`, initialized uniformly within ±1/√in_features.
        bias: `[out_features]`, initialized likewise; None without a bias.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(init.new((out_features, in_features), device, dtype))
        self.bias = Parameter(init.new((out_features,), device, dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class Embedding(Module):
    """Looks up rows of `weight` `[num_embeddings, embedding_dim]` by integer ids. Weights start standard normal.

    Args:
        padding_idx: a row that starts at 0 and gets no gradient.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ShapeError(f"padding_idx {padding_idx} is not one of the {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = Parameter(init.new((num_embeddings, embedding_dim), device, dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


def _shape(normalized_shape: int | Sequence[int]) -> Shape:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


class RMSNorm(Module):
    """x / √(mean(x²) + eps)·weight over the last dimensions.

    Args:
        normalized_shape: sizes of the last dimensions, usually only one.
        eps: machine epsilon of the computing type by default.
        elementwise_affine: whether the norm has a weight; it starts at 1 - offset.
        offset: added to the weight in float32 or wider: 1 for checkpoints with weights around 0, such as Gemma's.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        offset: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.offset = _shape(normalized_shape), eps, offset
        self.weight = None
        if elementwise_affine:
            self.weight = Parameter(init.constant_(init.new(self.normalized_shape, device, dtype), 1 - offset))
        self._scale: tuple[Array, int, Tensor] | None = None

    def scale(self) -> Tensor | None:
        """Return weight + offset, which multiplies x / √(mean(x²) + eps). None without a weight.

        The sum is cached while the weight is unchanged and no gradient is required.
        """
        weight = self.weight
        if weight is None or not self.offset:
            return weight
        array = weight.array
        if is_grad_enabled() and weight.requires_grad:
            return self._with_offset(weight)
        if self._scale is None or self._scale[0] is not array or self._scale[1] != array.storage.version:
            scale = self._with_offset(weight)
            if array.storage.backend.is_capturing:
                return scale
            self._scale = array, array.storage.version, scale
        return self._scale[2]

    def _with_offset(self, weight: Tensor) -> Tensor:
        return (weight if weight.dtype.itemsize > 4 else weight.float()) + self.offset

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.scale(), self.eps)

    def extra_repr(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}{offset}"


class LayerNorm(Module):
    """(x - mean) / √(var + eps)·weight + bias over the last dimensions.

    Args:
        normalized_shape: sizes of the last dimensions, usually only one.
        eps: added to the variance.
        elementwise_affine: whether the norm has a weight, which starts at 1, and may have a bias.
        bias: whether the norm has a bias, which starts at 0.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = _shape(normalized_shape), eps
        place = self.normalized_shape, device, dtype
        self.weight = Parameter(init.ones_(init.new(*place))) if elementwise_affine else None
        self.bias = Parameter(init.zeros_(init.new(*place))) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


# --- Without parameters -----------------------------------------------------------------------------------------------


class Identity(Module):
    """Returns its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class GELU(Module):
    """x·Φ(x), or its tanh approximation: `approximate` is "none" or "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SwiGLU(Module):
    """silu(gate)·up for two arguments (Shazeer, 2020)."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.swiglu(gate, up)


class Dropout(Module):
    """In training, sets elements to 0 with probability p and divides the others by 1 - p.

    The default of `generator` is the global generator.
    """

    def __init__(self, p: float = 0.5, *, generator: Generator | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UsageError(f"dropout: p is {p}", next="choose p in [0, 1]")
        self.p, self.generator = p, generator

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training, generator=self.generator)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _module_of(op: Op) -> type[Module]:
    """Build the activation module that an op's record names."""
    function = functional[op.public]

    def forward(self: Module, x: Tensor) -> Tensor:
        return function(x)  # type: ignore[no-any-return]

    return type(op.module, (Module,), {"__doc__": op.reference.__doc__, "__module__": __name__, "forward": forward})


# Activations of one tensor without settings, such as `ReLU`, are generated from their op records.
activations = {op.module: _module_of(op) for op in registry.values() if op.module}
