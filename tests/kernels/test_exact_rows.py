"""Exact matmuls of up to 32 rows: they compile and, on Hopper, have the bits of wide_rows.py, whatever the rows."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from genesis.array import empty
from genesis.autograd.modes import exact, fixed_weights, no_grad
from genesis.backend import Device
from genesis.backend.cuda import backend_of, compile
from genesis.dtypes import bfloat16, float32
from genesis.kernels.decode.exact_rows import choose_exact_tile, exact_rows_into
from genesis.kernels.decode.wide_rows import choose_tile, takes_norm, wide_rows_linear_into, wide_rows_swiglu_into
from genesis.kernels.gemm import norm_linear
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import H200, Hopper
from tests.kernels.test_wide_rows import on_gpu

CUDA = Device("cuda", 0)


def compiled() -> list[Any]:
    """What the compiled kernel takes; for a process without the interpreter, which changes Triton."""
    with collecting(Hopper) as found, no_grad(), exact(), fixed_weights(True):
        out, x, w = (empty(shape, bfloat16, CUDA) for shape in ((5, 896), (5, 4864), (896, 4864)))
        wide_rows_linear_into(out, x, [w], [], out)
    ((kernel, signature),) = found.values()
    made = compile.compile_kernel(kernel, signature, (9, 0))
    return [kernel.fn.__name__, made.warps, made.shared]


@pytest.mark.full
def test_it_compiles() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = "import json; from tests.kernels.test_exact_rows import compiled; print(json.dumps(compiled()))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    name, warps, shared = json.loads(done.stdout)
    assert (name, warps) == ("exact_rows_kernel", 1)
    assert shared <= H200.shared_memory


def bits(a: Any) -> np.ndarray:
    found: np.ndarray = a.numpy().astype(np.float32).view(np.uint32)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 8, 9, 17, 32])
@pytest.mark.parametrize(("n", "k"), [(1032, 896), (96, 4864), (1000, 64)])
def test_it_has_the_bits_of_wide_tiles(m: int, n: int, k: int) -> None:
    """Memory held NaN. Values have many magnitudes, so another order of the terms gives other bits."""
    if backend_of(CUDA).driver.properties.capability[0] != 9:
        pytest.skip("for GPUs of compute capability 9")
    rng = np.random.default_rng(m)

    def values(*shape: int) -> Any:
        return on_gpu(rng.normal(size=shape) * np.exp(rng.normal(size=shape)), bfloat16)

    def poisoned(*shape: int) -> Any:
        return on_gpu(np.full(shape, np.nan), bfloat16)

    x, w, bias, residual = values(m, k), values(2 * n, k), values(2 * n), values(m, 2 * n)
    with no_grad():
        for b, r in itertools.product((None, bias), (None, residual)):
            found, wanted = poisoned(m, 2 * n), poisoned(m, 2 * n)
            exact_rows_into(found, None, x, w, b, r)
            whole = choose_tile(m, 2 * n, k, 132, shares=False)
            wide_rows_linear_into(wanted, x, [w], [] if b is None else [b], r, whole)
            np.testing.assert_array_equal(bits(found), bits(wanted))
    (h, gate_up), (wanted_h, wanted) = ((poisoned(m, n), poisoned(m, 2 * n)) for _ in range(2))
    exact_rows_into(gate_up, h, x, w, None, None)
    wide_rows_swiglu_into(wanted_h, wanted, x, w, choose_tile(m, n, k, 132, 2))  # without no_grad it stores gate_up
    np.testing.assert_array_equal(bits(gate_up), bits(wanted))
    np.testing.assert_array_equal(bits(h), bits(wanted_h))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 896, 4096])
def test_a_norm_has_the_bits_of_a_kernel_of_its_own(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend_of(CUDA).driver.properties.capability[0] != 9:
        pytest.skip("for GPUs of compute capability 9")
    rng = np.random.default_rng(k)
    x, scale, w, bias = (on_gpu(rng.normal(size=s) * np.exp(rng.normal(size=s)), bfloat16) for s in (
        (1, k), (k,), (264, k), (264,)
    ))  # fmt: skip
    results = []
    for takes in (takes_norm, lambda *arrays: False):
        monkeypatch.setattr(norm_linear, "takes_norm", takes)
        out = on_gpu(np.full((1, 264), np.nan), bfloat16), empty((1, 1), float32, CUDA)
        with no_grad(), exact():
            norm_linear.norm_linear(out, x, scale, w, bias, eps=1e-6)
        results.append([bits(each) for each in out])
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_tiles_fit() -> None:
    for m, k in itertools.product((1, 8, 9, 16, 17, 32), (64, 896, 8960)):
        t = choose_exact_tile(m, k)
        assert t.bx >= m and t.stages >= 1
        assert t.stages * t.boxes * 128 * (16 + t.bx) + 2 * t.length <= 128 << 10
