"""Hooks on all modules, under torch's names. They run before a module's own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genesis.autograd.graph import HookHandle
from genesis.nn.hooks import Hook, hook_everywhere
from genesis.nn.module import Module

__all__ = [
    "Module",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
]


def register_module_forward_pre_hook(hook: Callable[..., Any]) -> HookHandle:
    """Call `hook(module, args)` before the forward of every module; see `Module.register_forward_pre_hook`."""
    return hook_everywhere("pre", Hook(hook))


def register_module_forward_hook(
    hook: Callable[..., Any], *, with_kwargs: bool = False, always_call: bool = False
) -> HookHandle:
    """Call `hook(module, args, result)` after the forward of every module; see `Module.register_forward_hook`."""
    return hook_everywhere("forward", Hook(hook, with_kwargs, always_call))


def register_module_full_backward_pre_hook(hook: Callable[..., Any]) -> HookHandle:
    """Call `hook(module, grad_output)` before the backward of every module."""
    return hook_everywhere("backward", Hook(hook, before=True))


def register_module_full_backward_hook(hook: Callable[..., Any]) -> HookHandle:
    """Call `hook(module, grad_input, grad_output)` in the backward of every module."""
    return hook_everywhere("backward", Hook(hook))
