"""Triton's interpreter without work that it does again and again to no effect: most of the suite's time goes there.

What kernels compute stays the same, except within `ordered`. Of a version of Triton that has other parts, those are
left as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
    if hasattr(semantic, "arange"):
        semantic.arange = _cached(semantic.arange)
    if hasattr(interpreter, "_convert_float"):
        _convert_at_once(interpreter)
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

        if obj is interpreter.tl.core.tensor and remember is not None and name in OPERATORS:
            called = remember(called, OPERATORS[name])
        elif obj is interpreter.tl.core.tensor and name == "__getitem__":
            called = _expand_at_once(interpreter, called)
        scope.set_attr(obj, name, called)

    remember = _operators(interpreter)
    interpreter._patch_attr = patch


def _cached(method: Any) -> Any:
    """A method whose arguments can be told apart; its results are never changed."""
    keep = functools.cache(method)
    return lambda self, start, end, **others: method(self, start, end, **others) if others else keep(self, start, end)


def _convert_at_once(interpreter: Any) -> None:
    """Between float32 and bfloat16, which truncates here, all but subnormals by a shift."""
    convert = interpreter._convert_float

    def converted(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if rounding is not None or {given.name, wanted.name} != {"bf16", "fp32"}:
            return convert(values, given, wanted, rounding)
        bits = values.view(np.uint32 if given.name == "fp32" else np.uint16)
        exponents = bits & (0x7F800000 if given.name == "fp32" else 0x7F80)
        if np.any(bits[exponents == 0] << 1):
            return convert(values, given, wanted, rounding)
        return (bits >> 16).astype(np.uint16) if given.name == "fp32" else bits.astype(np.uint32) << 16

    interpreter._convert_float = converted


def _expand_at_once(interpreter: Any, slow: Any) -> Any:
    """`x[:, None]` of a block, whose type is made the first time."""
    tensor, handle, whole = interpreter.tl.core.tensor, interpreter.TensorHandle, slice(None)
    known: dict[Any, tuple[Any, ...]] = {}

    def index(x: Any, places: Any) -> Any:
        if type(places) is not tuple or not x.type.sizes or any(p is not None and p != whole for p in places):
            return slow(x, places)
        key = x.handle.dtype.name, x.dtype.name, x.type.sizes, tuple(p is None for p in places)
        if key not in known:
            result = slow(x, places)
            if x.handle.data[places].shape == result.handle.data.shape:
                known[key] = result.handle.dtype, result.type, result.dtype, result.numel, result.shape
            return result
        held, made = object.__new__(handle), object.__new__(tensor)
        held.data, held.attr, made.handle = x.handle.data[places], {}, held
        held.dtype, made.type, made.dtype, made.numel, made.shape = known[key]
        return made

    return index


# Operators of tensors, and whether the second operand stands on the left.
OPERATORS = {f"__{name}__": False for name in ["lt", "le", "gt", "ge", "eq", "ne"]}
for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift"]:
    OPERATORS |= {f"__{_name}__": False, f"__r{_name}__": True}
PLAIN = {f"{kind}{bits}" for kind in ("int", "uint", "fp") for bits in (8, 16, 32, 64)} - {"fp8"} | {"int1"}
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


class _Calls(list[tuple[Any, Any, Any]]):
    """Functions of numpy that the interpreter calls while an operator is computed, and their operands."""

    def __init__(self, interpreter: Any) -> None:
        super().__init__()
        self.are_wanted = False
        builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
        of_two, divided, moved = builder.binary_op, builder.create_idiv, builder.create_addptr

        def note_two(builder: Any, x: Any, y: Any, function: Any) -> Any:
            self.note(function, x, y)
            return of_two(builder, x, y, function)

        def note_divided(builder: Any, x: Any, y: Any) -> Any:
            def quotient(a: Any, b: Any) -> Any:
                return divided(builder, handle(a, x.dtype), handle(b, y.dtype)).data

            self.note(quotient, x, y)
            return divided(builder, x, y)

        def note_moved(builder: Any, pointer: Any, offset: Any) -> Any:
            size = np.uint64(max(1, pointer.get_element_ty().primitive_bitwidth // 8))
            self.note(lambda a, b: a + size * b.astype(np.uint64), pointer, offset)
            return moved(builder, pointer, offset)

        builder.binary_op, builder.create_idiv, builder.create_addptr = note_two, note_divided, note_moved

    def note(self, function: Any, x: Any, y: Any) -> None:
        if self.are_wanted:
            self.append((function, x.data, y.data))

    def during(self, function: Any, *operands: Any) -> Any:
        """The function's result, and only its calls here."""
        self.clear()
        self.are_wanted = True
        try:
            return function(*operands)
        finally:
            self.are_wanted = False

    def as_one(self, a: Any, b: Any, is_reflected: bool, result: Any) -> Any:
        """What gave `result`, as one call; False if it was more than that."""
        tensors = [a, result] if isinstance(b, (int, float)) else [a, b, result]
        if len(self) != 1 or any(not (t.dtype.is_ptr() or t.dtype.name in PLAIN) for t in tensors):
            return False
        if any(t.dtype.is_ptr() for t in tensors) and (is_reflected or not a.dtype.is_ptr()):
            return False  # the pointer comes first
        function, left, right = self[0]
        if left.dtype == right.dtype == bool and function not in BITWISE:
            return False
        own, other = (right, left) if is_reflected else (left, right)
        number = other.reshape(-1)[:1].copy() if len(tensors) == 2 else None
        x, y = a.handle.data.astype(own.dtype), b.handle.data.astype(other.dtype) if number is None else number
        wanted, found = result.handle.data, function(y, x) if is_reflected else function(x, y)
        last = None if found.dtype == wanted.dtype else wanted.dtype
        found = found.astype(wanted.dtype)
        if found.shape != wanted.shape or found.tobytes() != wanted.tobytes():
            return False
        first = None if own.dtype == a.handle.data.dtype else own.dtype
        second = None if number is not None or other.dtype == b.handle.data.dtype else other.dtype
        described = result.type, result.dtype, result.numel, result.shape
        return function, first, second, number, last, result.handle.dtype, *described


def _operators(interpreter: Any) -> Callable[[Any, bool], Any] | None:
    """Wraps operators of tensors: types and shapes are looked through for the first operands that have them.

    The first time, it is noted which function of numpy was called and with which dtypes; and the function is kept if it
    gives the same bits without the rest. All else is left to the interpreter, as floats that numpy does not have.
    """
    tensor, constant, handle = interpreter.tl.core.tensor, interpreter.tl.core.constexpr, interpreter.TensorHandle
    if any(not hasattr(interpreter.InterpreterBuilder, f) for f in ("binary_op", "create_idiv", "create_addptr")):
        return None
    calls = _Calls(interpreter)

    def remember(slow: Any, is_reflected: bool) -> Any:
        plans: dict[Any, Any] = {}

        def operator(a: Any, b: Any) -> Any:
            if type(b) is constant:
                b = b.value
            kind, x, y, held = type(b), a.handle.data, None, a.handle.dtype.name  # `held` differs between truth values
            if kind is tensor:
                y, held = b.handle.data, (held, b.handle.dtype.name)
                key = (held, a.dtype.name, a.type.sizes, x.dtype, b.dtype.name, b.type.sizes, y.dtype)
            elif kind is int or kind is float:
                key = (held, a.dtype.name, a.type.sizes, x.dtype, kind, b or repr(b))  # the two zeros are equal
            else:
                return slow(a, b)
            known = plans.get(key)
            if known is None:
                result = calls.during(slow, a, b)
                plans[key] = calls.as_one(a, b, is_reflected, result) if type(result) is tensor else False
                calls.clear()
                return result
            if not known:
                return slow(a, b)
            function, own, other, number, last, handle_type, *described = known
            x = x if own is None else x.astype(own)
            y = number if number is not None else y if other is None else y.astype(other)
            data = function(y, x) if is_reflected else function(x, y)
            held, made = object.__new__(handle), object.__new__(tensor)
            held.data, held.dtype, held.attr = data if last is None else data.astype(last), handle_type, {}
            made.handle = held
            made.type, made.dtype, made.numel, made.shape = described
            return made

        return operator

    return remember


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
