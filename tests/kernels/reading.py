"""Kernels are read once for all architectures: the way from Python to Triton's first form takes a quarter of the time,
and up to there nothing depends on the architecture but what 8-bit floats are for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["read_once"]


@contextmanager
def read_once() -> Iterator[None]:
    """What is compiled again inside the block, for another architecture, is read from the text of its first form."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource

    read = ASTSource.make_ir
    texts: dict[tuple[str, Any], str] = {}

    def make(self: Any, target: Any, options: Any, functions: Any, modules: Any, context: Any) -> Any:
        # how exactly 8-bit floats are summed is written on every product, and differs on sm_90
        summed = options.max_num_imprecise_acc_default
        name = self.hash()
        text = texts.get((name, None)) or texts.get((name, summed))
        if text is not None:
            path.write_text(text)
            module = ir.parse_mlir_module(str(path), context)
            module.context = context
            return module
        module = read(self, target, options, functions, modules, context)
        text = str(module)
        texts[name, summed if "tt.dot" in text else None] = text
        return module

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "kernel.ttir"
        patch.setattr(ASTSource, "make_ir", make)
        yield
