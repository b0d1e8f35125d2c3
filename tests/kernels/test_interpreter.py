"""What tests/interpreter.py remembers of Triton's interpreter: the same bits as it gives without."""

from __future__ import annotations

import itertools
import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from genesis.backend.cuda.driver import is_interpreted

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="of the interpreter")

if is_interpreted():
    from triton.runtime import interpreter

    tl, semantic = interpreter.tl, interpreter.interpreter_semantic

METHODS = {
    operator.add: lambda a, b: semantic.add(a, b, False),
    operator.sub: lambda a, b: semantic.sub(a, b, False),
    operator.mul: lambda a, b: semantic.mul(a, b, False),
    operator.truediv: lambda a, b: semantic.truediv(a, b),
    operator.floordiv: lambda a, b: semantic.floordiv(a, b),
    operator.mod: lambda a, b: semantic.mod(a, b),
    operator.and_: lambda a, b: semantic.and_(a, b),
    operator.lshift: lambda a, b: semantic.shl(a, b),
    operator.lt: lambda a, b: semantic.less_than(a, b),
    operator.ge: lambda a, b: semantic.greater_equal(a, b),
    operator.eq: lambda a, b: semantic.equal(a, b),
}
DTYPES = ["int1", "uint8", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "float64", "pointer"]
NUMBERS = [3, -2, 0, 2**31, 2**40, 1.5, 0.0, -0.0, float("nan"), True]


def made(kind: str, shape: tuple[int, ...], seed: int) -> Any:
    dtype = tl.pointer_type(tl.float32) if kind == "pointer" else getattr(tl, kind)
    values = np.random.default_rng(seed).integers(1, 7, shape or (1,))
    if kind == "bfloat16":
        data = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        data = (values > 3 if kind == "int1" else values).astype(interpreter._get_np_dtype(dtype))
    block = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(interpreter.TensorHandle(data, dtype), block)


def outcome(function: Any, a: Any, b: Any) -> Any:
    """The error's type, or all that a result says of itself, and its bits."""
    with np.errstate(all="ignore"):
        try:
            x = function(a, b)
        except Exception as error:
            return type(error)
    held = x.handle
    return str(x.type), x.dtype, held.dtype, held.data.dtype, held.data.shape, held.data.tobytes(), str(x.shape)


@pytest.fixture(scope="module", autouse=True)
def language() -> None:
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


@pytest.mark.parametrize("sign", METHODS, ids=lambda sign: sign.__name__)
def test_an_operator_gives_what_the_interpreter_gives(sign: Any) -> None:
    """For the first operands of their types, and for others later."""
    computed = 0
    shapes_of_pairs = itertools.cycle([((4, 1), (1, 8)), ((8,), ()), ((), ())])
    for (left, right), shapes in zip(itertools.product(DTYPES, repeat=2), shapes_of_pairs, strict=False):
        for seed in (1, 2):
            a, b = made(left, shapes[0], seed), made(right, shapes[1], seed + 10)
            wanted = outcome(METHODS[sign], a, b)
            assert outcome(sign, a, b) == wanted, (left, right, shapes)
            computed += isinstance(wanted, tuple)
    for (kind, number), shape in zip(
        itertools.product(DTYPES, NUMBERS), itertools.cycle([(8,), (), (2, 4)]), strict=False
    ):
        for seed in (1, 2):
            a = made(kind, shape, seed)
            assert outcome(sign, a, number) == outcome(METHODS[sign], a, number), (kind, number, shape)
            if sign not in (operator.lt, operator.ge, operator.eq):  # Python turns them around
                assert outcome(sign, number, a) == outcome(METHODS[sign], number, a), (number, kind, shape)
    assert computed > 25


def test_axes_of_one_element() -> None:
    for seed in (1, 2):
        x = made("float32", (8,), seed)
        for found, shape in ((x[:, None], (8, 1)), (x[None, :], (1, 8)), (x[:, None][None, :, :], (1, 8, 1))):
            assert found.handle.data.shape == shape and found.handle.data.tobytes() == x.handle.data.tobytes()
            assert [int(n) for n in found.shape] == list(shape) and found.dtype == tl.float32


@pytest.mark.parametrize("values", [[0.0, -0.0, 1.5, -3e38, np.inf, np.nan], [1e-39, 2.0]])
def test_conversions_between_float32_and_bfloat16(values: list[float]) -> None:
    """Of all that float32 has, beside the interpreter's own function."""
    (convert,) = (c.cell_contents for c in interpreter._convert_float.__closure__)
    wide = np.array(values, np.float32)
    narrow = convert(wide, tl.float32, tl.bfloat16, None)
    for given, kinds in ((wide, (tl.float32, tl.bfloat16)), (narrow, (tl.bfloat16, tl.float32))):
        wanted, found = (function(given, *kinds, None) for function in (convert, interpreter._convert_float))
        assert found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()
