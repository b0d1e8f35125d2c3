"""Functions of tiles that are written from formulas, and the kernels that compute them for operands of any layout."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.array import Spec
from genesis.backend.cuda.dispatch import cuda_impl_named, cuda_impls
from genesis.backend.cuda.launch import watching_launches
from genesis.kernels.formulas import tile_function
from genesis.kernels.pointwise import elementwise
from genesis.op import Op, registry
from genesis.ops.blocks import sweep
from genesis.ops.formula import by_ops, elementary


def source_of(name: str, form: str = "exact") -> str:
    return inspect.getsource(tile_function(name, form).fn)


def test_steps_are_written_in_the_order_of_the_formula() -> None:
    assert source_of("silu") == (
        "def silu_exact(x):\n"
        "    v0 = x * -1.0 if x.dtype.is_floating() else 0 - x\n"
        "    v1 = exp(v0)\n"
        "    v2 = v1 + 1\n"
        "    v3 = divide(tl.full(v2.shape, 1, v2.dtype), v2)\n"
        "    v4 = v3 * x\n"
        "    return v4\n"
    )
    assert source_of("sigmoid", "quick").endswith("v3 = 1 / v2\n    return v3\n")
    assert "fast_exp(v0)" in source_of("silu", "fast")
    assert "x | y" in source_of("add", "bools")


def test_an_op_without_a_formula_has_no_function() -> None:
    for name, form in (("matmul", "exact"), ("silu", "slow"), ("silo", "exact")):
        with pytest.raises(AttributeError, match=f"no formula gives {name}_{form}"):
            tile_function(name, form)


def test_a_formula_refuses_what_has_no_elementwise_step() -> None:
    with pytest.raises(AssertionError, match=r"maximum\.reduce"):
        by_ops(np.maximum.reduce)(genesis.ones(3).array)


@pytest.fixture
def forget() -> Iterator[None]:
    yield
    for table in (registry, cuda_impls):
        for name in ("pulse", "pair"):
            table.pop(name, None)
    cuda_impl_named.cache_clear()
    tile_function.cache_clear()


@elementary
def expm1_values(x: np.ndarray, out: np.ndarray | None = None) -> Any:
    return np.expm1(x, out=out)


def _pulse(x: Any, out: np.ndarray | None = None) -> Any:
    return np.multiply(np.where(x > 0, expm1_values(x), -np.inf), x**2, out=out)


def test_an_op_with_a_formula_needs_no_kernel(forget: None) -> None:
    def reference(out: np.ndarray, x: np.ndarray) -> None:
        sweep(_pulse, out, x)

    op = Op("pulse", reference, lambda x: Spec(x.shape, x.dtype), elementwise=True, formula=_pulse)
    x = np.linspace(-3, 3, 1003, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        found = [op(genesis.tensor(x, device=device).array).numpy() for device in ("cpu", "cuda")]
    assert np.allclose(found[0], found[1], rtol=1e-6, equal_nan=True) and found[0][-1] > 9 * 19
    assert "expm1(x)" in source_of("pulse") and 'float("-inf")' in source_of("pulse")


def test_a_formula_may_have_several_results(forget: None) -> None:
    def pair(x: Any, y: Any) -> Any:
        return x + y, x - y

    def reference(out: Any, x: Any, y: Any) -> None:
        out[0][...], out[1][...] = pair(x, y)

    op = Op("pair", reference, lambda x, y: (Spec(x.shape, x.dtype),) * 2, elementwise=True, formula=pair)
    x = np.arange(70, dtype=np.float32)
    total, difference = op(genesis.tensor(x, device="cuda").array, genesis.tensor(x[::-1].copy(), device="cuda").array)
    assert (total.numpy() == 69).all() and (difference.numpy() == x - x[::-1]).all()


# Shape, and the order and size of the dimensions of each operand in memory; size 1 is broadcast.
LAYOUTS: tuple[tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]], ...] = (
    ((1025,), (((0,), (1025,)), ((0,), (1025,)))),
    ((40, 70), (((0, 1), (40, 70)), ((1, 0), (40, 70)))),
    ((3, 40, 70), (((0, 1, 2), (3, 40, 70)), ((0, 2, 1), (3, 40, 70)))),
    ((33, 3, 64), (((0, 1, 2), (33, 3, 64)), ((1, 2, 0), (33, 3, 64)))),
    ((50, 36), (((0, 1), (50, 1)), ((0, 1), (1, 36)))),
    ((5, 7, 48), (((0, 1, 2), (5, 1, 48)), ((2, 1, 0), (5, 7, 48)))),
    ((9, 5), (((1, 0), (9, 5)), ((0, 1), (1, 5)))),
)  # fmt: skip


@pytest.mark.parametrize("dtype", (np.float32, np.float16))
@pytest.mark.parametrize("layout", LAYOUTS, ids=[str(shape) for shape, _ in LAYOUTS])
@pytest.mark.parametrize("is_wide", (False, True), ids=("int32", "int64"))
def test_operands_of_every_layout(layout: Any, dtype: Any, is_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_wide:
        monkeypatch.setattr(elementwise, "needs_int64", lambda *sizes: True)
    rng = np.random.default_rng(1)
    shape, operands = layout
    a, b = (
        genesis.tensor(rng.standard_normal([sizes[d] for d in order]).astype(dtype), device="cuda")
        .permute(*np.argsort(order).tolist())
        .array
        for order, sizes in operands
    )
    out = genesis.zeros(shape, device="cuda", dtype=genesis.float16 if dtype is np.float16 else genesis.float32).array
    elementwise.elementwise(tile_function("sub"), out, a, b)
    x, y = (each.numpy().astype(np.float32) for each in (a, b))
    assert np.array_equal(out.numpy(), (x - y).astype(dtype))


@pytest.mark.parametrize("dtype", (genesis.bfloat16, genesis.float16, genesis.float32))
def test_the_form_of_a_function_follows_from_its_results(dtype: Any) -> None:
    x = genesis.ones(3, device="cuda", dtype=dtype).array

    def form(name: str, *operands: Any, out: Any = dtype) -> str:
        function = elementwise.expression(registry[name], out, *operands).function
        return str(function.fn.__name__).rpartition("_")[2]

    narrow = "exact" if dtype is genesis.float32 else "fast"
    assert form("exp", x) == form("silu", x) == form("pow", x, 2.5) == narrow
    assert form("div", x, x) == form("reciprocal", x) == form("rsqrt", x) == "exact"  # fast: 0 for huge divisors
    assert form("lt", x, x, out=genesis.bool) == "exact" and form("add", True, False, out=genesis.bool) == "bools"


@pytest.mark.parametrize("dtype", (genesis.bfloat16, genesis.float32))
def test_a_copy_converts_nothing(dtype: Any) -> None:
    x, types = genesis.ones(70, 40, device="cuda", dtype=dtype), []
    genesis.cuda.synchronize()

    def note(launch: Any, stream: int) -> None:
        types.append(launch.constants["WORK"].name)
        launch.run(stream)

    with watching_launches(note):
        y = x.t().contiguous()
        z = x.t().to(genesis.float16)
        genesis.cuda.synchronize()  # launches wait for their kernels' compilation
    assert types == [{"bfloat16": "bf16", "float32": "fp32"}[dtype.name], "fp32"]
    assert y.float().sum().item() == z.float().sum().item() == 2800
