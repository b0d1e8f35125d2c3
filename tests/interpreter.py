"""Triton's interpreter without work that it does again and again to no effect: most of the suite's time goes there.

What kernels compute stays the same. Of a version of Triton that has other parts, those are left as they are.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

__all__ = ["hasten"]


def hasten() -> None:
    """Change the interpreter of this process, where Triton is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        _keep_types(interpreter)
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        # checks that are computed for every sum and product, and looked at with `debug` alone
        interpreter.interpreter_builder.options = type(options)(sanitize_overflow=False)


def _patch_once_a_launch(interpreter: Any) -> None:
    """The language is made ready for the interpreter at a launch: not by each function that a kernel calls, too."""
    patch = interpreter._patch_lang
    whole = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    kept: list[tuple[Any, str, Any]] = []

    def patched(kernel: Any) -> Any:
        if not kept:
            scope = patch(whole)
            kept.extend((place, name, getattr(place, name)) for place, name, _ in scope._changes)
            return scope
        scope = interpreter._LangPatchScope()
        for change in kept:
            scope.set_attr(*change)
        return scope

    def called(self: Any, *args: Any, **keywords: Any) -> Any:
        return self.rewrite()(*args, **keywords)

    interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = patched, called


def _keep_types(interpreter: Any) -> None:
    """numpy's types of Triton's, of which a table is made at each look-up."""
    look_up = interpreter._get_np_dtype
    keep = functools.cache(look_up)

    def found(kind: Any) -> Any:
        scalar = kind.scalar
        return keep(scalar) if type(scalar) is interpreter.tl.dtype else look_up(kind)  # pointers have no hash

    interpreter._get_np_dtype = found
