"""Helpers for model parameters: gradient clipping, and conversion to one vector. None of them waits for a device."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from genesis.autograd import no_grad
from genesis.errors import ConfigError, NumericError, ShapeError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions.shape import cat
from genesis.keywords import check_calls
from genesis.op import registry
from genesis.ops.gradients import total_norm as norm_of_all
from genesis.tensor import Tensor

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "clip_scale",
    "get_total_norm",
    "parameters_to_vector",
    "vector_to_parameters",
]


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in _listed(parameters) if p.grad is not None]


def _check_limit(name: str, value: Any) -> None:
    """Raise ConfigError for NaN, and for a limit below 0, which would flip the sign of gradients."""
    if isinstance(value, (int, float)) and not value >= 0:  # reading a tensor would synchronize the host
        raise ConfigError(f"{name} is {value}, and must be at least 0")


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm over all elements of the tensors: 0-d, float32, or float64 if one of them is; 0 without tensors.

    `foreach` has no effect: one launch always takes all tensors.

    Raises:
        NumericError: if `error_if_nonfinite` and the norm is not finite. Only this check synchronizes the host.
    """
    norm = Tensor(norm_of_all(*(t.array for t in _listed(tensors)), ord=float(norm_type)))
    if error_if_nonfinite and not bool(pw.isfinite(norm).item()):
        raise NumericError(
            f"the total norm of order {norm_type:g} of the gradients is {norm.item()}",
            next="lower the learning rate, or inspect this batch",
        )
    return norm


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, at most 1, that scales gradients of total norm `norm` down to `max_norm`: a 0-d tensor.

    `optimizer.step(grad_scale=clip_scale(optimizer.grad_norm(), max_norm))` clips without a pass over the gradients.
    """
    _check_limit("max_norm", max_norm)
    with no_grad():
        return ew.clamp(max_norm / (norm + 1e-6), max=1.0)  # type: ignore[no-any-return]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`, and return the norm before clipping.

    The norm is a 0-d tensor; the host does not wait for it. Raises NumericError, see `get_total_norm`.
    """
    _check_limit("max_norm", max_norm)
    listed = _listed(parameters)
    norm = get_total_norm(_gradients(listed), norm_type, error_if_nonfinite)
    clip_grads_with_norm_(listed, max_norm, norm)
    return norm


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients in place by `max_norm / total_norm` where that is below 1, for a norm known already."""
    scale = clip_scale(total_norm, max_norm).array
    for grad in _gradients(parameters):
        registry["mul"](grad.array, scale, out=grad.array)


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamp every element of the gradients to ±clip_value, in place."""
    _check_limit("clip_value", clip_value)
    bound = float(clip_value)
    for grad in _gradients(parameters):
        registry["clamp"](grad.array, -bound, bound, out=grad.array)


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Concatenate all values into one vector `[n]`, recorded on the tape."""
    return cat([p.reshape(-1) for p in parameters])  # type: ignore[no-any-return]


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Copy a vector in the layout of `parameters_to_vector` into the parameters."""
    targets = list(parameters)
    sizes = [p.numel() for p in targets]
    if vec.shape != (sum(sizes),):
        raise ShapeError(f"the vector has shape {vec.shape}, expected ({sum(sizes)},)")
    with no_grad():
        for parameter, part in zip(targets, vec.split(sizes), strict=True):
            parameter.copy_(part.reshape(parameter.shape))


def __getattr__(name: str) -> Any:
    if name in ("parametrizations", "parametrize", "rnn"):  # loaded at first use
        return importlib.import_module(f"genesis.nn.utils.{name}")
    raise AttributeError(f"module 'genesis.nn.utils' has no attribute {name!r}")


check_calls(globals(), __all__)
