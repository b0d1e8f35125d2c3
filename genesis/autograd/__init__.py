"""Reverse-mode automatic differentiation: the tape, the engine that runs it backward, and their public functions."""

from contextlib import AbstractContextManager

from genesis.autograd import engine
from genesis.autograd.autocast import autocast, get_autocast_dtype, is_autocast_enabled
from genesis.autograd.checkpoint import checkpoint
from genesis.autograd.engine import backward, grad
from genesis.autograd.function import Function, FunctionContext
from genesis.autograd.gradcheck import gradcheck, gradgradcheck, jacobians
from genesis.autograd.modes import (
    detect_anomaly,
    enable_grad,
    exact,
    inference_mode,
    is_grad_enabled,
    no_grad,
    set_detect_anomaly,
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
    "exact",
    "get_autocast_dtype",
    "grad",
    "gradcheck",
    "gradgradcheck",
    "inference_mode",
    "is_autocast_enabled",
    "is_grad_enabled",
    "jacobians",
    "no_grad",
    "set_detect_anomaly",
    "set_grad_enabled",
]


def _recorded_pass(retain_graph: bool, to_leaves: bool) -> tuple[engine.BackwardPass, AbstractContextManager[None]]:
    from genesis.autograd.double import RecordedPass
    from genesis.op import tracing

    recorded = RecordedPass(retain_graph, to_leaves)
    return recorded, tracing(recorded.tape)


engine.recorded_pass.append(_recorded_pass)

# Without `apply` and `checkpoint`, which pass keywords on, and switches without arguments, which check their own.
check_calls(
    globals(),
    (
        "FunctionContext", "TensorBase", "autocast", "backward", "get_autocast_dtype", "grad", "gradcheck",
        "gradgradcheck",        "is_autocast_enabled", "is_grad_enabled", "jacobians", "set_grad_enabled",
    ),
)  # fmt: skip
