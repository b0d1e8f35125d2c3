"""Norms over channels `[N, C, …]` under the names of torch.nn.functional. Statistics are float32 or wider."""

from __future__ import annotations

import math

from genesis.autograd.modes import no_grad
from genesis.errors import ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions import reduce
from genesis.functions.surface import array_of, layer_function, public
from genesis.nn.activation_functions import check_float, wide
from genesis.nn.layer_functions import layer_norm
from genesis.tensor import Tensor


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor:
    """Return x·weight + bias by channel, in the dtype of `like`."""
    shape = (-1, *(1,) * (x.ndim - 2))
    if weight is not None:
        x = x * wide(weight).reshape(shape)
    if bias is not None:
        x = x + wide(bias).reshape(shape)
    return ew.to_dtype(x, like.dtype)  # type: ignore[no-any-return]


def _check_channels(name: str, input: Tensor, **vectors: Tensor | None) -> None:
    """Raise if x is not `[N, C, …]` or a vector is not `[C]`."""
    check_float(name, input)
    if input.ndim < 2:
        raise ShapeError(f"{name} takes [N, C, ...], got shape {input.shape}")
    for argument, vector in vectors.items():
        if vector is not None and vector.shape != input.shape[1:2]:
            raise ShapeError(f"{name}: {argument} has shape {vector.shape}, expected ({input.shape[1]},)")


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Compute running = (1 - momentum)·running + momentum·value."""
    if running is not None:
        with no_grad():
            running.mul_(1 - momentum).add_(ew.to_dtype(value.detach(), running.dtype), alpha=momentum)


@layer_function
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias by channel of x = `input`, `[N, C, …]`.

    Training uses the batch's mean and variance, and updates the running ones with the unbiased variance. Evaluation
    uses the running ones.
    """
    name = "batch_norm"
    if not array_of(input, name).size:
        y = ew.clone(input)
        y = y if weight is None else y * weight[0]
        return y if bias is None else y + bias[0]  # type: ignore[no-any-return]
    _check_channels(name, input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    x, count = wide(input), input.numel() // max(input.shape[1], 1)
    if not training:
        if running_mean is None or running_var is None:
            raise UsageError(f"{name}: running_mean and running_var are None", next="pass them, or training=True")
        shape = (-1, *(1,) * (input.ndim - 2))
        x = (x - wide(running_mean).reshape(shape)) * pw.rsqrt(wide(running_var).reshape(shape) + eps)
        return _affine(x, weight, bias, input)
    if count == 1:
        raise UsageError(f"{name}: shape {tuple(input.shape)} has one value per channel", next="pass a larger batch")
    dims = (0, *range(2, input.ndim))
    mean = reduce.mean(x, dims, keepdim=True)
    centred = x - mean
    var = reduce.mean(pw.square(centred), dims, keepdim=True)
    _update(running_mean, mean.reshape(-1), momentum)
    _update(running_var, var.reshape(-1) * (count / max(count - 1, 1)), momentum)
    return _affine(centred * pw.rsqrt(var + eps), weight, bias, input)


@layer_function
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`batch_norm` with statistics of each channel of each sample; the running ones average over samples."""
    name = "instance_norm"
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    _check_channels(name, input, **vectors)
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    count = math.prod(input.shape[2:])
    if count == 1:
        raise UsageError(f"{name}: shape {tuple(input.shape)} has one value per channel", next="pass a longer input")
    x, dims = wide(input), tuple(range(2, input.ndim))
    mean = reduce.mean(x, dims, keepdim=True)
    centred = x - mean
    var = reduce.mean(pw.square(centred), dims, keepdim=True)
    _update(running_mean, reduce.mean(mean.reshape(input.shape[:2]), 0), momentum)
    _update(running_var, reduce.mean(var.reshape(input.shape[:2]), 0) * (count / max(count - 1, 1)), momentum)
    return _affine(centred * pw.rsqrt(var + eps), weight, bias, input)


@public(method=False, nn=True)
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias with statistics of groups of channels (Wu & He, 2018).

    Args:
        input: `[N, C, …]`, where C is a multiple of `num_groups`.
        weight, bias: `[C]`.
    """
    _check_channels("group_norm", input, weight=weight, bias=bias)
    if num_groups < 1 or input.shape[1] % num_groups:
        raise ShapeError(f"group_norm: {input.shape[1]} channels cannot form {num_groups} equal groups")
    if 0 in input.shape[1:]:
        raise ShapeError(f"group_norm: shape {input.shape} has no elements to normalize")
    if not input.numel():
        return _affine(wide(input), weight, bias, input)
    rows = wide(input).reshape(input.shape[0], num_groups, -1)
    return _affine(layer_norm(rows, rows.shape[-1:], eps=eps).reshape(input.shape), weight, bias, input)
