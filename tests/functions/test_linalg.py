"""Linear algebra functions: values against float64 numpy, gradients, einsum against np.einsum, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genesis
from genesis import op as ops
from genesis.errors import DTypeError, ShapeError
from genesis.functions import linalg, surface
from genesis.functions.create import tensor
from tests.autograd.scenarios import gradcheck

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return tensor(RNG.standard_normal(shape), requires_grad=True)


def close(got: Any, expected: np.ndarray) -> bool:
    return got.shape == expected.shape and np.allclose(got.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


CALLS: dict[str, tuple[Any, Any, list[tuple[int, ...]]]] = {
    "matmul": (genesis.matmul, np.matmul, [(2, 3, 4), (4, 5)]),
    "mm": (genesis.mm, np.matmul, [(3, 4), (4, 5)]),
    "bmm": (genesis.bmm, np.matmul, [(2, 3, 4), (2, 4, 5)]),
    "mv": (genesis.mv, np.matmul, [(3, 4), (4,)]),
    "dot": (genesis.dot, np.dot, [(4,), (4,)]),
    "outer": (genesis.outer, np.outer, [(3,), (4,)]),
    "linear": (genesis.linear, lambda x, w, b: x @ w.T + b, [(2, 3, 4), (5, 4), (5,)]),
    "addmm": (
        lambda x, a, b: genesis.addmm(x, a, b, beta=0.5, alpha=2.0),
        lambda x, a, b: 0.5 * x + 2.0 * (a @ b),
        [(5,), (3, 4), (4, 5)],
    ),
    "addmv": (genesis.addmv, lambda x, a, b: x + a @ b, [(3,), (3, 4), (4,)]),
    "baddbmm": (genesis.baddbmm, lambda x, a, b: x + a @ b, [(1, 3, 5), (2, 3, 4), (2, 4, 5)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str) -> None:
    function, oracle, shapes = CALLS[name]
    inputs = [normal(*s) for s in shapes]
    assert close(function(*inputs), oracle(*(x.detach().numpy() for x in inputs)))
    assert gradcheck(function, inputs)


def test_beta_zero_does_not_read_the_input() -> None:
    x = genesis.full((2, 2), float("nan"))
    assert np.isfinite(genesis.addmm(x, genesis.ones(2, 3), genesis.ones(3, 2), beta=0).numpy()).all()


def test_methods_and_operator_agree_with_functions() -> None:
    a, b = normal(2, 3), normal(3, 2)
    expected = a.detach().numpy() @ b.detach().numpy()
    for got in (a @ b, a.matmul(b), a.mm(b), genesis.mm(a, b)):
        assert close(got, expected)
    methods = [name for name, function in surface.methods.items() if function.__module__ == linalg.__name__]
    assert len(methods) == 13
    for name in (each for each in methods if hasattr(linalg, each)):  # others are forms of these
        assert getattr(genesis.Tensor, name) is getattr(linalg, name)


def test_out_is_written_in_place() -> None:
    a, b = normal(2, 3).detach(), normal(3, 4).detach()
    out = genesis.zeros(2, 4, dtype="float64")
    address = out.data_ptr()
    assert genesis.matmul(a, b, out=out) is out
    assert out.data_ptr() == address
    assert close(out, a.numpy() @ b.numpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_byte_floats_are_rounded_once(dtype: str) -> None:
    """Sums in the narrow type would lose all terms after the first few hundred."""
    ones = genesis.ones(1, 3000, dtype=dtype)
    assert (ones @ ones.T).item() == genesis.full((), 3000.0, dtype=dtype).item()
    bias = genesis.full((1,), 0.5, dtype=dtype)
    assert genesis.linear(ones, ones, bias).item() == genesis.full((), 3000.5, dtype=dtype).item()


def test_integers_multiply_exactly_and_wrap() -> None:
    big = tensor([[2**62, 3]])
    assert (big @ tensor([[2], [1]])).item() == -(2**63) + 3
    small = tensor([[100, 100]], dtype="int8")
    assert (small @ small.T).item() == np.int64(20000).astype(np.int8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("lead", "inner", "outer"), [((3, 5), 4, 0), ((3, 5), 0, 2), ((3, 0), 4, 2), ((0, 5), 4, 0), ((5,), 4, 0)]
)
def test_dimensions_of_size_0(lead: tuple[int, ...], inner: int, outer: int, device: str) -> None:
    """Forward and backward of a batch against one matrix, with empty results, operands and gradients."""
    x = genesis.ones(*lead, inner, device=device, requires_grad=True)
    w = genesis.ones(outer, inner, device=device, requires_grad=True)
    for y in (genesis.linear(x, w), x @ w.T):
        assert y.shape == (*lead, outer)
        assert (y == inner).all()
        y.backward(genesis.ones(*lead, outer, device=device))
    assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
    assert (x.grad == 2 * outer).all()
    assert (w.grad == 2 * int(np.prod(lead))).all()


def test_memory_that_blas_cannot_take() -> None:
    """Steps in both dimensions, repeated rows, reversed order: values must not depend on the layout."""
    x = normal(8, 10).detach()
    wide = normal(10).detach().expand(6, 10)
    for a, b in [(x[::2, ::3], x[::2, ::3].T), (wide, x.T), (x[:, :1], x[:1]), (x.T[::2], x[:, ::5])]:
        assert close(a @ b, a.numpy().copy() @ b.numpy().copy())


def gemm_shapes(run: Any) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of all products that numpy is asked for while `run` runs."""
    seen: list[tuple[tuple[int, ...], ...]] = []
    plain = np.matmul

    def spy(x: np.ndarray, y: np.ndarray, **kwargs: Any) -> Any:
        seen.append((x.shape, y.shape))
        return plain(x, y, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genesis.ops.linalg.np.matmul", spy)
        run()
    return seen


@pytest.mark.parametrize("product", [lambda x, w: genesis.linear(x, w), lambda x, w: x @ w.T])
def test_a_batch_against_one_matrix_is_one_product_each_way(product: Any) -> None:
    x, w = normal(4, 6, 8), normal(5, 8)
    shapes = gemm_shapes(lambda: product(x, w).sum().backward())
    assert shapes[0] == ((24, 8), (8, 5))
    assert sorted(shapes[1:]) in (
        sorted([((24, 5), (5, 8)), ((5, 24), (24, 8))]),
        sorted([((24, 5), (5, 8)), ((8, 24), (24, 5))]),
    )


def test_gradients_read_transposed_memory_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: np.ndarray) -> np.ndarray:
        raise AssertionError(f"a copy of shape {x.shape} was made")

    x, w = normal(4, 6, 8), normal(5, 8)
    loss = (genesis.linear(x, w) + x @ w.T).reshape(-1)
    gradient = genesis.ones(120, dtype="float64")
    monkeypatch.setattr("genesis.ops.linalg.np.ascontiguousarray", refuse)
    loss.backward(gradient)
    assert w.grad.shape == (5, 8)


def test_flops_count_a_multiplication_and_an_addition_a_term() -> None:
    a, b = normal(2, 3, 4).detach().array, normal(4, 5).detach().array
    op = ops.registry["matmul"]
    assert op.cost((a, b), (op(a, b),), {}).flops == 2 * 2 * 3 * 5 * 4
    linear = ops.registry["linear"]
    weight = normal(7, 4).detach().array
    assert linear.cost((a, weight), (linear(a, weight),), {}).flops == 2 * 2 * 3 * 7 * 4


# --- einsum -----------------------------------------------------------------------------------------------------------

EQUATIONS = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]),
    ("bij,bjk->bki", [(2, 3, 4), (2, 4, 5)]),
    ("i,j->ij", [(2,), (3,)]),
    ("ij->ji", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("iij->j", [(2, 2, 3)]),
    ("i,i", [(4,), (4,)]),
    ("ba", [(2, 3)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 2)]),
    ("...i->...", [(2, 3, 4)]),
    ("i...j,j", [(2, 3, 4), (4,)]),
    ("ij,kj,lk->il", [(2, 3), (4, 3), (5, 4)]),
    ("ij,jk,kl,lm->im", [(2, 3), (3, 2), (2, 3), (3, 2)]),
    ("a,a,a->a", [(3,), (3,), (3,)]),
    ("ab,cd->", [(2, 3), (2, 2)]),
    ("ijk,ijk->ijk", [(2, 3, 2), (2, 3, 2)]),
    (",ij->ij", [(), (2, 3)]),
    ("iJ,Jk->ik", [(2, 3), (3, 2)]),
    (" i j , j k -> i k ", [(2, 3), (3, 2)]),
    ("ij,jk->ik", [(0, 3), (3, 2)]),
    ("ij,jk->ik", [(2, 0), (0, 2)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [normal(*s) for s in shapes]
    expected = np.einsum(equation, *(x.detach().numpy() for x in inputs))
    assert close(genesis.einsum(equation, *inputs), np.asarray(expected))
    assert close(genesis.einsum(equation, inputs), np.asarray(expected))
    assert gradcheck(lambda *xs: genesis.einsum(equation, *xs), inputs)


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """Valid equations of up to three operands over four labels, some with an ellipsis."""
    sizes = {label: draw(st.integers(1, 3)) for label in "abcd"}
    terms, shapes = [], []
    dots = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        letters = draw(st.lists(st.sampled_from("abcd"), max_size=3))
        shape = tuple(sizes[c] for c in letters)
        term = "".join(letters)
        if dots and draw(st.booleans()):
            at, extra = draw(st.integers(0, len(letters))), draw(st.integers(0, 2))
            term = term[:at] + "..." + term[at:]
            shape = shape[:at] + (2,) * extra + shape[at:]
        terms.append(term)
        shapes.append(shape)
    equation = ",".join(terms)
    if dots or draw(st.booleans()):
        found = [c for c in "abcd" if c in equation]
        output = draw(st.permutations(found))[: draw(st.integers(0, len(found)))]
        equation += "->" + ("..." if "..." in equation else "") + "".join(output)
    return equation, shapes


@settings(max_examples=60)
@given(equations(), st.integers(0, 2**32))
def test_einsum_on_any_equation(made: tuple[str, list[tuple[int, ...]]], seed: int) -> None:
    equation, shapes = made
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(s) for s in shapes]
    got = genesis.einsum(equation, *(tensor(v) for v in values))
    assert close(got, np.asarray(np.einsum(equation, *values)))


def test_einsum_broadcasts_size_one() -> None:
    """As torch and unlike numpy, a label may stand for size 1 in one operand."""
    a, b = normal(2, 1), normal(3, 4)
    expected = np.einsum("ij,jk->ik", np.broadcast_to(a.detach().numpy(), (2, 3)), b.detach().numpy())
    assert close(genesis.einsum("ij,jk->ik", a, b), expected)
    assert gradcheck(lambda a, b: genesis.einsum("ij,jk->ik", a, b), [a, b])


# --- Errors -----------------------------------------------------------------------------------------------------------

X, V = genesis.zeros(2, 3), genesis.zeros(3)
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "inner sizes": (lambda: X @ X, ShapeError, r"matmul: .*\(2, 3\) and \(2, 3\): the inner sizes 3 and 2 differ"),
    "dtypes": (lambda: X @ genesis.zeros(3, 2, dtype="float64"), DTypeError, "float32 and float64"),
    "mm": (lambda: X.mm(V), ShapeError, r"mm: shapes \(2, 3\) and \(3,\) .*2 and 2 dimensions"),
    "bmm": (
        lambda: genesis.bmm(genesis.zeros(2, 1, 3), genesis.zeros(1, 3, 1)),
        ShapeError,
        "bmm: .* 2 and 1",
    ),
    "outer": (lambda: genesis.outer(X, V), ShapeError, "outer"),
    "no tensor": (lambda: genesis.matmul(X, [1.0]), DTypeError, "matmul takes a tensor, got list"),
    "terms": (lambda: genesis.einsum("ij", X, X), ShapeError, "1 terms for 2 operands"),
    "dimensions": (lambda: genesis.einsum("ijk->i", X), ShapeError, "'ijk' .* does not suit an operand of 2"),
    "characters": (lambda: genesis.einsum("i1->i", X), ShapeError, "characters other than letters"),
    "two ellipses": (lambda: genesis.einsum("......->", X), ShapeError, "characters other than letters"),
    "sizes": (lambda: genesis.einsum("ij,ik->jk", X, genesis.zeros(4, 2)), ShapeError, "'i' .* sizes 2 and 4"),
    "diagonal": (lambda: genesis.einsum("ii->i", X), ShapeError, "'i' has the sizes 2 and 3"),
    "unknown label": (lambda: genesis.einsum("ij->k", X), ShapeError, "'k' of 'ij->k'"),
    "repeated result": (lambda: genesis.einsum("ij->ii", X), ShapeError, "repeats a label"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()


def test_every_pair_of_dimensions_multiplies_like_numpy() -> None:
    shapes = [(3,), (4, 3), (1, 4, 3), (2, 4, 3), (2, 1, 4, 3)]
    others = [(3,), (3, 5), (1, 3, 5), (2, 3, 5), (2, 2, 3, 5)]
    for a, b in itertools.product(shapes, others):
        x, y = normal(*a), normal(*b)
        assert close(x @ y, x.detach().numpy() @ y.detach().numpy())
