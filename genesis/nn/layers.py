"""Layers: linear, embedding and norms, then layers without parameters: activations and dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from genesis.array import Array
from genesis.autograd import is_grad_enabled, no_grad
from genesis.errors import ShapeError, UsageError
from genesis.nn import functional as F
from genesis.nn import init
from genesis.nn.module import Module, changed_settings
from genesis.nn.parameter import Parameter, replace_array
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
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
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

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class LazyLinear(Linear):
    """A `Linear` layer that takes `in_features` from its first input, or from a state that it loads.

    Before that its weight is empty. Build the optimizer afterwards.
    """

    def __init__(self, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        super().__init__(0, out_features, bias, device, dtype)
        self.register_load_state_dict_pre_hook(_materialize_from_state)

    def _materialize(self, like: Tensor) -> None:
        """Become a `Linear` layer for the last dimension of a tensor."""
        self.in_features, old = like.shape[-1], self.weight
        replace_array(old, init.new((self.out_features, self.in_features), old.device, old.dtype).array)
        self.reset_parameters()
        self.__class__ = Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        self._materialize(input)
        return Linear.forward(self, input)


def _materialize_from_state(layer: Linear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if isinstance(layer, LazyLinear) and f"{prefix}weight" in state:
        layer._materialize(state[f"{prefix}weight"])


class Embedding(Module):
    """Looks up rows of `weight` `[num_embeddings, embedding_dim]` by integer ids. Weights start standard normal.

    Args:
        padding_idx: a row that starts at 0 and gets no gradient.
        max_norm, norm_type, scale_grad_by_freq, sparse: as for `functional.embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ShapeError(f"padding_idx {padding_idx} is not one of the {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.weight = _table(_weight, num_embeddings, embedding_dim, _freeze, device, dtype)
        if _weight is None:
            self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Self:
        """Build the layer around a table `[num_embeddings, embedding_dim]`, frozen by default."""
        if embeddings.ndim != 2:
            raise ShapeError(f"embeddings have shape {embeddings.shape}, expected two dimensions")
        rows, width = embeddings.shape
        how: tuple[Any, ...] = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, embeddings, freeze)
        return cls(rows, width, *how)

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is None and not self.scale_grad_by_freq:
            return F.embedding(input, self.weight, self.padding_idx)
        how = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        return F.embedding(input, self.weight, *how)

    def extra_repr(self) -> str:
        how: dict[str, Any] = {"padding_idx": None, "max_norm": None, "norm_type": 2, "scale_grad_by_freq": False}
        return f"{self.num_embeddings}, {self.embedding_dim}" + changed_settings(self, **how, sparse=False)


def _table(weight: Tensor | None, rows: int, width: int, freeze: bool, device: Any, dtype: Any) -> Parameter:
    """Return a parameter `[rows, width]`: uninitialized, or around `weight`."""
    if weight is None:
        return Parameter(init.new((rows, width), device, dtype), requires_grad=not freeze)
    if weight.shape != (rows, width):
        raise ShapeError(f"the weight has shape {weight.shape}, expected ({rows}, {width})")
    return Parameter(weight, requires_grad=not freeze)


class EmbeddingBag(Module):
    """Reduces the rows of `weight` that each bag of ids names; see `functional.embedding_bag`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ShapeError(f"padding_idx {padding_idx} is not one of the {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.mode, self.sparse = scale_grad_by_freq, mode, sparse
        self.include_last_offset = include_last_offset
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = _table(_weight, num_embeddings, embedding_dim, False, device, dtype)
        if _weight is None:
            self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Self:
        """Build the layer around a table `[num_embeddings, embedding_dim]`, frozen by default."""
        rows, width = embeddings.shape
        how: tuple[Any, ...] = (max_norm, norm_type, scale_grad_by_freq, mode, sparse, embeddings)
        how = (*how, include_last_offset, padding_idx)
        layer = cls(rows, width, *how)
        layer.weight.requires_grad_(not freeze)
        return layer

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return F.embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )

    def extra_repr(self) -> str:
        how: dict[str, Any] = {"max_norm": None, "norm_type": 2, "scale_grad_by_freq": False, "mode": ""}
        return f"{self.num_embeddings}, {self.embedding_dim}" + changed_settings(self, **how, padding_idx=None)


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
        device: Any = None,
        dtype: Any = None,
        *,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.elementwise_affine = elementwise_affine
        self.normalized_shape, self.eps, self.offset = _shape(normalized_shape), eps, offset
        self.weight = Parameter(init.new(self.normalized_shape, device, dtype)) if elementwise_affine else None
        self._scale: tuple[Array, int, Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 - offset."""
        if self.weight is not None:
            init.constant_(self.weight, 1 - self.offset)

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

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.scale(), self.eps)

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
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.elementwise_affine = elementwise_affine
        self.normalized_shape, self.eps = _shape(normalized_shape), eps
        place = self.normalized_shape, device, dtype
        self.weight = Parameter(init.new(*place)) if elementwise_affine else None
        self.bias = Parameter(init.new(*place)) if elementwise_affine and bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        affine, bias = self.weight is not None, self.bias is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}, bias={bias}"


# --- Without parameters -----------------------------------------------------------------------------------------------


class Identity(Module):
    """Returns its argument. Arguments of the constructor have no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        return input


class SwiGLU(Module):
    """silu(gate)·up for two arguments (Shazeer, 2020)."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.swiglu(gate, up)


class Dropout(Module):
    """In training, sets elements to 0 with probability p and divides the others by 1 - p.

    The default of `generator` is the global generator.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, generator: Generator | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UsageError(f"dropout: p is {p}", next="choose p in [0, 1]")
        self.p, self.inplace, self.generator = p, inplace, generator

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training, self.inplace, generator=self.generator)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}"


class Flatten(Module):
    """Merges dimensions `start_dim` to `end_dim`; by default all but the first."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Tensor) -> Tensor:
        return input.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """Splits dimension `dim` into `unflattened_size`."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        super().__init__()
        self.dim, self.unflattened_size = dim, unflattened_size

    def forward(self, input: Tensor) -> Tensor:
        return input.unflatten(self.dim, self.unflattened_size)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


class Hardtanh(Module):
    """x limited to [min_val, max_val]. `min_value` and `max_value` are torch's old names of the limits."""

    def __init__(
        self,
        min_val: float = -1.0,
        max_val: float = 1.0,
        inplace: bool = False,
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__()
        self.min_val = min_val if min_value is None else min_value
        self.max_val = max_val if max_value is None else max_value
        self.inplace = inplace
        if not self.min_val < self.max_val:
            raise UsageError(f"Hardtanh: min_val {self.min_val} is not less than max_val {self.max_val}")

    def forward(self, input: Tensor) -> Tensor:
        return F.hardtanh(input, self.min_val, self.max_val, self.inplace)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}" + (", inplace=True" if self.inplace else "")
