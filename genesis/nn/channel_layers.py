"""Layers over channels `[N, C, L]`: batch, instance and group norm, convolutions, paddings; PReLU and Bilinear."""

from __future__ import annotations

import math
from typing import Any

from genesis.autograd import no_grad
from genesis.errors import ShapeError, UsageError
from genesis.functions.create import zeros
from genesis.functions.surface import Sizes
from genesis.nn import functional as F
from genesis.nn import init
from genesis.nn.convolution import one_size
from genesis.nn.module import Module, changed_settings
from genesis.nn.parameter import Parameter
from genesis.tensor import Tensor


def _scale_and_shift(size: int, affine: bool, bias: bool, device: Any, dtype: Any) -> list[Parameter | None]:
    """Return a weight of 1 and a bias of 0, or None for either."""
    weight = Parameter(init.ones_(init.new((size,), device, dtype))) if affine else None
    return [weight, Parameter(init.zeros_(init.new((size,), device, dtype))) if affine and bias else None]


class _RunningNorm(Module):
    """A norm that may track the mean and variance of its inputs, which evaluation then uses."""

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: Any,
        dtype: Any,
        bias: bool,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        self.track_running_stats = track_running_stats
        self.weight, self.bias = _scale_and_shift(num_features, affine, bias, device, dtype)
        self.register_buffer("running_mean", init.new((num_features,), device, dtype) if track_running_stats else None)
        self.register_buffer("running_var", init.new((num_features,), device, dtype) if track_running_stats else None)
        count = zeros((), dtype="int64", device=device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", count)
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Set the running mean to 0, the variance to 1 and the number of batches to 0."""
        if self.track_running_stats:
            init.zeros_(self.running_mean), init.ones_(self.running_var)
            with no_grad():
                self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Reset the running statistics, the weight to 1 and the bias to 0."""
        self.reset_running_stats()
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def _count(self) -> float:
        """Count a batch in training, and return the share of its statistics in the running ones."""
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return float(1 / self.num_batches_tracked.item())
        return 0.0 if self.momentum is None else self.momentum

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"bias={self.bias is not None}, track_running_stats={self.track_running_stats}"
        )


class BatchNorm1d(_RunningNorm):
    """Normalizes each channel of `[N, C]` or `[N, C, L]` over the batch (Ioffe & Szegedy, 2015).

    Evaluation uses the running mean and variance; without `track_running_stats`, the batch's mean and variance.

    Args:
        momentum: share of a batch in the running statistics; None averages over all batches.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias)

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim not in (2, 3):
            raise ShapeError(f"BatchNorm1d takes [N, C] or [N, C, L], got shape {input.shape}")
        share, uses_batch = self._count(), self.training or self.running_mean is None
        mean, var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return F.batch_norm(input, mean, var, self.weight, self.bias, uses_batch, share, self.eps)


class InstanceNorm1d(_RunningNorm):
    """Normalizes each channel of each sample of `[N, C, L]` or `[C, L]` (Ulyanov et al., 2016)."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias)

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim not in (2, 3) or (self.affine and input.shape[-2] != self.num_features):
            raise ShapeError(f"InstanceNorm1d takes [N, {self.num_features}, L], got shape {input.shape}")
        x = input if input.ndim == 3 else input.unsqueeze(0)
        own, share = self.training or not self.track_running_stats, self.momentum or 0.0
        y = F.instance_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own, share, self.eps)
        return y if input.ndim == 3 else y.squeeze(0)


class GroupNorm(Module):
    """Normalizes groups of channels of each sample of `[N, C, …]`; see `functional.group_norm`."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise UsageError(f"GroupNorm: {num_channels} channels cannot form {num_groups} equal groups")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.weight, self.bias = _scale_and_shift(num_channels, affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        text = f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
        return f"{text}, bias={self.bias is not None}"


# --- Convolutions and paddings ----------------------------------------------------------------------------------------


class _Convolution(Module):
    """A weight of `shape`, a bias and the settings of a convolution; padding modes other than zeros pad first."""

    output_padding: tuple[int, ...] = (0,)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes,
        padding: Sizes | str,
        dilation: Sizes,
        groups: int,
        bias: bool,
        padding_mode: str,
        device: Any,
        dtype: Any,
        transposed: bool,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise UsageError(f"{name}: {in_channels} and {out_channels} channels cannot form {groups} equal groups")
        modes = ("zeros",) if transposed else ("zeros", "reflect", "replicate", "circular")
        if padding_mode not in modes:
            raise UsageError(f"{name}: padding_mode is {padding_mode!r}", next=f"use {', '.join(modes)}")
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise UsageError(f"{name}: padding is {padding!r}", next='use an integer, "same" or "valid"')
        self.in_channels, self.out_channels, self.groups, self.padding_mode = (
            in_channels, out_channels, groups, padding_mode,
        )  # fmt: skip
        self.kernel_size = (one_size(kernel_size, name, "kernel_size"),)
        self.stride = (one_size(stride, name, "stride"),)
        if padding == "same" and self.stride != (1,):
            raise UsageError(f'{name}: padding "same" needs stride 1, got {self.stride[0]}')
        self.padding = padding if isinstance(padding, str) else (one_size(padding, name, "padding"),)
        self.dilation = (one_size(dilation, name, "dilation"),)
        first, second = (in_channels, out_channels) if transposed else (out_channels, in_channels)
        self.weight = Parameter(init.new((first, second // groups, *self.kernel_size), device, dtype))
        self.bias = Parameter(init.new((out_channels,), device, dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values uniformly within ±1/√(fan-in)."""
        fan = self.weight[0].numel()
        bound = 1 / math.sqrt(fan) if fan else 0.0
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        text += f", padding={self.padding}" if self.padding != (0,) else ""
        text += changed_settings(self, dilation=(1,), output_padding=(0,), groups=1)
        text += ", bias=False" if self.bias is None else ""
        return text if self.padding_mode == "zeros" else f"{text}, padding_mode={self.padding_mode}"


class Conv1d(_Convolution):
    """Convolves `[N, in_channels, L]` or `[in_channels, L]`; see `functional.conv1d`.

    Args:
        padding_mode: "zeros", or a mode of `functional.pad`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        how = stride, padding, dilation, groups, bias, padding_mode, device, dtype
        super().__init__(in_channels, out_channels, kernel_size, *how, False)

    def forward(self, input: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros" and padding != "valid":
            edge = self.dilation[0] * (self.kernel_size[0] - 1)
            widths = (edge // 2, edge - edge // 2) if padding == "same" else (*padding, *padding)
            input, padding = F.pad(input, widths, self.padding_mode), 0
        return F.conv1d(input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class ConvTranspose1d(_Convolution):
    """The transposed convolution of `[N, in_channels, L]`; see `functional.conv_transpose1d`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        how = stride, padding, dilation, groups, bias, padding_mode, device, dtype
        super().__init__(in_channels, out_channels, kernel_size, *how, True)
        self.output_padding = (one_size(output_padding, "ConvTranspose1d", "output_padding"),)

    def forward(self, input: Tensor, output_size: Sizes | None = None) -> Tensor:
        more = self.output_padding[0]
        if output_size is not None:
            wanted = output_size if isinstance(output_size, int) else output_size[-1]
            span = self.dilation[0] * (self.kernel_size[0] - 1) + 1
            more = wanted - ((input.shape[-1] - 1) * self.stride[0] - 2 * int(self.padding[0]) + span)
            if not 0 <= more < max(self.stride[0], self.dilation[0]):
                raise UsageError(f"ConvTranspose1d: output_size {wanted} is not reachable from {input.shape[-1]}")
        place: Any = (self.stride, self.padding, more, self.groups, self.dilation)
        return F.conv_transpose1d(input, self.weight, self.bias, *place)


class _Pad1d(Module):
    """Pads the last dimension by one width, or by (before, after)."""

    mode = "constant"
    value: float | None = None

    def __init__(self, padding: int | tuple[int, int]) -> None:
        super().__init__()
        self.padding = (padding, padding) if isinstance(padding, int) else tuple(padding)

    def forward(self, input: Tensor) -> Tensor:
        return F.pad(input, self.padding, self.mode, self.value)

    def extra_repr(self) -> str:
        return f"{self.padding}" if self.value is None else f"padding={self.padding}, value={self.value}"


class ConstantPad1d(_Pad1d):
    """Pads with `value`."""

    def __init__(self, padding: int | tuple[int, int], value: float) -> None:
        super().__init__(padding)
        self.value = value


class ZeroPad1d(_Pad1d):
    """Pads with 0."""


class ReflectionPad1d(_Pad1d):
    """Mirrors at the border elements."""

    mode = "reflect"


class ReplicationPad1d(_Pad1d):
    """Repeats the border elements."""

    mode = "replicate"


class CircularPad1d(_Pad1d):
    """Continues at the other end."""

    mode = "circular"


# --- Others -----------------------------------------------------------------------------------------------------------


class PReLU(Module):
    """x where x > 0, else weight·x with a learned weight, one for all channels or one for each (He et al., 2015)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = None) -> None:
        from genesis.nn import init as initializers

        super().__init__()
        self.num_parameters, self.init = num_parameters, init
        self.weight = Parameter(initializers.new((num_parameters,), device, dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to its initial value."""
        init.constant_(self.weight, self.init)

    def forward(self, input: Tensor) -> Tensor:
        return F.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"


class Bilinear(Module):
    """x1ᵀ·weight[o]·x2 + bias[o]; weight and bias start uniformly within ±1/√in1_features."""

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if in1_features <= 0:
            raise UsageError(f"Bilinear: in1_features is {in1_features}, and must be positive")
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        self.weight = Parameter(init.new((out_features, in1_features, in2_features), device, dtype))
        self.bias = Parameter(init.new((out_features,), device, dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        bound = 1 / math.sqrt(self.in1_features)
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return F.bilinear(input1, input2, self.weight, self.bias)

    def extra_repr(self) -> str:
        sizes = f"in1_features={self.in1_features}, in2_features={self.in2_features}"
        return f"{sizes}, out_features={self.out_features}, bias={self.bias is not None}"
