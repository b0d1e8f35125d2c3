"""Triton's interpreter without work that it does again and again to no effect: most of the suite's time goes there.

What kernels compute stays the same, except within `ordered`. Of a version of Triton that has other parts, those are
left as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

__all__ = ["hasten", "ordered"]


def hasten() -> None:
    """Change the interpreter of this process, where Triton is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    core, semantic = interpreter.tl.core, getattr(interpreter, "TritonSemantic", None)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_once(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        _keep_types(interpreter)
    if hasattr(core, "_unwrap_if_constexpr"):
        _unwrap_at_once(core)
    if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "interpreter_semantic"):
        _call_at_once(interpreter)
    if hasattr(semantic, "computation_type_impl"):
        _keep_promotions(semantic)
    if hasattr(core, "_unwrap_shape") and hasattr(semantic, "broadcast_impl_value"):
        _keep_shapes(core, semantic, interpreter)
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        # checks that are computed for every sum and product, and looked at with `debug` alone
        interpreter.interpreter_builder.options = type(options)(sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    """The language is made ready for the interpreter once: not by each launch and each function that a kernel calls."""
    patch = interpreter._patch_lang
    whole = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    kept: list[Any] = []

    def patched(kernel: Any) -> Any:
        if not kept:
            kept.append(patch(whole))
        return interpreter._LangPatchScope()  # with nothing to restore

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


def _call_at_once(interpreter: Any) -> None:
    """Functions of the language are called without one that only asks for the semantics that they are given here."""
    asks = interpreter.tl.core.builtin(lambda: None).__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is asks else member

        def called(*args: Any, **keywords: Any) -> Any:
            keywords["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **keywords)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch


def _keep_promotions(semantic: Any) -> None:
    """The type of a result, by its operands' types and whether each is a number."""
    promote = semantic.computation_type_impl
    kept: dict[tuple[Any, ...], Any] = {}

    def promoted(self: Any, a: Any, a_is_number: bool, b: Any, b_is_number: bool, divides: bool) -> Any:
        key = a.name, a_is_number, b.name, b_is_number, divides
        found = kept.get(key)
        if found is None:
            found = kept[key] = promote(self, a, a_is_number, b, b_is_number, divides)
        return found

    semantic.computation_type_impl = promoted


def _unwrap_at_once(core: Any) -> None:
    """What is no constant, or a plain one, is told by its class."""
    unwrap, equal, constant = core._unwrap_if_constexpr, core.dtype.__eq__, core.constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is constant else o if kind in plain else unwrap(o)

    core._unwrap_if_constexpr = unwrapped
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _keep_shapes(core: Any, semantic: Any, interpreter: Any) -> None:
    """What types of blocks and tensors say of their shape is made once for each shape, not with each of them."""
    make, widen, to_ir = core.block_type.__init__, semantic.broadcast_impl_value, core.block_type.to_ir
    convert = semantic.cast
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {(): (core.constexpr(1), core.tuple([]))}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(core._unwrap_if_constexpr(n) for n in core._unwrap_if_constexpr(shape))
        known = of_types.get(sizes)
        if known is None:
            make(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
            of_tensors[sizes] = core.constexpr(self.numel), core.tuple([core.constexpr(n) for n in sizes])
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = known
            self.name = f"<{text}, {element_ty}>"
        self.sizes = sizes

    def with_element_ty(self: Any, scalar: Any) -> Any:
        if type(scalar) is not core.dtype:  # pointers have no name of their own
            return core.block_type(scalar, self.shape)
        key = scalar.name, self.sizes
        found = blocks.get(key)
        if found is None:
            found = blocks[key] = core.block_type(scalar, self.shape)
        return found

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensors[type.sizes]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type.sizes == rhs.type.sizes else widen(self, lhs, rhs)

    def cast(self: Any, input: Any, type: Any, *rounding: Any) -> Any:
        return input if input.dtype is type.scalar else convert(self, input, type, *rounding)

    def own_ir(self: Any, builder: Any) -> Any:
        return self if builder is interpreter.interpreter_builder else to_ir(self, builder)

    core.dtype.sizes, core.block_type.sizes = (), None
    core.block_type.__init__, core.block_type.to_ir = block_type, own_ir
    core.block_type.with_element_ty = with_element_ty
    core.tensor.__init__, semantic.broadcast_impl_value, semantic.cast = tensor, broadcast, cast


@contextmanager
def ordered() -> Iterator[None]:
    """Within the block, sums have stated orders, as on a GPU.

    A dot adds 16 terms at a time to one float32 accumulator, in ascending order, whatever its other sizes. `tl.sum` of
    floats depends on the tile: four lanes add a row of a tile of at least 16 rows, and 32 lanes a row of a lower one.
    """
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        x, y, total = a.data.astype(np.float64), b.data.astype(np.float64), d.data
        for begin in range(0, x.shape[-1], 16):
            part = np.zeros(total.shape)
            for k in range(begin, begin + 16):
                part += x[..., :, k, None] * y[..., k, None, :]
            total = (total + part).astype(d.data.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    plain = interpreter.ReduceOps.sum

    def sum_of(self: Any, input: Any) -> Any:
        x = input.handle.data
        if x.dtype != np.float32 or x.ndim > 2 or self.axis != x.ndim - 1:
            return plain(self, input)
        lanes = min(x.shape[-1], 4 if x.ndim == 2 and x.shape[0] >= 16 else 32)
        total = functools.reduce(np.add, np.moveaxis(x.reshape(*x.shape[:-1], -1, lanes), -2, 0))
        total = functools.reduce(np.add, np.moveaxis(total, -1, 0))
        return self.to_tensor(total[..., None] if self.keep_dims else total, input.dtype)

    builder = type(interpreter.interpreter_builder)
    with mock.patch.object(builder, "create_dot", dot), mock.patch.object(interpreter.ReduceOps, "sum", sum_of):
        yield
