"""Low-rank adapters of linear layers: LoRA (Hu et al., 2021), rsLoRA (Kalajdzievski, 2023), DoRA (Liu et al., 2024).

Parameters have PEFT's names. Other modules choose the layers of a model and read and write adapter files.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from genesis.array import Array
from genesis.autograd import no_grad
from genesis.dtypes import float32
from genesis.errors import ShapeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions.linalg import LowRankPairs, dora_factors
from genesis.nn import functional as F
from genesis.nn import init
from genesis.nn.layers import Linear
from genesis.nn.module import Module
from genesis.nn.parameter import Parameter
from genesis.random import Generator
from genesis.tensor import Tensor


class LoRALinear(Linear):
    """c∘(x·Wᵀ + s·dropout(x)·Aᵀ·Bᵀ) + b: a linear layer that trains A and B (and m with DoRA) and freezes W and b.

    With DoRA, c = m / ‖W + s·B·A‖ per row, and backward treats this norm as a constant (section 4.3 of the paper).
    Without DoRA, c = 1. B starts at 0 and m at the row norms of W, so the layer starts equal to its base.

    A and B are stored and computed in W's dtype; the optimizer keeps float32 masters and moments, as for all weights.
    (PEFT keeps A and B of a two-byte base in float32 and casts x.) m is float32, because rounding it to bfloat16 would
    put c off by 2^-9 from the start.

    Args:
        in_features, out_features, bias: as for `Linear`.
        r: rank, 1 or more.
        alpha: s is alpha / r, or alpha / √r with `use_rslora`.
        dropout: probability with which an element of A's input is 0 in training; layers fused on one input share the
            draw. W's input has no dropout, not even with DoRA (unlike in PEFT).
        use_rslora: divide alpha by √r instead of r.
        use_dora: train the magnitudes m.
        generator: generator of A's initial values; the global one by default. Dropout always uses the global one.

    Attributes:
        weight, bias: W and b, frozen.
        lora_A: layer whose `weight` is A `[r, in_features]`, initialized uniformly within ±1/√in_features.
        lora_B: layer whose `weight` is B `[out_features, r]`, initialized to 0.
        lora_magnitude_vector: module whose `weight` is m `[out_features]` with DoRA; None without it.
        scaling: the factor s.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        r: int,
        alpha: float,
        dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        generator: Generator | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._adapt(r, alpha, dropout, use_rslora, use_dora, generator)

    @classmethod
    def from_linear(
        cls,
        linear: Linear,
        *,
        r: int,
        alpha: float,
        dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        generator: Generator | None = None,
    ) -> Self:
        """Return an adapter of `linear`. It shares and freezes the weight and bias of `linear`."""
        with init.shapes_only():
            layer = cls.__new__(cls)
            Linear.__init__(layer, linear.in_features, linear.out_features, linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._adapt(r, alpha, dropout, use_rslora, use_dora, generator)
        return layer.train(linear.training)

    def _adapt(
        self, r: int, alpha: float, dropout: float, use_rslora: bool, use_dora: bool, generator: Generator | None
    ) -> None:
        """Freeze the layer and add the adapter."""
        if r < 1:
            raise ShapeError(f"the rank r of an adapter is {r}", next="choose r of at least 1")
        if not 0 <= dropout < 1:
            raise UsageError(f"the dropout of an adapter is {dropout}", next="choose dropout in [0, 1)")
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.r, self.alpha, self.dropout, self.use_rslora = r, float(alpha), dropout, use_rslora
        self.scaling = self.alpha / (math.sqrt(r) if use_rslora else r)
        self.generator = generator
        self._squares: tuple[Array, int, Tensor] | None = None
        place = {"device": self.weight.device, "dtype": self.weight.dtype}
        with init.skip_init():
            self.lora_A = Linear(self.in_features, r, False, **place)
            self.lora_B = Linear(r, self.out_features, False, **place)
            self.lora_magnitude_vector = None
            if use_dora:
                self.lora_magnitude_vector = Magnitude(self.out_features, device=self.weight.device)
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Draw new values for A, set B to 0 and m to the row norms of W."""
        init.kaiming_uniform_(self.lora_A.weight, math.sqrt(5), generator=self.generator)
        init.zeros_(self.lora_B.weight)
        self.reset_magnitude()

    def reset_magnitude(self) -> None:
        """Set m to the row norms of W + s·B·A, so that c is 1."""
        if self.lora_magnitude_vector is not None and not init.is_skipped():
            with no_grad():
                self.lora_magnitude_vector.weight.copy_(dora_factors([self._dora_inputs()], [self.out_features])[1])

    def low_rank(self) -> LowRankPairs:
        """Return the adapter's low-rank pair in the form that linear functions take."""
        return low_rank_pairs((self,))

    def _dora_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        assert self.lora_magnitude_vector is not None
        pair = self.lora_A.weight, self.lora_B.weight, self.scaling
        return self.lora_magnitude_vector.weight, self.row_squares(), self.weight, *pair

    def row_squares(self) -> Tensor:
        """‖W‖² per row in float32, cached until W changes."""
        array = self.weight.array
        if self._squares is None or self._squares[0] is not array or self._squares[1] != array.storage.version:
            with no_grad():
                squares = self.weight.detach().to(float32).square().sum(-1)
            self._squares = array, array.storage.version, squares
        return self._squares[2]

    def merged_weight(self) -> Tensor:
        """Return c∘(W + s·B·A) `[out_features, in_features]` in float32, without gradient."""
        with no_grad():
            a, b = self.lora_A.weight.to(float32), self.lora_B.weight.to(float32)
            merged = self.weight.to(float32) + (b @ a) * self.scaling
            if self.lora_magnitude_vector is None:
                return merged
            factors = self.lora_magnitude_vector.weight.to(float32) / pw.sqrt(merged.square().sum(-1))
            return merged * factors.unsqueeze(-1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias, low_rank=self.low_rank())

    def extra_repr(self) -> str:
        kind = "" if self.lora_magnitude_vector is None else ", use_dora=True"
        kind = f", use_rslora=True{kind}" if self.use_rslora else kind
        return f"{super().extra_repr()}, r={self.r}, alpha={self.alpha}, dropout={self.dropout}{kind}"


class Magnitude(Module):
    """Holds the magnitude of each row of a weight: float32 `weight` `[out_features]`."""

    def __init__(self, out_features: int, *, device: Any = None) -> None:
        super().__init__()
        self.weight = Parameter(init.new((out_features,), device, float32))


_mode = threading.local()


@contextmanager
def adapters_off() -> Iterator[None]:
    """Inside the block, all adapted layers of this thread compute only their base, x·Wᵀ + b.

    A fresh adapter, with B = 0, gives the same bits outside the block.
    """
    before, _mode.is_off = getattr(_mode, "is_off", False), True
    try:
        yield
    finally:
        _mode.is_off = before


def low_rank_pairs(layers: Sequence[Module]) -> LowRankPairs:
    """Return the low-rank pairs of the adapters among `layers` on one input. Adapters in training share one dropout."""
    adapters = [layer if isinstance(layer, LoRALinear) else None for layer in layers]
    if getattr(_mode, "is_off", False):  # runs the same kernels as with adapters, so that results have the same bits
        return LowRankPairs([None if a is None else (a.lora_A.weight, a.lora_B.weight, 0.0) for a in adapters])
    pairs = [None if a is None else (a.lora_A.weight, a.lora_B.weight, a.scaling) for a in adapters]
    dora = [a._dora_inputs() if a is not None and a.lora_magnitude_vector is not None else None for a in adapters]
    factors = dora_factors(dora, [layer.out_features for layer in layers])[0] if any(dora) else None
    dropout = max(a.dropout if a is not None and a.training else 0.0 for a in adapters)
    return LowRankPairs(pairs, factors, dropout)
