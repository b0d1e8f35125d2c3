"""Ops that users make: of Triton functions (in its interpreter) and of CUDA C++ (whose reference stands in there)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

import genesis
from genesis import Tensor
from genesis.backend.cuda.driver import is_interpreted
from genesis.cuda.graphs import FunctionGraph
from genesis.custom import Spec, TritonOp, UserOp, cdiv, check_op, user_ops
from genesis.errors import DeviceError, DTypeError, GenesisError, GradientError, NumericError, ShapeError, UsageError
from genesis.measure.cases import make_case
from genesis.op import registry
from tests.autograd.scenarios import gradcheck
from tests.kernels.compiler import runs_cuda

BLOCK = 64
X = np.linspace(-2, 2, 150, dtype=np.float32).reshape(3, 50)


@triton.jit
def square_kernel(p_out, p_x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + i, mask=i < n)
    tl.store(p_out + i, x * x, mask=i < n)


@triton.jit
def slope_kernel(p_dx, p_g, p_x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, x = tl.load(p_g + i, mask=i < n), tl.load(p_x + i, mask=i < n)
    tl.store(p_dx + i, 2 * g * x, mask=i < n)


@triton.jit
def both_kernel(p_sum, p_product, p_x, p_y, n, by, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(p_x + i, mask=i < n), tl.load(p_y + i, mask=i < n)
    tl.store(p_sum + i, (x + y) * by, mask=i < n)
    tl.store(p_product + i, x * y, mask=i < n)


@triton.jit
def strided_kernel(p_out, p_x, n, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(p_out + i, tl.load(p_x + i * stride, mask=i < n), mask=i < n)


def tiles(out: Any, *rest: Any, **attrs: Any) -> int:
    """A program for each tile of the (first) output."""
    return cdiv((out[0] if isinstance(out, tuple) else out).size, BLOCK)


def triton_square(**changes: Any) -> TritonOp:
    rules: dict[str, Any] = {
        "inputs": ("x",),
        "out": lambda x: x,
        "grid": tiles,
        "constants": {"BLOCK": BLOCK},
        "reference": lambda x: x * x,
    }
    return genesis.triton_op("user_square", square_kernel, **{**rules, **changes})


SOURCE = """
// __global__ void not_this_one(int n)
extern "C" __global__ void square(T* __restrict__ out, const T *x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * x[i];
}
"""


needs_compiler = pytest.mark.skipif(not runs_cuda(), reason="NVRTC is not installed")


def cuda_square(source: str = SOURCE, **changes: Any) -> UserOp:
    rules: dict[str, Any] = {
        "inputs": ("x",),
        "out": lambda x: x,
        "grid": tiles,
        "block": BLOCK,
        "constants": lambda out, x: {"T": x.dtype},
        "reference": lambda x: x * x,
        "vjp": lambda g, x: 2 * g * x,
    }
    return genesis.cuda_op("user_square_cu", source, **{**rules, **changes})


def with_two_results(**changes: Any) -> UserOp:
    rules: dict[str, Any] = {
        "inputs": ("x", "y"),
        "out": lambda x, y, by: (x, y),
        "attrs": {"by": 1.0},
        "grid": tiles,
        "arguments": lambda out, x, y, by: (*out, x, y, x.size, by),
        "constants": {"BLOCK": BLOCK},
        "vjp": lambda gs, gp, x, y, by: (gs * by + gp * y, gs * by + gp * x),
        "reference": lambda x, y, by: ((x + y) * by, x * y),
    }
    return genesis.triton_op("user_both", both_kernel, **{**rules, **changes})


def on(device: str, values: np.ndarray = X, *, grad: bool = False) -> Tensor:
    return genesis.tensor(values, device=device, requires_grad=grad)


# --- Values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [triton_square, pytest.param(cuda_square, marks=needs_compiler)])
def test_values_on_dense_strided_and_empty_tensors(make: Any, device: str) -> None:
    square = make()
    assert np.array_equal(square(on(device)).cpu().numpy(), X * X)
    assert np.array_equal(square(on(device).t()).cpu().numpy(), (X * X).T)
    assert np.array_equal(square(on(device)[:, ::3]).cpu().numpy(), (X * X)[:, ::3])
    assert square(on(device)[:0]).shape == (0, 50)


def test_a_kernel_may_take_strides_itself() -> None:
    rules: dict[str, Any] = {"inputs": ("x",), "out": lambda x: x, "grid": 1, "constants": {"BLOCK": 64}}
    op = genesis.triton_op(
        "user_strided",
        strided_kernel,
        arguments=lambda out, x: (out, x, x.size, x.strides[0]),
        contiguous=False,
        **rules,
    )
    assert np.array_equal(op(on("cuda")[0, ::2]).cpu().numpy(), X[0, ::2])


def test_a_gradient_is_another_op() -> None:
    derivative = genesis.triton_op(
        "user_slope",
        slope_kernel,
        inputs=("g", "x"),
        out=lambda g, x: x,
        grid=tiles,
        constants={"BLOCK": BLOCK},
        reference=lambda g, x: 2 * g * x,
    )
    square = triton_square(vjp=derivative)
    x = on("cuda", grad=True)
    (square(x) * 3.0).sum().backward()
    assert np.allclose(x.grad.cpu().numpy(), 6 * X)
    assert gradcheck(square, [on("cpu", X[:2, :4].astype(np.float64), grad=True)])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_several_results_with_attributes(device: str) -> None:
    op = with_two_results()
    x, y = on(device, grad=True), on(device, X[::-1].copy(), grad=True)
    total, product = op(x, y, by=3.0)
    assert np.allclose(total.detach().cpu().numpy(), (X + X[::-1]) * 3)
    assert np.allclose(op(x, y)[0].detach().cpu().numpy(), X + X[::-1])  # the default
    product.sum().backward()  # no gradient arrives at the sum: zeros do
    assert np.allclose(x.grad.cpu().numpy(), X[::-1])
    assert np.allclose(product.detach().cpu().numpy(), X * X[::-1])


def test_a_gradient_may_be_given_the_result() -> None:
    op = triton_square(saves="outputs", vjp=lambda g, y: g * y)
    x = on("cuda", grad=True)
    op(x).sum().backward()
    assert np.allclose(x.grad.cpu().numpy(), X * X)
    both = triton_square(saves="both", vjp=lambda g, x, y: g * (x + y))
    x = on("cuda", grad=True)
    both(x).sum().backward()
    assert np.allclose(x.grad.cpu().numpy(), X + X * X)


def test_a_reference_sees_two_byte_floats_as_float32() -> None:
    seen = []
    op = triton_square(reference=lambda x: seen.append(x.dtype) or x * x)
    made = op(on("cpu").bfloat16())
    assert seen == [np.float32]
    assert made.dtype is genesis.bfloat16


# --- Dispatch ---------------------------------------------------------------------------------------------------------


def test_the_rules_are_asked_once_a_layout() -> None:
    asked = []
    op = triton_square(grid=lambda out, x: asked.append(x.shape) or tiles(out))
    for _ in range(3):
        op(on("cuda"))
    op(on("cuda")[:2])
    assert asked == [(3, 50), (2, 50)]


@pytest.mark.parametrize("make", [triton_square, pytest.param(cuda_square, marks=needs_compiler)])
def test_a_graph_holds_it(make: Any) -> None:
    square, x, graph = make(), on("cuda"), FunctionGraph()
    y = graph.capture(lambda: square(square(x) + 1.0))
    before = genesis.cuda.memory_allocated()
    for factor in (2.0, 3.0):
        x.copy_(on("cuda") * factor)
        graph.replay()
        assert np.allclose(y.cpu().numpy(), ((X * factor) ** 2 + 1) ** 2, rtol=1e-5)
    assert genesis.cuda.memory_allocated() == before
    graph.close()


def test_the_registry_is_left_alone() -> None:
    before = set(registry)
    op = triton_square()
    assert set(registry) == before
    assert user_ops["user_square"] is op
    again = triton_square()
    assert user_ops["user_square"] is again


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "what"),
    [
        (lambda op, x: op(x, x), UsageError, r"takes 1 tensor \(x\); got 2"),
        (lambda op, x: op(X), UsageError, "x must be a tensor, not ndarray"),
        (lambda op, x: op(x, eps=1), UsageError, "no argument 'eps'"),
        (lambda op, x: op.no_such, AttributeError, "no attribute 'no_such'"),
        (lambda op, x: op.cubin(), AttributeError, "no attribute 'cubin'"),
    ],
)
def test_a_wrong_call(call: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        call(triton_square(), on("cuda"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"inputs": "x"}, "inputs must be the names"),
        ({"inputs": ()}, "inputs must be the names"),
        ({"saves": "all"}, "saves must be one of inputs, outputs, both"),
        ({"vjp": 3}, "vjp must be a function, not int"),
    ],
)
def test_a_wrong_definition(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        triton_square(**changes)


def test_names_and_kernels_that_cannot_be() -> None:
    rules: dict[str, Any] = {"inputs": ("x",), "out": lambda x: x, "grid": 1}
    with pytest.raises(UsageError, match=r"Genesis already has an op gelu .* my_gelu"):
        genesis.triton_op("gelu", square_kernel, **rules)
    with pytest.raises(UsageError, match="'my op' is not a valid name"):
        genesis.triton_op("my op", square_kernel, **rules)
    with pytest.raises(UsageError, match="not a plain function"):
        genesis.triton_op("user_plain", lambda x: x, **rules)


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"grid": lambda out, x: out.size / 2}, UsageError, "grid must be up to three sizes, not 75.0"),
        ({"grid": (1, 1, 1, 1)}, UsageError, "grid must be up to three sizes"),
        ({"arguments": lambda out, x: (out, x)}, UsageError, r"takes 3 arguments \(p_out, p_x, n\), not 2"),
        ({"constants": {}}, UsageError, r"takes 4 arguments \(p_out, p_x, n, BLOCK\), not 3"),
        ({"constants": {"BLOK": 1}}, UsageError, "has no parameter BLOK"),
        ({"out": lambda x: 3}, UsageError, "out returned 3, which has no shape"),
        ({"attrs": {"by": 1}, "out": lambda x, by: x}, UsageError, "no rule for the kernel's arguments"),
    ],
)
def test_a_rule_that_does_not_fit(changes: dict[str, Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        triton_square(**changes)(on("cuda"))


@pytest.mark.parametrize(
    ("vjp", "what"),
    [
        (lambda g, x: (g, g), "2 gradients for 1 inputs"),
        (lambda g, x: 3, "returned a int for input 0"),
        (lambda g, x: g.sum(), r"shape \(\) for input 0 of shape \(3, 50\)"),
    ],
)
def test_a_wrong_gradient(vjp: Any, what: str) -> None:
    y = triton_square(vjp=vjp)(on("cuda", grad=True))
    with pytest.raises(GradientError, match=what):
        y.sum().backward()


def test_no_gradient_and_no_reference() -> None:
    op = triton_square(reference=None)
    with pytest.raises(GradientError, match="user_square has no gradient"):
        op(on("cuda", grad=True)).sum().backward()
    with pytest.raises(DeviceError, match=r"user_square has no reference .*reference="):
        op(on("cpu"))
    with pytest.raises(ShapeError, match=r"the reference of user_square returned shape \(\)"):
        triton_square(reference=lambda x: x.sum())(on("cpu"))


@pytest.mark.skipif(not is_interpreted(), reason="on a GPU it compiles")
def test_the_interpreter_has_no_ptx() -> None:
    with pytest.raises(UsageError, match="has no PTX"):
        triton_square().ptx(genesis.ones(3))


@pytest.mark.skipif(not is_interpreted(), reason="on a GPU it runs")
def test_the_interpreter_does_not_run_cuda() -> None:
    with pytest.raises(DeviceError, match=r"CUDA C\+\+, which Triton's interpreter cannot run"):
        cuda_square(reference=None)(on("cuda"))


@triton.jit
def broken_kernel(p_out, p_x, n):
    tl.store(p_out, tl.no_such_function(p_x))


def test_what_triton_refuses_ends_the_call() -> None:
    broken = genesis.triton_op("user_broken", broken_kernel, inputs=("x",), out=lambda x: x, grid=1)
    with pytest.raises(UsageError, match=r"(?s)user_broken: Triton refuses .* broken_kernel: .*no_such_function"):
        broken(on("cuda"))
    assert np.array_equal(triton_square()(on("cuda")).cpu().numpy(), X * X)  # the device is as it was


@pytest.mark.gpu
@needs_compiler
def test_what_nvrtc_refuses_ends_the_call() -> None:
    with pytest.raises(UsageError, match=r'line 5: identifier "j" is undefined\n    if \(i < n\) out\[j\]'):
        cuda_square(SOURCE.replace("out[i]", "out[j]"))(on("cuda"))
    assert np.array_equal(triton_square()(on("cuda")).cpu().numpy(), X * X)  # the device is as it was


# --- Checking ---------------------------------------------------------------------------------------------------------


def test_a_right_op_passes_its_check() -> None:
    report = check_op(triton_square(vjp=lambda g, x: 2 * g * x), dtypes=("float32", "float16"))
    assert {c.what for c in report.checks} == {"value", "strided value", "gradient of x", "differences"}
    assert {c.dtype for c in report.checks} == {"float32", "float16", "float64"}
    assert str(report).startswith(f"user_square: {len(report.checks)} checks passed\n")
    own = check_op(with_two_results(), [(X, X, {"by": 2.0}), (on("cpu"), on("cpu"))])
    assert [c.what for c in own.checks[:2]] == ["value", "value"]


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"reference": lambda x: x * x * 1.00001}, NumericError, r"the value at \(0,\) is"),
        ({"grid": 1}, NumericError, r"the value at \(64,\) is nan"),
        ({"contiguous": False}, NumericError, r"the strided value at"),
        ({"vjp": lambda g, x: g * x}, GradientError, "by differences"),
        ({"reference": None}, UsageError, "has no reference to compare with"),
    ],
)
def test_a_wrong_op_fails_its_check(changes: dict[str, Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        check_op(triton_square(**changes))


def test_a_wrong_gradient_kernel_fails_the_check() -> None:
    wrong = triton_square(inputs=("g", "x"), out=lambda g, x: x, arguments=lambda out, g, x: (out, x, x.size))
    right = genesis.triton_op(
        "user_slope", square_kernel, inputs=("g", "x"), out=lambda g, x: x, grid=tiles, constants={"BLOCK": BLOCK},
        arguments=lambda out, g, x: (out, x, x.size), reference=lambda g, x: 2 * g * x,
    )  # fmt: skip
    assert wrong.name == "user_square"
    with pytest.raises(NumericError, match="the gradient of x at"):
        check_op(triton_square(vjp=right))


# --- Measuring --------------------------------------------------------------------------------------------------------


def test_the_profiler_makes_its_inputs() -> None:
    op = with_two_results(
        flops=lambda out, x, y, by: 7 * x.size, nbytes=lambda out, x, y, by: 11, sample=lambda shape, dtype: (X, X)
    )
    case = make_case("user_both", (4, 5), None, genesis.float32, genesis.Device("cpu"))
    assert case.op is op.op
    assert (case.attrs, [x.shape for x in case.arrays]) == ({"by": 1.0}, [(3, 50), (3, 50)])
    assert op.op.cost(case.inputs, tuple(case.arrays), case.attrs) == (7 * 150, 11)
    plain = triton_square()
    case = make_case("user_square", (4, 5), None, None, genesis.Device("cuda"))
    assert [x.shape for x in case.arrays] == [(4, 5)]
    assert plain.op.cost(case.inputs, (case.arrays[0],), {}) == (20, 160)


def test_a_spec_says_other_shapes() -> None:
    op = triton_square(out=lambda x: Spec((x.shape[0],), genesis.float64), reference=lambda x: x.sum(1))
    assert op(on("cpu")).dtype is genesis.float64
    assert np.allclose(op(on("cpu")).numpy(), X.sum(1))


def test_cuda_arguments_are_held_against_the_source() -> None:
    def failing(source: str = SOURCE, x: Tensor | None = None, **changes: Any) -> GenesisError:
        with pytest.raises(GenesisError) as raised:
            cuda_square(source, **changes)(on("cuda") if x is None else x)
        return raised.value

    wide = failing(SOURCE.replace("T*", "float*").replace("T *", "float *"), on("cuda").double())
    assert isinstance(wide, DTypeError)
    assert wide.what.endswith("parameter `float* out` of the kernel square got a float64 tensor")
    few = failing(arguments=lambda out, x: (out, x))
    assert few.what == "the kernel square takes 3 arguments (out, x, n), not 2"
    swapped = failing(arguments=lambda out, x: (out, x.size, x))
    assert swapped.what.startswith("parameter `float* x` of the kernel square got 150, which is not a tensor")
    narrow = failing(SOURCE.replace("long long n", "int n"), arguments=lambda out, x: (out, x, 1 << 31))
    assert narrow.what == "parameter `int n` of the kernel square cannot hold 2147483648"
    real = failing(arguments=lambda out, x: (out, x, 1.5))
    assert "got 1.5, which is not an integer" in real.what
    assert "the grid (0, 1, 1) is empty" in failing(grid=0).what
    assert "block must be up to three sizes" in failing(block="all").what
