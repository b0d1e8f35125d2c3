"""Low-rank adapters of linear layers: LoRA (Hu et al., 2021), rsLoRA (Kalajdzievski, 2023), DoRA (Liu et al., 2024).

Parameters have PEFT's names. Which layers of a model get an adapter, and the files of one, are not its business.
"""

from __future__ import annotations

import math
from typing import Any, Self

from genesis.autograd import no_grad
from genesis.dtypes import float32
from genesis.errors import ShapeError, UsageError
from genesis.functions import pointwise as pw
from genesis.nn import functional as F
from genesis.nn import init
from genesis.nn.layers import Linear
from genesis.nn.module import Module
from genesis.nn.parameter import Parameter
from genesis.random import Generator
from genesis.tensor import Tensor

__all__ = ["LoRALinear"]


class LoRALinear(Linear):
    """c∘(x·Wᵀ + s·dropout(x)·Aᵀ·Bᵀ) + b: a linear layer that learns A and B, and for DoRA c, in place of W and b.

    c is m / ‖W + s·B·A‖ by rows for DoRA, whose norm counts as a constant in backward (section 4.3 of the paper), and 1
    without it. At the start B is 0 and m is the norm of W's rows, so that the layer is the one it was made of.

    A and B have W's dtype and compute in it: as for all weights, float32 masters and moments are the optimizer's. (PEFT
    keeps A and B of a two-byte base in float32 and casts x.) m is float32 in each case: rounded to bfloat16, c would be
    off by 2^-9 from the start.

    Args:
        in_features, out_features, bias: as for `Linear`; W and b are frozen.
        r: the rank, 1 or more.
        alpha: the path's scale is alpha / r, or alpha / √r with `use_rslora`.
        dropout: with which probability an element of the low-rank path's input is 0 in training. Where DoRA's paper
            drops elements nowhere and PEFT also in part of W's input, here W's input keeps all.
        use_rslora, use_dora: whether these are.
        generator: of A's values and of dropout; None means the default one.

    Attributes:
        weight, bias: frozen.
        lora_A: its `weight` is A `[r, in_features]`, uniform within ±1/√in_features.
        lora_B: its `weight` is B `[out_features, r]`, 0.
        lora_magnitude_vector: with DoRA, its `weight` is m `[out_features]`; else None.
        scaling: s.
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
        """An adapter of `linear`, whose weight and bias it shares and freezes."""
        with init.shapes_only():
            layer = cls.__new__(cls)
            Linear.__init__(layer, linear.in_features, linear.out_features, linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.training = linear.training
        layer._adapt(r, alpha, dropout, use_rslora, use_dora, generator)
        return layer

    def _adapt(
        self, r: int, alpha: float, dropout: float, use_rslora: bool, use_dora: bool, generator: Generator | None
    ) -> None:
        """Freeze the layer and add the adapter."""
        if r < 1:
            raise ShapeError(f"an adapter of rank {r}", next="give r of 1 or more")
        if not 0 <= dropout < 1:
            raise UsageError(f"dropout: {dropout} leaves nothing of an adapter's input", next="give one in [0, 1)")
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.r, self.alpha, self.dropout, self.use_rslora = r, float(alpha), dropout, use_rslora
        self.scaling = self.alpha / (math.sqrt(r) if use_rslora else r)
        self.generator = generator
        place = {"device": self.weight.device, "dtype": self.weight.dtype}
        with init.skip_init():
            self.lora_A = Linear(self.in_features, r, False, **place)
            self.lora_B = Linear(r, self.out_features, False, **place)
            self.lora_magnitude_vector = None
            if use_dora:
                self.lora_magnitude_vector = Magnitude(self.out_features, device=self.weight.device)
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Draw A's values anew, set B to 0 and m to the norm of W's rows."""
        init.kaiming_uniform_(self.lora_A.weight, math.sqrt(5), generator=self.generator)
        init.zeros_(self.lora_B.weight)
        self.reset_magnitude()

    def reset_magnitude(self) -> None:
        """Set m to the norm of the rows of W + s·B·A, so that c is 1."""
        if self.lora_magnitude_vector is not None and not init.is_skipped():
            with no_grad():
                self.lora_magnitude_vector.weight.copy_(self._norm())

    def _norm(self) -> Tensor:
        """‖W + s·B·A‖ by rows, `[out_features]` in float32, without gradient."""
        with no_grad():
            return pw.sqrt(self._sum().square().sum(-1))  # type: ignore[no-any-return]

    def _sum(self) -> Tensor:
        """W + s·B·A in float32."""
        a, b = (self.lora_A.weight.to(float32), self.lora_B.weight.to(float32))
        return self.weight.to(float32) + (b @ a) * self.scaling

    def merged_weight(self) -> Tensor:
        """c∘(W + s·B·A) `[out_features, in_features]` in float32, without gradient: a linear layer's weight that does
        what this layer does.
        """
        with no_grad():
            whole = self._sum()
            if self.lora_magnitude_vector is None:
                return whole
            factors = self.lora_magnitude_vector.weight.to(float32) / pw.sqrt(whole.square().sum(-1))
            return whole * factors.unsqueeze(-1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training, generator=self.generator)
        low_rank = self.lora_B(self.lora_A(dropped)) * self.scaling
        if self.lora_magnitude_vector is None:
            return F.linear(x, self.weight, self.bias) + low_rank  # type: ignore[no-any-return]
        factors = self.lora_magnitude_vector.weight / self._norm()
        y = (F.linear(x, self.weight) + low_rank) * factors.to(x.dtype)
        return y if self.bias is None else y + self.bias  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        kind = "" if self.lora_magnitude_vector is None else ", use_dora=True"
        kind = f", use_rslora=True{kind}" if self.use_rslora else kind
        return f"{super().extra_repr()}, r={self.r}, alpha={self.alpha}, dropout={self.dropout}{kind}"


class Magnitude(Module):
    """The length of each row of a weight, float32.

    Attributes:
        weight: `[out_features]`.
    """

    def __init__(self, out_features: int, *, device: Any = None) -> None:
        super().__init__()
        self.weight = Parameter(init.new((out_features,), device, float32))
