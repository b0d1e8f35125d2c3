"""Warp-specialized GEMMs: compiled everywhere, and on Hopper compared with the kernels used elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of, compile
from genesis.backend.cuda.driver import Properties
from genesis.backend.cuda.simulated import EmptyDriver
from genesis.dtypes import DType, bfloat16, float8_e4m3fn, float16, float32
from genesis.kernels.elements import as_matrix
from genesis.kernels.gemm import fp8, gated, linalg, linear, warp_specialized
from genesis.kernels.gemm.tiles import MAX_IMPRECISE
from genesis.kernels.pointwise import swiglu
from genesis.ops.low_rank import LowRank, Operands, Pair
from genesis.ops.shape import window
from tests.kernels.collecting import collecting

CUDA = Device("cuda", 0)
H200 = Properties("NVIDIA H200", (9, 0), 139 << 30, 132, 227 << 10, 50 << 20)


class Hopper(EmptyDriver):
    """An H200 on which nothing runs."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.properties = H200


TILES = {
    **dict.fromkeys(
        (str(bfloat16), str(float16)), [warp_specialized.WIDE_TILE] * 2 + [warp_specialized.SHORT_TILE] * 2
    ),
    "fp8 64": [warp_specialized.WIDE_TILE, warp_specialized.SHORT_TILE],
    f"fp8 {2 * MAX_IMPRECISE}": [warp_specialized.NARROW_TILE] * 2,
}
FORMS = ["residual", "swiglu", "swiglu_backward", "swiglu_backward and h"]
LONG = 2 * MAX_IMPRECISE  # terms of sums that are promoted


def launch_all(dtype: DType, m: int) -> dict[str, bool]:
    """Each form once, on uninitialized memory."""

    def made(*shape: int) -> Array:
        return empty(shape, dtype, CUDA)

    x, gate_up, h = made(m, 64), made(m, 2048), made(m, 1024)
    found = [
        warp_specialized.ws_residual_into(made(m, 1024), x, made(1024, 64), made(m, 1024)),
        warp_specialized.ws_swiglu_into(h, gate_up, x, made(2048, 64)),
        warp_specialized.ws_swiglu_backward_into(made(m, 2048), None, x, made(64, 1024), gate_up),
        warp_specialized.ws_swiglu_backward_into(made(m, 2048), h, x, made(64, 1024), gate_up),
    ]
    return dict(zip(FORMS, found, strict=True))


def launch_quantized(m: int, k: int) -> dict[str, bool]:
    """The same in 8-bit floats."""

    def made(*shape: int) -> Array:
        return empty(shape, bfloat16, CUDA)

    def codes(*shape: int) -> Array:
        return empty(shape, float8_e4m3fn, CUDA)

    x, gate_up, h, rows = codes(m, k), made(m, 2048), made(m, 1024), empty((m,), float32, CUDA)
    scales = [empty((m + n,), float32, CUDA) for n in (1024, 2048)]
    long = warp_specialized.ws_scaled_into(made(m, 1024), x, codes(1024, k), rows, False)
    found = [
        warp_specialized.ws_residual_into(made(m, 1024), x, codes(1024, k), made(m, 1024), scales[0]),
        warp_specialized.ws_swiglu_into(h, gate_up, x, codes(2048, k), scales[1]),
        warp_specialized.ws_swiglu_backward_into(made(m, 2048), None, x, codes(1024, k), gate_up, rows),
        warp_specialized.ws_swiglu_backward_into(made(m, 2048), h, x, codes(1024, k), gate_up, rows),
    ]
    assert long == (found[0] and k == LONG)
    return dict(zip(FORMS, found, strict=True))


def compiled(dtype: DType, count: int) -> list[dict[str, Any]]:
    """The first forms compiled in a type; for a process without the interpreter, which changes Triton."""
    with collecting(Hopper) as found:
        few = launch_all(dtype, 128)
        assert not found
        many = launch_all(dtype, 8192)
    rows: list[dict[str, Any]] = [{"few": few, "many": many}]
    for kernel, signature in list(found.values())[:count]:
        made = compile.compile_kernel(kernel, signature, (9, 0))
        rows.append({"dtype": str(dtype), "warps": made.warps, "shared": made.shared})
    return rows


def chosen_others() -> list[dict[str, Any]]:
    """The kernels that layers in 8 bits are given; nothing is compiled."""
    return [{"quantized": [*map(chosen_in_8_bits, (1024, 1025, 2049)), gate_and_up_in_8_bits()]}]


def compiled_others() -> list[dict[str, Any]]:
    """Those in 8-bit floats and those with low-rank pairs."""
    rows: list[dict[str, Any]] = []
    for k, some in ((64, slice(1, 3)), (LONG, slice(2))):  # each form once
        with collecting(Hopper) as found:
            few = launch_quantized(128, k)
            assert not found
            many = launch_quantized(8192, k)
        for kernel, signature in list(found.values())[some]:
            made = compile.compile_kernel(kernel, signature, (9, 0))
            rows.append({"dtype": f"fp8 {k}", "warps": made.warps, "shared": made.shared})
        rows.append({"few": few, "many": many})
    for kernel, signature in adapted().values():
        made = compile.compile_kernel(kernel, signature, (9, 0))
        rows.append({"adapted": kernel.fn.__name__, "warps": made.warps, "shared": made.shared})
    return rows


def pairs(rank: int, factors: bool, width: int = 64, half: int = 1024) -> tuple[Operands, LowRank]:
    """Those of gate and up, on uninitialized memory."""
    a, b = empty((2 * rank, width), bfloat16, CUDA), empty((2 * half, rank), bfloat16, CUDA)
    c = empty((2 * half,), float32, CUDA) if factors else None
    return Operands([a], [b], c), LowRank(tuple(Pair(i * half, (i + 1) * half, rank, 2.0) for i in range(2)), 2)


def adapted() -> dict[Any, Any]:
    """What gate and up with low-rank pairs, with and without factors, and SwiGLU's gradients with one launch."""
    with collecting(Hopper) as found:
        for factors in (False, True):
            x, gate_up, h, u = (empty((8192, n), bfloat16, CUDA) for n in (64, 2048, 1024, 16))
            assert gated.adapted_gemm_swiglu_into(
                h, gate_up, u, x, empty((2048, 64), bfloat16, CUDA), *pairs(8, factors)
            )
        v, a, down = (empty(s, bfloat16, CUDA) for s in ((8192, 8), (8, 1024), (64, 1024)))
        swiglu.swiglu_linear_backward(empty(gate_up.shape, bfloat16, CUDA), x, down, gate_up, v, a)
    return found


def chosen_in_8_bits(fewest: int) -> list[str]:
    """The kernels of a linear layer of 2048 columns with residual and of SwiGLU's gradients of 1024."""
    with collecting(Hopper) as found:
        x, gate_up, down = (empty(s, bfloat16, CUDA) for s in ((8, 1024, 64), (8, 1024, 2048), (64, 1024)))
        made, weight = empty(gate_up.shape, bfloat16, CUDA), empty((2048, 64), bfloat16, CUDA)
        linear.linear(made, x, weight, None, gate_up, fp8=fewest)
        swiglu.swiglu_linear_backward(made, x, down, gate_up, fp8=fewest)
    return [kernel.fn.__name__ for kernel, _ in found.values()]


def gate_and_up_in_8_bits() -> list[str]:
    """The kernels of gate and up."""
    with collecting(Hopper) as found:
        x, gate_up, h = (empty((8, 1024, n), bfloat16, CUDA) for n in (64, 2048, 1024))
        gated.quantized_gemm_swiglu_into(*map(as_matrix, (h, gate_up, x)), empty((2048, 64), bfloat16, CUDA))
    return [kernel.fn.__name__ for kernel, _ in found.values()]


def rows_of(call: str) -> list[dict[str, Any]]:
    """What a function of this module gives where kernels are compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = f"import json; from tests.kernels.test_gemm_warp_specialized import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    assert max((row["shared"] for row in rows if "shared" in row), default=0) <= H200.shared_memory
    return rows


def check_tiles(rows: list[dict[str, Any]], dtypes: list[str]) -> None:
    """That few tiles take none of the forms and many all, and with how many warps each is compiled."""
    chosen = [row for row in rows if "few" in row]
    assert chosen == [{"few": dict.fromkeys(FORMS, False), "many": dict.fromkeys(FORMS, True)}] * len(dtypes)
    made = [row for row in rows if "dtype" in row]
    assert {row["dtype"] for row in made} == set(dtypes)
    for dtype in dtypes:
        epilogue_warps = [row["warps"] - warp_specialized.WARPS for row in made if row["dtype"] == dtype]
        assert epilogue_warps == [tile.epilogue_warps for tile in TILES[dtype]][: len(epilogue_warps)]


ALL = [pytest.param(name, len(FORMS), marks=pytest.mark.full) for name in ("bfloat16", "float16")]


@pytest.mark.parametrize(("name", "count"), [("bfloat16", 1), *ALL])
def test_each_form_compiles(name: str, count: int) -> None:
    rows = rows_of(f"compiled({name}, {count})")
    check_tiles(rows, [f"genesis.{name}"])
    assert len(rows) == 1 + count


@pytest.mark.full
def test_forms_in_8_bits_and_with_pairs_compile() -> None:
    rows = rows_of("compiled_others()")
    check_tiles(rows, ["fp8 64", f"fp8 {LONG}"])
    names = [row["adapted"] for row in rows if "adapted" in row]
    assert names.count("gemm_ws") == 3
    assert "concat_columns_kernel" in names


@pytest.mark.full
def test_which_layers_are_in_8_bits() -> None:
    forward, plain = ["quantize_rows_kernel", "gemm_ws"], ["gemm_ws"]
    backward = ["quantize_rows_kernel", "quantize_transposed_kernel", "quantize_rows_kernel", "gemm_ws"]
    assert rows_of("chosen_others()") == [{"quantized": [forward + backward, forward + plain, plain * 2, forward]}]


@pytest.mark.parametrize("lead", [(8192,), (8, 1024)])
def test_a_linear_layer_with_residual_uses_it(lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warp_specialized, "is_interpreted", lambda: False)
    with collecting(Hopper) as found, mock.patch.object(warp_specialized, "launch") as launch:
        x, weight = (empty(s, bfloat16, CUDA) for s in ((*lead, 64), (1024, 64)))
        out, residual = (empty((*lead, 1024), bfloat16, CUDA) for _ in range(2))
        linear.linear(out, x, weight, None, residual)
    assert [call.args[0] for call in launch.call_args_list] == [warp_specialized.gemm_ws] and not found


# --- On a GPU ---------------------------------------------------------------------------------------------------------

SHAPES = [(8192, 896, 896), (5000, 1032, 904), (32769, 264, 72)]  # m, n, k: also with partial tiles in every direction


@pytest.fixture
def hopper() -> None:
    if backend_of(CUDA).driver.properties.capability[0] != 9:
        pytest.skip("for GPUs of compute capability 9")


def random(rng: np.random.Generator, dtype: DType, *shape: int) -> Array:
    array = empty(shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(rng.normal(size=shape).astype(np.float32).astype(dtype.numpy), array)
    return array


def poisoned(dtype: DType, *shape: int) -> Array:
    array = empty(shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.full(shape, np.nan).astype(dtype.numpy), array)
    return array


def close(found: Array, wanted: Array, units: float = 1) -> None:
    """Equal but for `units` in the last place of the type, of the larger of value and 1."""
    a, b = found.numpy().astype(np.float64), wanted.numpy().astype(np.float64)
    unit = 2.0 ** -(7 if found.dtype is bfloat16 else 10)
    assert np.isfinite(a).all()
    excess = np.abs(a - b) - units * unit * np.maximum(np.abs(b), 1)
    assert excess.max() <= 0, f"{(excess > 0).sum()} elements are over by up to {excess.max()}"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k", "columns"), [*((*s, 256) for s in SHAPES), (8191, 576, 576, 128)])
def test_a_residual_is_added(m: int, n: int, k: int, columns: int, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    x, weight, residual = random(rng, dtype, m, k), random(rng, dtype, n, k), random(rng, dtype, m, n)
    product, out = empty((m, n), dtype, CUDA), poisoned(dtype, m, n)
    linalg.matmul_into(product, x, weight, transpose_b=True)
    assert warp_specialized.ws_residual_into(out, x, weight, residual, columns=columns)
    wanted = (product.numpy().astype(np.float32) + residual.numpy().astype(np.float32)).astype(dtype.numpy)
    np.testing.assert_array_equal(out.numpy(), wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gate_and_up(m: int, n: int, k: int, dtype: DType) -> None:
    rng = np.random.default_rng(1)
    x, weight = random(rng, dtype, m, k), random(rng, dtype, 2 * n, k)
    wanted, wanted_h = empty((m, 2 * n), dtype, CUDA), empty((m, n), dtype, CUDA)
    linalg.matmul_into(wanted, x, weight, transpose_b=True)
    swiglu.swiglu_packed(wanted_h, wanted)
    gate_up, h = poisoned(dtype, m, 2 * n), poisoned(dtype, m, n)
    assert warp_specialized.ws_swiglu_into(h, gate_up, x, weight)
    np.testing.assert_array_equal(gate_up.numpy(), wanted.numpy())
    close(h, wanted_h)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gradients_of_gate_and_up(m: int, n: int, k: int, dtype: DType) -> None:
    rng = np.random.default_rng(2)
    g, weight, gate_up = random(rng, dtype, m, k), random(rng, dtype, k, n), random(rng, dtype, m, 2 * n)
    dh, wanted, wanted_h = (empty(s, dtype, CUDA) for s in ((m, n), (m, 2 * n), (m, n)))
    linalg.matmul_into(dh, g, weight)
    swiglu.swiglu_packed_backward((wanted, wanted_h), dh, gate_up, with_result=True)
    d, h = poisoned(dtype, m, 2 * n), poisoned(dtype, m, n)
    assert warp_specialized.ws_swiglu_backward_into(d, h, g, weight, gate_up)
    close(d, wanted)
    close(h, wanted_h)
    again = poisoned(dtype, m, 2 * n)
    assert warp_specialized.ws_swiglu_backward_into(again, None, g, weight, gate_up)
    np.testing.assert_array_equal(again.numpy(), d.numpy())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gate_and_up_with_pairs(m: int, n: int, k: int, factors: bool, rank: int) -> None:
    """As by products of their own, with one rounding; with factors, which make one more, with two."""
    rng = np.random.default_rng(4)
    x, weight, a, b = (
        random(rng, bfloat16, *shape) for shape in ((m, k), (2 * n, k), (2 * rank, k), (2 * n, rank))
    )  # fmt: skip
    c = random(rng, float32, 2 * n) if factors else None
    low_rank = LowRank((Pair(0, n, rank, 0.5), Pair(n, 2 * n, rank, 0.5)), 2 + factors)
    u, gate_up, h = (poisoned(bfloat16, m, size) for size in (2 * rank, 2 * n, n))
    assert gated.adapted_gemm_swiglu_into(h, gate_up, u, x, weight, Operands([a], [b], c), low_rank)
    wide = empty((m, 2 * n), float32, CUDA)
    linalg.matmul_into(wide, x, weight, transpose_b=True)
    for i in range(2):
        part = slice(i * n, (i + 1) * n)
        columns, own = (window(y, i * size, (i + 1) * size) for y, size in ((wide, n), (u, rank)))
        rows = b.view((n, rank), (rank, 1), part.start * rank)
        linalg.matmul_into(columns, own, rows, transpose_b=True, accumulate=True)
    wanted = wide.numpy() if c is None else wide.numpy().astype(bfloat16.numpy).astype(np.float32) * c.numpy()
    found = gate_up.numpy().astype(np.float32)
    # a sum in another order may round to the neighbour, before factors make the last rounding
    np.testing.assert_array_less(np.abs(found - wanted), 2.0 ** (-6 if factors else -7) * np.abs(wanted) + 2.0**-6)
    wanted_h = empty((m, n), bfloat16, CUDA)
    swiglu.swiglu_packed(wanted_h, gate_up)
    close(h, wanted_h)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gradients_of_gate_and_up_with_a_pair(m: int, n: int, k: int, rank: int) -> None:
    rng = np.random.default_rng(5)
    g, weight, gate_up = random(rng, bfloat16, m, k), random(rng, bfloat16, k, n), random(rng, bfloat16, m, 2 * n)
    v, a, wide = random(rng, bfloat16, m, rank), random(rng, bfloat16, rank, n), empty((m, n), float32, CUDA)
    linalg.matmul_into(wide, g, weight)
    linalg.matmul_into(wide, v, a, accumulate=True)
    dh, wanted, wanted_h = (
        random(rng, bfloat16, m, n),
        empty(gate_up.shape, bfloat16, CUDA),
        empty((m, n), bfloat16, CUDA),
    )
    backend_for(CUDA).from_numpy(wide.numpy().astype(bfloat16.numpy), dh)
    swiglu.swiglu_packed_backward((wanted, wanted_h), dh, gate_up, with_result=True)
    d, h = poisoned(bfloat16, m, 2 * n), poisoned(bfloat16, m, n)
    swiglu.swiglu_linear_backward((d, h), g, weight, gate_up, v, a, with_result=True)
    close(d, wanted, units=3)
    close(h, wanted_h)


# m, n, k with k on both sides of where sums are promoted
QUANTIZED = [(8192, 896, 896), (5000, 1040, 912), (3001, 896, 4864), (8192, 272, 2064)]


def plain(out: Array, x: Array, y: Array, *, columns: bool, **more: Array) -> Array:
    """The GEMM of the same codes by the kernel used elsewhere, in float32."""
    left, right, scales = (fp8.quantize_operands if columns else fp8.quantize_scaled_operands)(x, y)
    with mock.patch.object(linalg, "_launch_warp_specialized", return_value=False):
        linalg.matmul_into(out, left, right, transpose_b=True, scales=linalg.Scales(scales, columns), **more)
    return out


def near(found: Array, wanted: Array) -> None:
    """Equal but for two roundings, of numbers as large as the largest but for a few."""
    a, b = found.numpy().astype(np.float64), wanted.numpy().astype(np.float64)
    assert np.isfinite(a).all()
    root = np.sqrt((b**2).mean())
    np.testing.assert_array_less(np.abs(a - b), 2.0**-7 * (np.abs(b) + root))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("m", "n", "k"), QUANTIZED)
def test_a_residual_is_added_to_a_gemm_of_8_bit_floats(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(0)
    x, weight, residual = random(rng, bfloat16, m, k), random(rng, bfloat16, n, k), random(rng, bfloat16, m, n)
    out, wanted = poisoned(bfloat16, m, n), empty((m, n), bfloat16, CUDA)
    linear.linear(out, x, weight, None, residual, fp8=1)
    near(out, plain(wanted, x, weight, columns=True, residual=residual))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("m", "n", "k"), QUANTIZED)
def test_gemms_of_8_bit_floats_are_scaled(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(2)
    x, weight, wanted = random(rng, bfloat16, m, k), random(rng, bfloat16, n, k), empty((m, n), bfloat16, CUDA)
    out = poisoned(bfloat16, m, n)
    linear.linear(out, x, weight, fp8=1)
    near(out, plain(wanted, x, weight, columns=True))
    fp8.quantized_matmul(out, x, transposed := random(rng, bfloat16, k, n))
    near(out, plain(wanted, x, transposed, columns=False))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("m", "n", "k"), QUANTIZED)
def test_gate_and_up_and_their_gradients_in_8_bit_floats(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(1)
    x, weight, down = random(rng, bfloat16, m, k), random(rng, bfloat16, 2 * n, k), random(rng, bfloat16, k, n)
    wanted, wanted_h = empty((m, 2 * n), bfloat16, CUDA), empty((m, n), bfloat16, CUDA)
    gate_up, h = poisoned(bfloat16, m, 2 * n), poisoned(bfloat16, m, n)
    gated.quantized_gemm_swiglu_into(h, gate_up, x, weight)
    near(gate_up, plain(wanted, x, weight, columns=True))
    swiglu.swiglu_packed(wanted_h, gate_up)
    close(h, wanted_h)
    dh, d = empty((m, n), bfloat16, CUDA), poisoned(bfloat16, m, 2 * n)
    swiglu.swiglu_linear_backward(d, x, down, gate_up, fp8=1)
    swiglu.swiglu_packed_backward(wanted, plain(dh, x, down, columns=False), gate_up)
    near(d, wanted)
