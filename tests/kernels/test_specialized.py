"""Products whose warps divide the work: compiled everywhere, and on a GPU of Hopper's kind right to the last bit that
the kernels give which stand in for them elsewhere.
"""

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
from genesis.dtypes import DType, bfloat16, float16
from genesis.kernels import gated, linalg, linear, specialized, swiglu
from tests.kernels.dry import VoidDriver, collecting

CUDA = Device("cuda", 0)
H200 = Properties("NVIDIA H200", (9, 0), 139 << 30, 132, 227 << 10, 50 << 20)


class Hopper(VoidDriver):
    """An H200 on which nothing runs."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.properties = H200


FORMS = ["add", "gate", "gate_backward", "gate_backward and h"]


def launch_all(dtype: DType, m: int) -> dict[str, bool]:
    """Each form once, on memory of any content."""

    def made(*shape: int) -> Array:
        return empty(shape, dtype, CUDA)

    x, gate_up, h = made(m, 64), made(m, 2048), made(m, 1024)
    found = [
        specialized.product_and_residual_into(made(m, 1024), x, made(1024, 64), made(m, 1024)),
        specialized.gated_into(h, gate_up, x, made(2048, 64)),
        specialized.gated_backward_into(made(m, 2048), None, x, made(64, 1024), gate_up),
        specialized.gated_backward_into(made(m, 2048), h, x, made(64, 1024), gate_up),
    ]
    return dict(zip(FORMS, found, strict=True))


def compiled() -> list[dict[str, Any]]:
    """The forms compiled in both types; for a process without the interpreter, which changes Triton."""
    rows = []
    for dtype in (bfloat16, float16):
        with collecting(Hopper) as found:
            few = launch_all(dtype, 128)
            assert not found
            many = launch_all(dtype, 8192)
        for kernel, signature in found.values():
            made = compile.compile_kernel(kernel, signature, (9, 0))
            rows.append({"dtype": str(dtype), "warps": made.warps, "shared": made.shared})
        rows.append({"few": few, "many": many})
    return rows


def test_each_form_compiles() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = "import json; from tests.kernels.test_specialized import compiled; print(json.dumps(compiled()))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    chosen = [row for row in rows if "few" in row]
    assert chosen == [{"few": dict.fromkeys(FORMS, False), "many": dict.fromkeys(FORMS, True)}] * 2  # few tiles, many
    made = [row for row in rows if "dtype" in row]
    assert sorted(row["dtype"] for row in made) == sorted([str(bfloat16), str(float16)] * 4)
    assert {row["warps"] for row in made} == {specialized.WARPS + specialized.FINISHERS}
    assert max(row["shared"] for row in made) <= H200.shared_memory


@pytest.mark.parametrize("lead", [(8192,), (8, 1024)])
def test_a_linear_layer_with_residual_takes_it(lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with collecting(Hopper) as found, mock.patch.object(specialized, "is_interpreted", return_value=False):
        x, weight = (empty(s, bfloat16, CUDA) for s in ((*lead, 64), (1024, 64)))
        out, residual = (empty((*lead, 1024), bfloat16, CUDA) for _ in range(2))
        linear.linear(out, x, weight, None, residual)
    assert [kernel.fn.__name__ for kernel, _ in found.values()] == ["specialized"]


# --- On a GPU ---------------------------------------------------------------------------------------------------------

SHAPES = [(8192, 896, 896), (5000, 1032, 904), (32769, 264, 72)]  # m, n, k: also with edges in every direction


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
    np.testing.assert_array_less(np.abs(a - b), units * unit * np.maximum(np.abs(b), 1) + 1e-30)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_residual_is_added(m: int, n: int, k: int, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    x, weight, residual = random(rng, dtype, m, k), random(rng, dtype, n, k), random(rng, dtype, m, n)
    product, out = empty((m, n), dtype, CUDA), poisoned(dtype, m, n)
    linalg.matmul_into(product, x, weight, turned=True)
    assert specialized.product_and_residual_into(out, x, weight, residual)
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
    linalg.matmul_into(wanted, x, weight, turned=True)
    swiglu.swiglu_packed(wanted_h, wanted)
    gate_up, h = poisoned(dtype, m, 2 * n), poisoned(dtype, m, n)
    assert gated.gated_product_into(h, gate_up, x, weight)
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
    assert specialized.gated_backward_into(d, h, g, weight, gate_up)
    close(d, wanted)
    close(h, wanted_h)
    again = poisoned(dtype, m, 2 * n)
    assert specialized.gated_backward_into(again, None, g, weight, gate_up)
    np.testing.assert_array_equal(again.numpy(), d.numpy())
