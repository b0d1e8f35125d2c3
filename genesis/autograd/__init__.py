"""Automatic differentiation in reverse: the tape, the engine that runs it backward, and what users do with them."""

from genesis.autograd.autocast import autocast, get_autocast_dtype, is_autocast_enabled
from genesis.autograd.checkpoint import checkpoint
from genesis.autograd.engine import backward, grad
from genesis.autograd.function import Function, FunctionContext
from genesis.autograd.gradcheck import gradcheck, jacobians
from genesis.autograd.modes import (
    detect_anomaly,
    enable_grad,
    inference_mode,
    is_grad_enabled,
    no_grad,
    set_grad_enabled,
)
from genesis.autograd.record import TensorBase, apply, apply_
from genesis.keywords import check_calls

__all__ = [
    "Function",
    "FunctionContext",
    "TensorBase",
    "apply",
    "apply_",
    "autocast",
    "backward",
    "checkpoint",
    "detect_anomaly",
    "enable_grad",
    "get_autocast_dtype",
    "grad",
    "gradcheck",
    "inference_mode",
    "is_autocast_enabled",
    "is_grad_enabled",
    "jacobians",
    "no_grad",
    "set_grad_enabled",
]

# Not `apply` and `checkpoint`, which hand keywords on, nor the switches without arguments, which see to it themselves.
check_calls(
    globals(),
    (
        "FunctionContext", "TensorBase", "autocast", "backward", "get_autocast_dtype", "grad", "gradcheck",
        "is_autocast_enabled", "is_grad_enabled", "jacobians", "set_grad_enabled",
    ),
)  # fmt: skip
