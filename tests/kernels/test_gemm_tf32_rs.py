"""tf32 GEMMs with an MN-major operand B: when they are chosen and, on Hopper, their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of, compile
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.dtypes import float32
from genesis.kernels.gemm import linalg, tf32_rs
from tests.kernels.collecting import collecting
from tests.kernels.test_gemm_warp_specialized import H200, Hopper

CUDA = Device("cuda", 0)


@pytest.fixture
def tf32() -> Iterator[None]:
    before = allow_tf32.set(True)
    yield
    allow_tf32.set(before)


def compiled() -> list[Any]:
    """What a compiled kernel takes; for a process without the interpreter, which changes Triton."""
    allow_tf32.set(True)
    with collecting(Hopper) as found:
        x = empty((2048, 2048), float32, CUDA)
        linalg.matmul_into(empty((2048, 2048), float32, CUDA), x, x)
    ((kernel, signature),) = found.values()
    made = compile.compile_kernel(kernel, signature, (9, 0))
    return [kernel.fn.__name__, made.warps, made.shared]


@pytest.mark.full
def test_it_compiles() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = "import json; from tests.kernels.test_gemm_tf32_rs import compiled; print(json.dumps(compiled()))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    name, warps, shared = json.loads(done.stdout)
    assert (name, warps) == ("gemm_tf32_rs", tf32_rs.WARPS)
    assert shared <= H200.shared_memory


@pytest.mark.parametrize(
    ("m", "n", "k", "chosen"),
    [
        (2048, 2048, 2048, True),
        (4096, 4096, 4096, True),
        (2048, 2048, 1056, False),  # many steps beyond k
        (2048, 2040, 2048, False),  # rows that begin anywhere
        (1024, 1024, 2048, False),  # leaves SMs idle
        (2048, 2432, 2048, False),  # its second round does
        (8192, 8192, 2048, False),  # so many rounds that a copy is profitable
        (2048, 2048, 2046, False),  # rows of no 16 bytes
    ],
)
def test_it_is_chosen_where_faster(m: int, n: int, k: int, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32_rs, "is_interpreted", lambda: False)
    with collecting(Hopper), mock.patch.object(tf32_rs, "launch") as launch:
        x, y, out = (empty(shape, float32, CUDA) for shape in ((m, k), (k, n), (m, n)))
        assert tf32_rs.gemm_tf32_rs_into(out, x, y) == chosen
    assert launch.call_count == chosen


# --- On a GPU ---------------------------------------------------------------------------------------------------------


def filled(values: np.ndarray) -> Array:
    array = empty(values.shape, float32, CUDA)
    backend_for(CUDA).from_numpy(values.astype(np.float32), array)
    return array


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(("m", "n", "k"), [(2048, 2048, 256), (2000, 2016, 480), (4000, 4128, 256)])
def test_operands_are_rounded_to_nearest(m: int, n: int, k: int) -> None:
    """Operands are within 2^-11 of numbers that tf32 holds, which alone matter."""
    if backend_of(CUDA).driver.properties.capability[0] != 9:
        pytest.skip("for GPUs of compute capability 9")
    rng = np.random.default_rng(3)
    near_x, near_y = (rng.integers(512, 1024, shape) / 512 * rng.choice((-1, 1), shape) for shape in ((m, k), (k, n)))
    x, y = (near + rng.uniform(-0.9, 0.9, near.shape) * 2.0**-11 for near in (near_x, near_y))
    out = filled(np.full((m, n), np.nan))
    launched: list[str] = []

    def spy(kernel: Any, *args: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        tf32_rs_launch(kernel, *args, **constants)

    tf32_rs_launch = tf32_rs.launch
    with mock.patch.object(tf32_rs, "launch", spy):
        linalg.matmul_into(out, filled(x), filled(y))
    assert launched == ["gemm_tf32_rs"]
    # In each step of 8 products the tensor cores align 9 terms to the largest and truncate below 2^-23 of it; sums
    # of products of mean 0 and mean square (7/3)^2 stay within 6 of their standard deviations.
    bound = k / 8 * 9 * 2.0**-23 * 6 * 7 / 3 * k**0.5
    want = near_x @ near_y
    assert np.abs(out.numpy() - want).max() < bound
    assert np.abs(x @ y - want).max() > 2 * bound
